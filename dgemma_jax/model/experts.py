"""Routing and the expert layer's weights."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float, Float32, Int32

from dgemma_jax.config import Config
from dgemma_jax.kernels.grouped_matmul import experts
from dgemma_jax.model.layers import rms_norm, weight
from dgemma_jax.shapes import Array
from dgemma_jax.sharding import shard_of


class Router(nnx.Module):
    """Chooses A experts per token from the raw residual stream, which it norms without weight on its own."""

    def __init__(self, config: Config, dtype: str):
        self.proj = weight(config.hidden_size, config.num_experts, dtype=dtype)
        self.scale = weight(config.hidden_size, dtype=dtype)
        self.per_expert_scale = weight(config.num_experts, dtype=dtype)
        self.eps = config.rms_norm_eps
        self.chosen = config.top_k_experts

    def __call__(self, x: Float[Array, "R D"]) -> tuple[Float32[Array, "R A"], Int32[Array, "R A"]]:
        """Weights and ids of each token's experts: softmax over all, the A largest, renormalised, then scaled."""
        normed = rms_norm(x, self.eps) * self.scale[...] * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        probabilities = jax.nn.softmax((normed @ self.proj[...]).astype(jnp.float32), axis=-1)
        weights, ids = jax.lax.top_k(probabilities, self.chosen)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights * self.per_expert_scale[...].astype(jnp.float32)[ids], ids


class Experts(nnx.Module):
    """The experts' matrices in the layout of the product: gate and up side by side. Devices share whole experts."""

    def __init__(self, config: Config, dtype: str, implementation: str, mesh: Mesh | None):
        E, D, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.shard = shard_of("experts", E, mesh)
        self.gate_up = weight(E, D, 2 * width, dtype=dtype, axes=(self.shard,))
        self.down = weight(E, width, D, dtype=dtype, axes=(self.shard,))
        self.implementation = implementation

    def __call__(
        self, x: Float[Array, "R D"], weights: Float32[Array, "R A"], ids: Int32[Array, "R A"]
    ) -> Float[Array, "R D"]:
        how = {"shard": self.shard, "implementation": self.implementation}
        return experts(x, self.gate_up[...], self.down[...], weights, ids, **how)
