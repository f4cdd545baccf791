"""The dense product of a layer: rows times a matrix, which may be quantised."""

import jax.numpy as jnp
from jaxtyping import Float

from dgemma_jax.kernels.matmul import reference, xla
from dgemma_jax.kernels.quantized import Matrix, Quantized
from dgemma_jax.kernels.shard import Shard
from dgemma_jax.shapes import Array


def _pallas(x: Array, matrix: Matrix, dtype: jnp.dtype) -> Array:
    """`pallas.matmul`, whose backend is a fifth of a second to import: only for those who choose it."""
    from dgemma_jax.kernels.matmul import pallas

    return pallas.matmul(x, matrix, dtype)


IMPLEMENTATIONS = {"reference": reference.matmul, "xla": xla.matmul, "pallas": _pallas}


def matmul(
    x: Float[Array, "R K"], matrix: Matrix, *, shard: Shard | None = None, implementation: str = "auto"
) -> Float[Array, "R N"]:
    """x @ matrix in the dtype of x. implementation: of the product with a quantised matrix; one with an array is XLA's.

    The definition rounds the numbers of a quantised matrix to the dtype of x once; where a product scales sums instead,
    it is a rounding more exact. shard: inside `shard_map`, which part of K this is; the sums of the parts are added in
    fp32, rounded once, and the same on every device.
    """
    if shard is not None and shard.cut:
        return shard.sum(_product(x, matrix, jnp.float32, implementation)).astype(x.dtype)
    return _product(x, matrix, x.dtype, implementation)


def _product(x: Float[Array, "R K"], matrix: Matrix, dtype: jnp.dtype, implementation: str) -> Float[Array, "R N"]:
    if not isinstance(matrix, Quantized):
        return jnp.matmul(x, matrix, preferred_element_type=dtype)
    name = "xla" if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"matmul: implementation {name!r} is unknown; choose from auto, {', '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name](x, matrix, dtype)
