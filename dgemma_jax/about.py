"""What is installed and where it would run: `dgemma --version`."""

import jax

import dgemma_jax as dg
from dgemma_jax.kernels import selection

BYTES = 2  # of a number: the release is stored in bfloat16


def about() -> str:
    """Versions, the device, and what `auto` takes there for the 26B; a line each."""
    device = selection.this_device()
    heads = {layer.kind: layer.head_dim for layer in dg.gemma_26b_a4b().layers}
    attention = selection.attention("auto", device, heads, BYTES)
    return (
        f"dgemma-jax {dg.__version__}\n"
        f"jax {jax.__version__}, {jax.local_device_count()} x {device}\n"
        f"{selection.describe(attention, device, heads, BYTES)}\n"
        f"experts: {selection.experts(device)}"
    )
