"""The Pallas kernel of attention lowered for CUDA on a machine without it, at the shapes of 26B and at odd ones."""

import jax.numpy as jnp
import pytest

from dgemma_jax.kernels.mixed_attention.offline import Case

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton backend is deprecated:DeprecationWarning")


@pytest.mark.parametrize(
    "case",
    [
        Case("sliding", H=256, K=8, S=1024, window=1024),
        Case("full", H=512, K=2, S=8192, window=None),
        Case("a sliding layer in a full buffer", H=256, K=8, S=8192, window=1024),
        Case("the longest prefix", H=512, K=2, S=262144, window=None),
        Case("nothing a multiple of the tile", H=256, K=8, S=1000, window=1000, T=99),
        Case("float32", H=512, K=2, S=8192, window=None, dtype=jnp.float32),
        Case("narrow heads, one group", H=24, K=16, S=100, window=None),
        Case("the patches of an image", H=72, K=16, S=1, window=None, T=2520),
        Case("a prefix in parts", H=512, K=1, S=8192, window=None, T=64),
    ],
    ids=lambda case: case.name,
)
def test_lowers_to_one_triton_call(case):
    text = case.lower("NVIDIA H200").as_text()
    assert text.count("xla.gpu.triton") == 1
    assert "stablehlo.while" not in text  # the interpreter's loop over programs
