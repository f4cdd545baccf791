"""A product with a matrix that may be quantised: the definition."""

from jaxtyping import Float

from dgemma_jax.kernels.quantized import Matrix, dequantized
from dgemma_jax.shapes import Array


def matmul(x: Float[Array, "R K"], matrix: Matrix) -> Float[Array, "R N"]:
    """See `dgemma_jax.kernels.matmul.matmul`."""
    return x @ dequantized(matrix, x.dtype)
