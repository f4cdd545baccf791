"""Mixed-causal attention as one Pallas kernel (Triton): online softmax over the used blocks of both pieces.

Sources: FlashAttention-2 (arXiv 2307.08691) for the loop; Flash-Decoding (Dao and others, 2023) for split prefixes.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float32

from dgemma_jax.kernels import pallas_compat
from dgemma_jax.shapes import Array, CachedKeys, Keys, Lengths, Queries, RowMask

LOWEST = -1e30  # below every score, yet finite: exp2(LOWEST - LOWEST) is no NaN
PROGRAMS = 128  # as many as keep the 108 to 148 multiprocessors of a data-centre GPU busy
SPLIT = 2048  # fewer cached slots than this are not worth a program and the merge of its result


@dataclass(frozen=True)
class Tile:
    """What one program takes at a time: queries (tokens x heads of a group), keys; and Triton's warps and stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# By the widest head they serve. No spills and at most 99 KiB of shared memory in bfloat16: see README.md.
TILES = {
    128: Tile(64, 64, 4, 2),
    256: Tile(64, 32, 8, 2),
    512: Tile(32, 32, 8, 1),
}


def tile_for(width: int, itemsize: int) -> Tile:
    """The tile for heads of this width, halved both ways for 4-byte numbers. ValueError beyond the widest head."""
    for widest, tile in TILES.items():
        if width <= widest:
            return tile if itemsize <= 2 else replace(tile, queries=tile.queries // 2, keys=tile.keys // 2)
    raise ValueError(f"mixed_attention: pallas has tiles for heads up to {max(TILES)} wide, not {width}")


def splits_for(programs: int, slots: int) -> int:
    """Programs that share one prefix, so that about PROGRAMS run in all."""
    return max(1, min(PROGRAMS // programs, slots // SPLIT))


def mixed_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    prefix_k: CachedKeys,
    prefix_v: CachedKeys,
    prefix_length: Lengths,
    own_length: Lengths,
    causal: RowMask,
    *,
    window: int | None,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Queries:
    """See `dgemma_jax.kernels.mixed_attention.mixed_attention`. tile, splits: instead of those chosen by shape.

    A program takes all query heads of one K/V head, for some tokens of one row, and one of `splits` parts of the
    prefix. Needs a CUDA GPU; on a CPU the kernel is interpreted.
    """
    B, T, N, H = q.shape
    K, S = k.shape[2], prefix_k.shape[1]
    tile = tile or tile_for(H, q.dtype.itemsize)
    # Triton wants powers of two, and at least 16 each way in a product.
    heads, width = pl.next_power_of_2(N // K), max(16, pl.next_power_of_2(H))
    tokens = max(1, min(tile.queries, max(16, pl.next_power_of_2(T * heads))) // heads)
    tiles = pl.cdiv(T, tokens)
    splits = splits or splits_for(tiles * K * B, S)

    number = pl.BlockSpec((None,), lambda i, h, n: (n // splits,))
    queries = pl.BlockSpec((None, tokens, None, heads, width), lambda i, h, n: (n // splits, i, h, 0, 0))
    own = pl.BlockSpec((None, T, None, width), lambda i, h, n: (n // splits, 0, h, 0))
    prefix = pl.BlockSpec((None, S, None, width), lambda i, h, n: (n // splits, 0, h, 0))
    part = pl.BlockSpec((None, None, tokens, None, heads, width), lambda i, h, n: (n % splits, n // splits, i, h, 0, 0))
    log_sum = pl.BlockSpec((None, None, tokens, None, heads), lambda i, h, n: (n % splits, n // splits, i, h, 0))

    shape = (B, T, K, N // K, H)
    whole = splits == 1
    out = pallas_compat.triton_call(
        partial(_attend, sizes=(T, S, N // K, H), window=window, keys=tile.keys, splits=splits),
        *(prefix_length, own_length, causal.astype(jnp.int32)),
        *(q.reshape(shape), k, v, prefix_k, prefix_v),
        grid=(tiles, K, B * splits),
        in_specs=[number, number, number, queries, own, own, prefix, prefix],
        out_specs=queries if whole else (part, log_sum),
        out_shape=jax.ShapeDtypeStruct(shape, q.dtype)
        if whole
        else (
            jax.ShapeDtypeStruct((splits, *shape), jnp.float32),
            jax.ShapeDtypeStruct((splits, *shape[:-1]), jnp.float32),
        ),
        warps=tile.warps,
        stages=tile.stages,
        name="mixed_attention",
    )
    return (out if whole else _merge(*out).astype(q.dtype)).reshape(q.shape)


def _merge(parts: Float32[Array, "P B T K G H"], log_sums: Float32[Array, "P B T K G"]) -> Float32[Array, "B T K G H"]:
    """The softmax over all keys from those over P parts of them, log_sums being log2 of the sums of exp2."""
    weights = jnp.exp2(log_sums - jnp.max(log_sums, axis=0))
    return jnp.sum(parts * (weights / jnp.sum(weights, axis=0))[..., None], axis=0)


def _attend(prefix_length, own_length, causal, q, k, v, prefix_k, prefix_v, out, *log_sum, sizes, window, keys, splits):
    """One program: refs q [tokens, heads, width], k and v [T, width], prefix_k and prefix_v [S, width], out as q.

    sizes: T, S, G, H, which tokens, heads and width may exceed. The program's id on axis 2 is row * splits + split.
    """
    T, S, G, H = sizes
    tokens, heads, width = q.shape
    start = pl.program_id(0) * tokens
    split = jax.lax.rem(pl.program_id(2), splits)
    length, own, causal = prefix_length[...], own_length[...], causal[...] != 0
    token = start + jnp.arange(tokens * heads) // heads
    begin = jnp.where(causal, start, 0)  # the query of this tile that sees the oldest keys

    inside = (start + jnp.arange(tokens) < T)[:, None] & (jnp.arange(heads) < G)[None, :]
    element = inside[:, :, None] & (jnp.arange(width) < H)[None, None, :]
    query = pallas_compat.load(q.at[:, :, :], mask=element, other=0).reshape(tokens * heads, width)

    reach = jnp.minimum(length, S)  # cached positions that some query sees: the newest
    if window is not None:
        reach = jnp.minimum(reach, jnp.maximum(window - 1 - begin, 0))
    newest = jax.lax.rem(length - 1 + S, S)
    first, count = _blocks_of_ring(length - reach, reach, S, keys)

    def cached(index, sums):
        block = first + index
        block = jnp.where(block < pl.cdiv(S, keys), block, block - pl.cdiv(S, keys))
        slot = block * keys + jnp.arange(keys)
        age = jnp.where(slot <= newest, newest - slot, newest - slot + S)  # 0: the newest position
        used = (slot < S) & (age < reach)
        seen = used[None, :]
        if window is not None:
            seen &= age[None, :] < window - 1 - jnp.where(causal, token, 0)[:, None]
        return _add(sums, query, prefix_k, prefix_v, block * keys, used, seen, H)

    def fresh(block, sums):
        key = block * keys + jnp.arange(keys)
        used = key < jnp.minimum(own, T)
        seen = used[None, :] & (~causal | (key[None, :] <= token[:, None]))
        if window is not None:
            seen &= ~causal | (key[None, :] > token[:, None] - window)
        return _add(sums, query, k, v, block * keys, used, seen, H)

    rows = tokens * heads
    sums = (jnp.full(rows, LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros((rows, width), jnp.float32))
    share = _cdiv(count, splits)
    sums = jax.lax.fori_loop(split * share, jnp.minimum((split + 1) * share, count), cached, sums)
    oldest = 0 if window is None else jnp.maximum(begin - window + 1, 0)
    end = jnp.minimum(own, jnp.where(causal, start + tokens, T))
    end = jnp.where(split == 0, end, 0)  # the pass's own keys go to the first split
    peak, total, result = jax.lax.fori_loop(jax.lax.div(oldest, keys), _cdiv(end, keys), fresh, sums)

    divisor = jnp.where(total == 0, 1.0, total)
    result = (result / divisor[:, None]).astype(out.dtype).reshape(q.shape)
    pallas_compat.store(out.at[:, :, :], result, mask=element)
    for ref in log_sum:
        # LOWEST for a query that saw nothing: the logarithm of 1 does not change it.
        pallas_compat.store(ref.at[:, :], (peak + jnp.log2(divisor)).reshape(tokens, heads), mask=inside)


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

    used b[s]: keys to read; what the others hold may be NaN. seen b[#rows,s]: which queries see them.
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
