"""Mixed-causal attention with an online softmax over blocks of the prefix: reads what is used, keeps no S x T mask.

Source: online softmax (arXiv 1805.02867) as in FlashAttention (arXiv 2205.14135).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int32

from dgemma_jax.kernels.mixed_attention.ranges import key_ranges
from dgemma_jax.shapes import Array, Blocks, CachedKeys, Keys, Lengths, LogSums, Queries, RowMask

BLOCK = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Running:
    """Per query: the largest score so far, the sum of weights and the weighted sum of values relative to it."""

    peak: Float32[Array, "B K G T"]
    total: Float32[Array, "B K G T"]
    out: Float32[Array, "B K G T H"]


def mixed_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    prefix_k: CachedKeys,
    prefix_v: CachedKeys,
    prefix_length: Lengths,
    own_length: Lengths,
    causal: RowMask,
    blocks: Blocks | None = None,
    *,
    window: int | None,
    block: int = BLOCK,
) -> tuple[Queries, LogSums]:
    """See `dgemma_jax.kernels.mixed_attention.mixed_attention`. block: cached positions taken at once."""
    B, T, N, H = q.shape
    K, S = k.shape[2], prefix_k.shape[1]
    block = min(block, S)
    grouped = q.reshape(B, T, K, N // K, H)
    ranges = key_ranges(prefix_length, own_length, causal, blocks, slots=S, tokens=T, window=window)
    written = jnp.minimum(prefix_length, S)[:, None]

    def visit(index: Int32[Array, ""], running: Running) -> Running:
        begin = jnp.minimum(index * block, S - block)  # the last block may overlap the one before
        slot = begin + jnp.arange(block)
        age = (prefix_length[:, None] - 1 - slot) % S  # 0: the newest position
        fresh = (age < written) & (slot >= index * block)
        mask = fresh[:, None] & (age[:, None] < ranges.cached[:, :, None])
        keys, values = (jax.lax.dynamic_slice_in_dim(x, begin, block, axis=1) for x in (prefix_k, prefix_v))
        # What was never written may be NaN, and 0 * NaN would poison the sum.
        values = jnp.where(fresh[:, :, None, None], values, 0)
        return _add(running, grouped, keys.astype(k.dtype), values.astype(v.dtype), mask)

    key = jnp.arange(T)
    own = (key >= ranges.first[:, :, None]) & (key < ranges.last[:, :, None])
    running = _add(_empty(grouped), grouped, k, v, own)
    used = -(-jnp.max(written) // block)
    running = jax.lax.fori_loop(0, used, visit, running)
    out = running.out / jnp.where(running.total == 0, 1.0, running.total)[..., None]
    log_sums = running.peak + jnp.log(running.total)
    return jnp.moveaxis(out, 3, 1).reshape(B, T, N, H).astype(q.dtype), jnp.moveaxis(log_sums, 3, 1).reshape(B, T, N)


def _empty(q: Float[Array, "B T K G H"]) -> Running:
    B, T, K, G, H = q.shape
    zeros = jnp.zeros((B, K, G, T), jnp.float32)
    return Running(jnp.full_like(zeros, -jnp.inf), zeros, jnp.zeros((B, K, G, T, H), jnp.float32))


def _add(old: Running, q: Float[Array, "B T K G H"], k: Keys, v: Keys, mask: Bool[Array, "#B #T #s"]) -> Running:
    """The running sums with one more block of keys; k, v f[B,s,K,H]."""
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    peak = jnp.maximum(old.peak, jnp.max(scores, axis=-1))
    base = jnp.where(jnp.isfinite(peak), peak, 0.0)  # a query that has seen no key yet keeps weights of zero
    weights = jnp.exp(scores - base[..., None])
    keep = jnp.exp(old.peak - base)
    out = jnp.einsum("bkgts,bskh->bkgth", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Running(peak, old.total * keep + jnp.sum(weights, axis=-1), old.out * keep[..., None] + out)
