"""A product with a quantised matrix, some columns at a time: only those exist as numbers."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int32

from dgemma_jax.kernels.matmul import reference
from dgemma_jax.kernels.quantized import Matrix, after, taken
from dgemma_jax.shapes import Array

TILE_BYTES = 4 << 20  # of the numbers that exist at once
LEAST_COLUMNS = 128


def matmul(
    x: Float[Array, "R K"], matrix: Matrix, dtype: jnp.dtype, *, columns: int | None = None
) -> Float[Array, "R N"]:
    """See `reference.matmul`. columns: at a time; None: as many as TILE_BYTES hold."""
    (R, K), N = x.shape, matrix.shape[1]
    product = partial(reference.matmul, x, dtype=dtype)
    width = columns or max(LEAST_COLUMNS, TILE_BYTES // (K * x.dtype.itemsize) // LEAST_COLUMNS * LEAST_COLUMNS)
    if width >= N:
        return product(after(x, matrix))

    def visit(index: Int32[Array, ""], out: Float[Array, "R N"]) -> Float[Array, "R N"]:
        start = jnp.minimum(index * width, N - width)  # the last tile overlaps the one before it
        part = product(taken(matrix, start, width, axis=1))
        return jax.lax.dynamic_update_slice_in_dim(out, part, start, axis=1)

    # Every column is written. Zeros would be one constant for all layers, which each had to copy first.
    out = jnp.broadcast_to(x[:, :1].astype(dtype), (R, N))
    return jax.lax.fori_loop(0, -(-N // width), visit, out)
