"""A product with a quantised matrix in Pallas (Triton): the experts' kernel, with one expert that has all rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from dgemma_jax.kernels.grouped_matmul.pallas import Tile, grouped, tile_for
from dgemma_jax.kernels.grouped_matmul.xla import Plan
from dgemma_jax.kernels.quantized import Matrix
from dgemma_jax.shapes import Array


def matmul(
    x: Float[Array, "R K"], matrix: Matrix, dtype: jnp.dtype, *, tile: Tile | None = None
) -> Float[Array, "R N"]:
    """See `reference.matmul`. tile: instead of the one chosen by shape."""
    R = x.shape[0]
    tile = tile or tile_for(R, 1, x.dtype.itemsize)
    blocks = -(-R // tile.rows)
    pairs = jnp.minimum(jnp.arange(blocks * tile.rows, dtype=jnp.int32), R)
    where = Plan(
        slots=jnp.arange(R, dtype=jnp.int32)[:, None],
        pairs=pairs,
        expert=jnp.zeros(blocks, jnp.int32),
        used=jnp.int32(blocks),
    )
    matrices = jax.tree.map(lambda part: part[None], matrix)
    return grouped(where, x, matrices, tile, rows=R, gated=False, dtype=dtype)
