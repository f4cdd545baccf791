"""Attention of one layer: projections, norms, rotary positions, then the mixed-causal op."""

from typing import cast

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float32

from dgemma_jax.config import Config, LayerConfig
from dgemma_jax.kernels.matmul import matmul
from dgemma_jax.kernels.mixed_attention import mixed_attention
from dgemma_jax.kernels.quantized import Weight, as_matrix
from dgemma_jax.model.layers import RMSNorm, rms_norm, rotate, weight
from dgemma_jax.shapes import Array, Blocks, CachedKeys, Hidden, Keys, Lengths, Queries, RowMask
from dgemma_jax.sharding import copies, shard_of


class Attention(nnx.Module):
    """Grouped-query attention with normed queries, keys and values and scale 1.

    Full layers have no value projection: their value is the raw key projection, normed without weight, not rotated.
    On several devices each has some query heads, and the K/V heads that those read.
    """

    def __init__(
        self, config: Config, layer: LayerConfig, dtype: str, implementation: str, dense: str, mesh: Mesh | None
    ):
        D, N, K, H = config.hidden_size, config.num_attention_heads, layer.num_key_value_heads, layer.head_dim
        self.queries, self.keys = shard_of("heads", N, mesh), shard_of("kv_heads", K, mesh)
        self.copies = copies(config, K, mesh)
        self.q = weight(D, N, H, dtype=dtype, axes=(None, self.queries))
        self.k = weight(D, K, H, dtype=dtype, axes=(None, self.keys))
        if layer.kind == "sliding":
            self.v = weight(D, K, H, dtype=dtype, axes=(None, self.keys))
        self.o = weight(N, H, D, dtype=dtype, axes=(self.queries,))
        self.q_norm = RMSNorm(H, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(H, config.rms_norm_eps, dtype)
        self.eps = config.rms_norm_eps
        self.window = config.sliding_window if layer.kind == "sliding" else None
        self.head_dim = H
        self.implementation, self.dense = implementation, dense
        # Where the tokens of an image see each other, see `Config.image_blocks`.
        self.blocks = config.image_blocks == "all" or (config.image_blocks == "sliding" and layer.kind == "sliding")
        self.clip_blocks = config.image_blocks == "sliding"

    def project(self, x: Hidden, table: Float32[Array, "2 B T h"]) -> tuple[Array, Keys, Keys]:
        """q f[B,T,N,H], k and v f[B,T,K,H] of normed layer inputs; norm before rotation."""
        q, k = self.heads(x, self.q[...]), self.heads(x, self.k[...])
        v = k if self.window is None else self.heads(x, self.v[...])
        if self.queries.cut and not self.keys.cut:
            k, v = self.own(k), self.own(v)
        return rotate(self.q_norm(q), table), rotate(self.k_norm(k), table), rms_norm(v, self.eps)

    def __call__(
        self,
        x: Hidden,
        table: Float32[Array, "2 B T h"],
        prefix_k: CachedKeys,
        prefix_v: CachedKeys,
        prefix_length: Lengths,
        own_length: Lengths,
        causal: RowMask,
        blocks: Blocks | None = None,
    ) -> tuple[Hidden, Keys, Keys]:
        """The layer's attention output and the pass's own keys and values, for whoever writes them to the cache."""
        q, k, v = self.project(x, table)
        rows = (prefix_length, own_length, causal)
        how = {"window": self.window, "implementation": self.implementation}
        if blocks is not None and self.blocks:
            how |= {"blocks": blocks, "clip_blocks": self.clip_blocks}
        out = cast(Queries, mixed_attention(q, k, v, prefix_k, prefix_v, *rows, **how))
        joined = out.reshape(-1, out.shape[2] * out.shape[3])
        how = {"shard": self.queries, "implementation": self.dense}
        return matmul(joined, as_matrix(self.o[...], inputs=2), **how).reshape(x.shape), k, v

    def heads(self, x: Hidden, projection: Weight) -> Queries:
        """x times a projection to heads, as one plain matrix product: its gradient is slow over two leading axes."""
        out = matmul(x.reshape(-1, x.shape[-1]), as_matrix(projection, inputs=1), implementation=self.dense)
        return out.reshape(*x.shape[:2], -1, self.head_dim)

    def own(self, heads: Keys) -> Array:
        """Of K/V heads that every device has all of, those that this device's query heads read."""
        heads = jnp.repeat(heads, self.copies, axis=2)
        return self.queries.part(heads, axis=2, length=heads.shape[2] // self.queries.count)
