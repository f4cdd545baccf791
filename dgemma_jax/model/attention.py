"""Attention of one layer: projections, norms, rotary positions, then the mixed-causal op."""

from flax import nnx
from jaxtyping import Float, Float32

from dgemma_jax.config import Config, LayerConfig
from dgemma_jax.kernels.mixed_attention import mixed_attention
from dgemma_jax.model.layers import RMSNorm, rms_norm, rotate, weight
from dgemma_jax.shapes import Array, CachedKeys, Hidden, Keys, Lengths, Queries, RowMask


class Attention(nnx.Module):
    """Grouped-query attention with normed queries, keys and values and scale 1.

    Full layers have no value projection: their value is the raw key projection, normed without weight, not rotated.
    """

    def __init__(self, config: Config, layer: LayerConfig, dtype: str, implementation: str):
        D, N, K, H = config.hidden_size, config.num_attention_heads, layer.num_key_value_heads, layer.head_dim
        self.q = weight(D, N, H, dtype=dtype)
        self.k = weight(D, K, H, dtype=dtype)
        if layer.kind == "sliding":
            self.v = weight(D, K, H, dtype=dtype)
        self.o = weight(N, H, D, dtype=dtype)
        self.q_norm = RMSNorm(H, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(H, config.rms_norm_eps, dtype)
        self.eps = config.rms_norm_eps
        self.window = config.sliding_window if layer.kind == "sliding" else None
        self.implementation = implementation

    def project(self, x: Hidden, table: Float32[Array, "2 B T h"]) -> tuple[Array, Keys, Keys]:
        """q f[B,T,N,H], k and v f[B,T,K,H] of normed layer inputs; norm before rotation."""
        q, k = _heads(x, self.q[...]), _heads(x, self.k[...])
        v = k if self.window is None else _heads(x, self.v[...])
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
    ) -> tuple[Hidden, Keys, Keys]:
        """The layer's attention output and the pass's own keys and values, for whoever writes them to the cache."""
        q, k, v = self.project(x, table)
        rows = (prefix_length, own_length, causal)
        how = {"window": self.window, "implementation": self.implementation}
        out = mixed_attention(q, k, v, prefix_k, prefix_v, *rows, **how)
        o = self.o[...]
        return (out.reshape(-1, o.shape[0] * o.shape[1]) @ o.reshape(-1, o.shape[2])).reshape(x.shape), k, v


def _heads(x: Hidden, weight: Float[Array, "D N H"]) -> Queries:
    """x times a projection to heads, as one plain matrix product: its gradient is slow over two leading axes."""
    D, N, H = weight.shape
    return (x.reshape(-1, D) @ weight.reshape(D, N * H)).reshape(*x.shape[:2], N, H)
