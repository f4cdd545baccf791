"""Mixed-causal attention with an online softmax over blocks of the prefix: reads what is used, keeps no S x T mask.

Source: online softmax (arXiv 1805.02867) as in FlashAttention (arXiv 2205.14135).
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int32

from dgemma_jax.kernels.mixed_attention.ranges import Ranges, key_ranges
from dgemma_jax.shapes import Array, Blocks, CachedKeys, Keys, Lengths, LogSums, Queries, RowMask

CANVAS = 256  # most queries that are taken at once, each time with as many keys of the prefix, or the window's
BLOCK = 64  # in a longer pass with a window: few keys outside the window of any query are looked at


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Running:
    """Per query: the largest score so far, the sum of weights and the weighted sum of values relative to it."""

    peak: Float32[Array, "B K G T"]
    total: Float32[Array, "B K G T"]
    out: Float32[Array, "B K G T H"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prefix:
    """The cached keys and values, and how many positions of each row were written."""

    k: CachedKeys
    v: CachedKeys
    length: Lengths


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
    clip_blocks: bool = False,
    canvas: int = CANVAS,
    block: int | None = None,
) -> tuple[Queries, LogSums]:
    """See `dgemma_jax.kernels.mixed_attention.mixed_attention`. canvas: see CANVAS.

    block: queries, and keys, at a time where there are more than `canvas` queries; None: BLOCK with a window, else
    `canvas`.
    """
    B, T, N, H = q.shape
    K, S = k.shape[2], prefix_k.shape[1]
    sizes = {"slots": S, "tokens": T, "window": window, "clip_blocks": clip_blocks}
    ranges = key_ranges(prefix_length, own_length, causal, blocks, **sizes)
    prefix = Prefix(prefix_k, prefix_v, prefix_length)
    grouped = q.reshape(B, T, K, N // K, H)
    if canvas >= T:
        key = jnp.arange(T)
        own = (key >= ranges.first[:, :, None]) & (key < ranges.last[:, :, None])
        queries = _by_head(grouped)
        running = _add(_empty(queries), queries, k, v, own)
        return _finish(_add_prefix(running, queries, ranges.cached, prefix, min(canvas, window or canvas)), q.dtype)

    if block is None:
        block = canvas if window is None else BLOCK
    parts = -(-T // block)
    split = partial(_split, parts=parts, block=block)
    k, v = (jnp.pad(x, ((0, 0), (0, parts * block - T), (0, 0), (0, 0))) for x in (k, v))

    def attend(part: tuple[Array, Ranges]) -> tuple[Queries, LogSums]:
        queries, ranges = _by_head(part[0]), part[1]
        running = _add_own(_empty(queries), queries, k, v, ranges, block)
        return _finish(_add_prefix(running, queries, ranges.cached, prefix, block), q.dtype)

    out, log_sums = jax.lax.map(attend, (split(grouped), jax.tree.map(split, ranges)))
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(B, parts * block, *x.shape[3:])[:, :T]  # noqa: E731
    return join(out), join(log_sums)


def _by_head(q: Float[Array, "B T K G H"]) -> Float[Array, "B K G T H"]:
    """Queries in the order of the scores, which would else be turned for every block of keys."""
    return jnp.moveaxis(q, 1, 3)


def _split(x: Array, parts: int, block: int) -> Array:
    """[B,T,...] as [parts,B,block,...], filled up with zeros: a query of which sees nothing."""
    rest = [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, ((0, 0), (0, parts * block - x.shape[1]), *rest))
    return jnp.moveaxis(x.reshape(x.shape[0], parts, block, *x.shape[2:]), 1, 0)


def _add_own(running: Running, q: Float[Array, "B K G t H"], k: Keys, v: Keys, ranges: Ranges, block: int) -> Running:
    """The running sums with the blocks of the pass's own keys that any of these queries sees."""
    sees = ranges.last > ranges.first
    begin = jnp.min(jnp.where(sees, ranges.first, k.shape[1])) // block
    end = -(-jnp.max(jnp.where(sees, ranges.last, 0)) // block)

    def visit(index: Int32[Array, ""], running: Running) -> Running:
        key = index * block + jnp.arange(block)
        mask = (key >= ranges.first[:, :, None]) & (key < ranges.last[:, :, None])
        keys, values = (jax.lax.dynamic_slice_in_dim(x, index * block, block, axis=1) for x in (k, v))
        return _add(running, q, keys, values, mask)

    return jax.lax.fori_loop(begin, end, visit, running)


def _add_prefix(
    running: Running, q: Float[Array, "B K G t H"], cached: Int32[Array, "B t"], prefix: Prefix, block: int
) -> Running:
    """The running sums with the blocks of the prefix that hold anything; of a ring these are all once it is full."""
    S, length = prefix.k.shape[1], prefix.length[:, None]
    written = jnp.minimum(length, S)

    def visit(index: Int32[Array, ""], running: Running) -> Running:
        slot = index * block + jnp.arange(block)
        age = (length - 1 - slot) % S  # 0: the newest position
        fresh = (age < written) & (slot < S)
        mask = fresh[:, None] & (age[:, None] < cached[:, :, None])
        keys, values = _block(prefix.k, index, block), _block(prefix.v, index, block)
        # What was never written may be NaN, and 0 * NaN would poison the sum.
        values = jnp.where(fresh[:, :, None, None], values, 0)
        return _add(running, q, keys.astype(q.dtype), values.astype(q.dtype), mask)

    used = jnp.where(jnp.any(cached > 0), -(-jnp.max(written) // block), 0)  # late queries may be past their window
    return jax.lax.fori_loop(0, used, visit, running)


def _block(x: CachedKeys, index: Int32[Array, ""], block: int) -> CachedKeys:
    """Slots index * block and on, each at its place whatever follows the last: a larger cache rounds alike."""
    S = x.shape[1]
    if block > S:
        return jnp.pad(x, ((0, 0), (0, block - S), (0, 0), (0, 0)))
    begin = jnp.minimum(index * block, S - block)
    part = jax.lax.dynamic_slice_in_dim(x, begin, block, axis=1)
    return part if S % block == 0 else jnp.roll(part, begin - index * block, axis=1)


def _finish(running: Running, dtype: jnp.dtype) -> tuple[Queries, LogSums]:
    """Weighted means and log-sums per query; zeros and -inf for one that saw nothing."""
    B, K, G, T, H = running.out.shape
    out = running.out / jnp.where(running.total == 0, 1.0, running.total)[..., None]
    out = jnp.moveaxis(out, 3, 1).reshape(B, T, K * G, H).astype(dtype)
    log_sums = running.peak + jnp.log(running.total)
    return out, jnp.moveaxis(log_sums, 3, 1).reshape(B, T, K * G)


def _empty(q: Float[Array, "B K G T H"]) -> Running:
    zeros = jnp.zeros(q.shape[:-1], jnp.float32)
    return Running(jnp.full_like(zeros, -jnp.inf), zeros, jnp.zeros(q.shape, jnp.float32))


def _add(old: Running, q: Float[Array, "B K G T H"], k: Keys, v: Keys, mask: Bool[Array, "#B #T #s"]) -> Running:
    """The running sums with one more block of keys; k, v f[B,s,K,H]."""
    scores = jnp.einsum("bkgth,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    peak = jnp.maximum(old.peak, jnp.max(scores, axis=-1))
    base = jnp.where(jnp.isfinite(peak), peak, 0.0)  # a query that has seen no key yet keeps weights of zero
    weights = jnp.exp(scores - base[..., None])
    keep = jnp.exp(old.peak - base)
    out = jnp.einsum("bkgts,bskh->bkgth", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Running(peak, old.total * keep + jnp.sum(weights, axis=-1), old.out * keep[..., None] + out)
