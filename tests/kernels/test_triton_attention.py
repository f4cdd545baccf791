"""The attention kernels as far as they can be followed without a GPU: the interpreter, machine code, a CUDA program.

Needs the triton wheel, and for the last jax-triton and jax's CUDA wheels: `make gpu-offline` installs and runs all.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from importlib.util import find_spec

import jax.numpy as jnp
import numpy as np
import pytest

from dgemma_jax.kernels.mixed_attention import mixed_attention, offline
from dgemma_jax.kernels.mixed_attention.offline import COMPILERS, GPUS, Case

pytestmark = [
    pytest.mark.gpu_offline,
    pytest.mark.skipif(find_spec("triton") is None, reason="not run: needs the triton wheel; make gpu-offline"),
    pytest.mark.filterwarnings("ignore:.*Pallas Triton backend is deprecated:DeprecationWarning"),
]
with_cuda_wheels = pytest.mark.skipif(
    not (find_spec("jax_triton") and (find_spec("jax_plugins") or find_spec("jax_cuda12_plugin"))),
    reason="not run: needs jax-triton and jax's CUDA wheels; make gpu-offline",
)

SLIDING = Case("sliding", H=256, K=8, S=1024, window=1024)
FULL = Case("full", H=512, K=2, S=8192, window=None)
INTERPRETED = (
    "full",
    "sliding, a ring gone round",
    "several tiles, the prefix in parts",
    "images",
    "no power of two",
)


@pytest.fixture(scope="module")
def interpreted():
    """Errors of the Triton kernel in the interpreter, by case."""
    command = [sys.executable, "-m", "tests.kernels.interpreted_triton"]
    settings = {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", INTERPRETED)
def test_triton_interpreted(interpreted, name):
    out, log_sums = interpreted[name]
    assert out <= 1e-5
    assert log_sums <= 1e-5


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("case", [SLIDING, FULL], ids=lambda case: case.name)
@pytest.mark.parametrize("kernel", COMPILERS)
def test_machine_code_fits_without_spills(kernel, case, gpu):
    code = COMPILERS[kernel](case, gpu)
    assert code.spilled == 0
    assert code.shared <= gpu.shared


def test_triton_counts_elements_in_64_bits():
    """What may exceed 2**31: the offsets of keys and values, and those of the rows of everything else."""
    import triton
    from triton.backends.compiler import GPUTarget

    source, launch = offline.triton_source(SLIDING)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True}).asm["ttir"]
    offsets = Counter(re.findall(r"tt\.addptr .*, (?:tensor<)?([\dx]*i\d\d)", text))
    keys, queries = f"{launch.tile.keys}x{launch.width}x", f"{launch.tile.queries}x1x"
    assert (offsets[keys + "i64"], offsets[keys + "i32"]) == (4, 0)
    assert (offsets[queries + "i64"], offsets[queries + "i32"]) == (2, 0)
    assert (offsets["i64"], offsets["i32"]) == (4, 0)  # the row's length and ranges


@with_cuda_wheels
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_triton_lowers_to_one_call(gpu):
    from dgemma_jax.kernels.mixed_attention import triton

    text = SLIDING.lower(gpu.kind, partial(triton.mixed_attention, capability=gpu.capability)).as_text()
    assert text.count("@triton_kernel_call(") == 1


@with_cuda_wheels
def test_triton_without_a_gpu_says_so():
    f = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    own, prefix, rows = f(1, 4, 1, 16), f(1, 8, 1, 16), jnp.ones(1, jnp.int32)
    with pytest.raises(
        ValueError, match=r"'triton' needs an NVIDIA GPU, and jax runs on 'cpu'; .*choose 'xla'"
    ) as error:
        mixed_attention(own, own, own, prefix, prefix, rows, rows, rows == 1, window=None, implementation="triton")
    assert "\n" not in str(error.value)
