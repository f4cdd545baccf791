"""The grouped products lowered for CUDA on a machine without it, at the shapes of 26B and at odd ones."""

from importlib.util import find_spec

import jax.numpy as jnp
import pytest

from dgemma_jax.kernels import selection
from dgemma_jax.kernels.grouped_matmul import pallas
from dgemma_jax.kernels.grouped_matmul.offline import CASES, FLOAT32, GPUS, QUANTIZED, Case, compile_pallas

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton backend is deprecated:DeprecationWarning")
ODD = {"E": 5, "A": 3, "D": 100, "I": 36}


@pytest.mark.parametrize("product", ["gate_up", "down"])
@pytest.mark.parametrize(
    ("tokens", "shape"),
    [
        *((1, {}), (256, {}), (4096, {}), (256, {"dtype": jnp.float32}), (7, ODD), (7, ODD | {"dtype": jnp.float32})),
        *((256, {"quantization": "int8"}), (256, {"quantization": "int4"}), (7, ODD | {"quantization": "int8"})),
    ],
)
def test_lowers_to_one_triton_call(product, tokens, shape):
    text = Case(product, tokens, **shape).lower("NVIDIA H200").as_text()
    assert text.count("xla.gpu.triton") == 1
    assert "stablehlo.while" not in text  # the interpreter's loop over programs


def test_the_tile_follows_the_tokens_of_an_expert():
    assert [pallas.tile_for(pairs, 128, itemsize=2).rows for pairs in (8, 2048, 2049, 8192, 8193, 10**6)] == [
        *(16, 16, 32),
        *(64, 128, 128),
    ]


@pytest.mark.gpu_offline
@pytest.mark.skipif(find_spec("triton") is None, reason="not run: needs the triton wheel; make gpu-offline")
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("case", [*CASES[:2], *CASES[-2:], *FLOAT32[:1], *QUANTIZED], ids=str)
def test_machine_code_fits_without_spills(case, gpu):
    code = compile_pallas(case, gpu)
    assert code.spilled == 0
    assert code.shared <= min(gpu.shared, selection.EXPERT_BYTES)
