"""Which implementations a model runs: what suits its devices, or what was asked for."""

from jax.sharding import Mesh

from dgemma_jax.config import Config
from dgemma_jax.kernels import selection
from dgemma_jax.model.transformer import Implementations


def choose(attention: str, config: Config, itemsize: int, mesh: Mesh | None) -> tuple[Implementations, str]:
    """What runs on the mesh's devices, without one on this process' first, and that in words.

    attention: "auto" or a name, see `dgemma_jax.load`. itemsize: bytes of a number. ValueError for what cannot run.
    """
    heads = {layer.kind: layer.head_dim for layer in config.layers}
    device = selection.this_device(None if mesh is None else mesh.devices.flat[0])
    found = Implementations(
        attention=selection.attention(attention, device, heads, itemsize),
        experts=selection.experts(device),
        dense=selection.experts(device),
    )
    return found, f"{selection.describe(found.attention, device, heads, itemsize)}; experts: {found.experts}"
