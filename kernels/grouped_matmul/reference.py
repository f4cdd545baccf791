"""The expert layer, dense over all experts: the definition, and the differentiable path for training."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from dgemma_jax.kernels.quantized import Quantized, dequantized
from dgemma_jax.shapes import Array


def experts(
    x: Float[Array, "R D"],
    gate_up: Float[Array, "E D F"] | Quantized,
    down: Float[Array, "E I D"] | Quantized,
    weights: Float32[Array, "R A"],
    ids: Int32[Array, "R A"],
    *,
    among: int | None = None,
) -> Float32[Array, "R D"]:
    """See `dgemma_jax.kernels.grouped_matmul.experts`, before the sum is rounded; ids of E are no expert's.

    among: for the others, which cut tokens into blocks.
    """
    gate_up, down = dequantized(gate_up, x.dtype), dequantized(down, x.dtype)
    E, width = gate_up.shape[0], down.shape[1]
    # Ids of one token are distinct, so this is a scatter; a one-hot product keeps it a plain matrix product.
    dense = jnp.sum(jax.nn.one_hot(ids, E, dtype=jnp.float32) * weights[:, :, None], axis=1)
    inner = jnp.einsum("rd,edf->ref", x, gate_up)
    hidden = jax.nn.gelu(inner[..., :width], approximate=True) * inner[..., width:]
    weighted = (hidden.astype(jnp.float32) * dense[:, :, None]).astype(x.dtype)
    return jnp.einsum("rei,eid->rd", weighted, down, preferred_element_type=jnp.float32)
