"""A product with a matrix that may be quantised: the definition."""

import jax.numpy as jnp
from jaxtyping import Float

from dgemma_jax.kernels.quantized import Matrix, dequantized
from dgemma_jax.shapes import Array


def matmul(x: Float[Array, "R K"], matrix: Matrix, dtype: jnp.dtype) -> Float[Array, "R N"]:
    """See `dgemma_jax.kernels.matmul.matmul`. dtype: of the result."""
    return jnp.matmul(x, dequantized(matrix, x.dtype), preferred_element_type=dtype)
