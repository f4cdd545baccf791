"""Mixed-causal attention as one Pallas kernel (Triton): online softmax over the used blocks of both pieces.

Source: FlashAttention-2 (arXiv 2307.08691) for the loop. `triton.py` is the same kernel without Pallas.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dgemma_jax.kernels import pallas_compat
from dgemma_jax.kernels.mixed_attention.launch import Tile, launch_for, merge
from dgemma_jax.kernels.mixed_attention.ranges import key_ranges
from dgemma_jax.shapes import Blocks, CachedKeys, Keys, Lengths, LogSums, Queries, RowMask

LOWEST = -1e30  # below every score, yet finite: exp2(LOWEST - LOWEST) is no NaN


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
    tile: Tile | None = None,
    splits: int | None = None,
) -> tuple[Queries, LogSums]:
    """See `dgemma_jax.kernels.mixed_attention.mixed_attention`. tile, splits: instead of those chosen by size.

    Needs a CUDA GPU; on a CPU the kernel is interpreted.
    """
    B, T, N, H = q.shape
    K, S = k.shape[2], prefix_k.shape[1]
    launch = launch_for(B, T, N, K, H, S, q.dtype.itemsize, tile, splits)
    tokens, heads, width, splits = launch.tokens, launch.heads, launch.width, launch.splits
    sizes = {"slots": S, "tokens": T, "window": window, "clip_blocks": clip_blocks}
    ranges = key_ranges(prefix_length, own_length, causal, blocks, **sizes)

    number = pl.BlockSpec((None,), lambda i, h, n: (n // splits,))
    bounds = pl.BlockSpec((None, tokens), lambda i, h, n: (n // splits, i))
    queries = pl.BlockSpec((None, tokens, None, heads, width), lambda i, h, n: (n // splits, i, h, 0, 0))
    own = pl.BlockSpec((None, T, None, width), lambda i, h, n: (n // splits, 0, h, 0))
    prefix = pl.BlockSpec((None, S, None, width), lambda i, h, n: (n // splits, 0, h, 0))
    part = pl.BlockSpec((None, None, tokens, None, heads, width), lambda i, h, n: (n % splits, n // splits, i, h, 0, 0))
    log_sum = pl.BlockSpec((None, None, tokens, None, heads), lambda i, h, n: (n % splits, n // splits, i, h, 0))

    shape = (B, T, K, N // K, H)
    parts = pallas_compat.triton_call(
        partial(_attend, sizes=(T, S, N // K, H), keys=launch.tile.keys, splits=splits),
        *(prefix_length, ranges.cached, ranges.first, ranges.last),
        *(q.reshape(shape), k, v, prefix_k, prefix_v),
        grid=launch.grid,
        in_specs=[number, bounds, bounds, bounds, queries, own, own, prefix, prefix],
        out_specs=(part, log_sum),
        out_shape=(
            jax.ShapeDtypeStruct((splits, *shape), q.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, *shape[:-1]), jnp.float32),
        ),
        warps=launch.tile.warps,
        stages=launch.tile.stages,
        name="mixed_attention",
    )
    out, log_sums = merge(*parts)
    return out.astype(q.dtype).reshape(q.shape), log_sums.reshape(B, T, N)


def _attend(length, cached, first, last, q, k, v, prefix_k, prefix_v, out, log_sum, *, sizes, keys, splits):
    """One program: refs q [tokens, heads, width], k and v [T, width], prefix_k and prefix_v [S, width], out as q.

    cached, first, last [tokens]: see `ranges.Ranges`. sizes: T, S, G, H, which tokens, heads and width may exceed.
    """
    T, S, G, H = sizes
    tokens, heads, width = q.shape
    split = jax.lax.rem(pl.program_id(2), splits)
    token = pl.program_id(0) * tokens + jnp.arange(tokens)
    inside = (token < T)[:, None] & (jnp.arange(heads) < G)[None, :]
    element = inside[:, :, None] & (jnp.arange(width) < H)[None, None, :]
    query = pallas_compat.load(q.at[:, :, :], mask=element, other=0).reshape(tokens * heads, width)
    bound = lambda ref, other: pallas_compat.load(ref.at[:], mask=token < T, other=other)  # noqa: E731
    cached, first, last = bound(cached, 0), bound(first, T), bound(last, 0)
    per_query = lambda x: jnp.broadcast_to(x[:, None], (tokens, heads)).reshape(tokens * heads, 1)  # noqa: E731

    reach, length = jnp.max(cached), length[...]  # cached positions that some query sees: the newest
    newest = jax.lax.rem(length - 1 + S, S)
    begin, count = _blocks_of_ring(length - reach, reach, S, keys)
    cached = per_query(cached)

    def old(index, sums):
        block = begin + index
        block = jnp.where(block < pl.cdiv(S, keys), block, block - pl.cdiv(S, keys))
        slot = block * keys + jnp.arange(keys)
        age = jnp.where(slot <= newest, newest - slot, newest - slot + S)  # 0: the newest position
        age = jnp.where(slot < S, age, S)  # beyond the ring: older than all
        return _add(sums, query, prefix_k, prefix_v, block * keys, age < reach, age[None, :] < cached, H)

    rows = tokens * heads
    sums = (jnp.full(rows, LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros((rows, width), jnp.float32))
    share = _cdiv(count, splits)
    sums = jax.lax.fori_loop(split * share, jnp.minimum((split + 1) * share, count), old, sums)

    end = jnp.where(split == 0, jnp.max(last), 0)  # the pass's own keys go to the first split
    begin = jax.lax.div(jnp.min(first), keys)
    first, last = per_query(first), per_query(last)

    def own(block, sums):
        key = block * keys + jnp.arange(keys)
        return _add(sums, query, k, v, block * keys, key < end, (key[None, :] >= first) & (key[None, :] < last), H)

    peak, total, result = jax.lax.fori_loop(begin, _cdiv(end, keys), own, sums)
    divisor = jnp.where(total == 0, 1.0, total)
    result = (result / divisor[:, None]).astype(out.dtype).reshape(q.shape)
    pallas_compat.store(out.at[:, :, :], result, mask=element)
    logarithm = jnp.where(total == 0, -jnp.inf, (peak + jnp.log2(divisor)) * math.log(2))
    pallas_compat.store(log_sum.at[:, :], logarithm.reshape(tokens, heads), mask=inside)


def _blocks_of_ring(position, positions, slots, block):
    """The first of the blocks of a ring that hold some positions, from the oldest on, and how many they are.

    They follow each other round the ring, whose last block may be short. All blocks at most: a range that ends in the
    block where it began, having gone round, meets that block once.
    """
    start = jax.lax.rem(position, slots)
    end = start + positions
    first, blocks = jax.lax.div(start, block), pl.cdiv(slots, block)
    beyond = blocks + _cdiv(end - slots, block)
    return first, jnp.minimum(blocks, jnp.where(end <= slots, _cdiv(end, block), beyond) - first)


def _add(sums, q, k, v, start, used, seen, H):
    """The running (peak, total, weighted values) with one more block of keys, from row `start` of the refs k and v.

    used b[s]: keys to read; what the others hold may be NaN. seen b[rows,s]: which queries see which.
    """
    peak, total, out = sums
    mask = used[:, None]
    if k.shape[-1] != H:
        mask &= (jnp.arange(k.shape[-1]) < H)[None, :]
    block = pl.ds(start, used.shape[0])
    keys, values = (pallas_compat.load(ref.at[block, :], mask=mask, other=0).astype(q.dtype) for ref in (k, v))
    scores = jnp.where(seen, _product(q, keys, 1) * math.log2(math.e), -jnp.inf)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
    keep = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(scores - new_peak[:, None])
    total = total * keep + jnp.sum(weights, axis=1)
    return new_peak, total, out * keep[:, None] + _product(weights.astype(q.dtype), values, 0)


def _product(a, b, axis):
    """a [m,n] times b over its `axis`, summed in float32; float32 factors are not rounded to TF32."""
    return jax.lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _cdiv(a, b):
    """ceil(a / b) for traced a >= 0."""
    return jax.lax.div(a + (b - 1), b)
