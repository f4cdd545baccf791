"""The vocabulary head in one pass over the table, chunk by chunk: memory does not grow with the vocabulary.

Per position the pass keeps a running maximum M and sums relative to it, as in online softmax (arXiv 1805.02867), and
for the proposal the sum of every tile and one candidate inside it; the tile is chosen at the end, when all sums are
known. [B, C, V] never exists.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int32

from dgemma_jax.kernels.vocab_head.reference import capped_logits, inverse_cdf
from dgemma_jax.kernels.vocab_head.types import TILE, HeadStats
from dgemma_jax.shapes import Array, CanvasHidden, Logits, PerRow, Table

BLOCK = 128  # ids whose cumulative sum is taken at once when choosing inside a tile
TEMPORARY_BYTES = 64 << 20  # what the fp32 arrays of a chunk may take together
ARRAYS_PER_CHUNK = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Running:
    """Sums over the ids seen so far; w = exp((z - peak) / temperature) with z the soft-capped allowed logits.

    peak: maximum of z, argmax: its lowest id. total: sum of w. weighted: sum of w (z - peak) / temperature.
    raw_lse: log of the sum of exp(soft-capped logit) over all ids, suppressed too. soft: sum of w times table rows.
    """

    peak: Float32[Array, "B C"]
    argmax: Int32[Array, "B C"]
    total: Float32[Array, "B C"]
    weighted: Float32[Array, "B C"]
    raw_lse: Float32[Array, "B C"]
    soft: Float32[Array, "B C D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """What the proposal needs of each tile: its sum of weights relative to `peak`, and the id chosen inside it."""

    total: Float32[Array, "B C t"]
    peak: Float32[Array, "B C t"]
    choice: Int32[Array, "B C t"]


def vocab_head(
    hidden: CanvasHidden,
    table: Table,
    temperature: PerRow,
    draw_temperature: PerRow,
    uniforms: Float32[Array, "B U C"],
    suppress: Bool[Array, "B V"] | None,
    *,
    softcap: float,
    scale: float,
    chunk: int | None = None,
) -> HeadStats:
    """See `dgemma_jax.kernels.vocab_head.vocab_head`. chunk: ids at a time, a multiple of TILE; None: `chunk_size`."""
    B, C, _ = hidden.shape
    V = table.shape[0]
    chunk = chunk or chunk_size(B * C, V)
    greedy = draw_temperature == 0
    divisor = temperature * jnp.where(greedy, 1.0, draw_temperature)
    same = jnp.all(greedy | (draw_temperature == 1))
    uniforms = jnp.swapaxes(uniforms, 1, 2)
    suppress = jnp.zeros((B, V), bool) if suppress is None else suppress

    def visit(running: Running, start: Int32[Array, ""], size: int) -> tuple[Running, Tiles]:
        rows = jax.lax.dynamic_slice_in_dim(table, start, size, axis=0)
        hushed = jax.lax.dynamic_slice_in_dim(suppress, start, size, axis=1)[:, None]
        inside = jax.lax.dynamic_slice_in_dim(uniforms, 1 + start // TILE, -(-size // TILE), axis=2)
        raw = capped_logits(hidden, rows, softcap)
        allowed = jnp.where(hushed, -jnp.inf, raw)
        running, weights = _add(running, raw, allowed, rows, start, temperature)
        weights = jax.lax.cond(same, lambda: weights, lambda: _weights(allowed, running.peak, divisor))
        return running, _tiles(weights, running.peak, inside, start)

    running, whole = _empty(hidden, softcap), V // chunk * chunk
    pieces = []
    if whole:
        starts = jnp.arange(0, whole, chunk, dtype=jnp.int32)
        running, tiles = jax.lax.scan(lambda carry, start: visit(carry, start, chunk), running, starts)
        pieces.append(jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(B, C, -1), tiles))
    if whole < V:
        running, tiles = visit(running, jnp.int32(whole), V - whole)
        pieces.append(tiles)
    tiles = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), *pieces)
    sample = jnp.where(greedy[:, None], running.argmax, _choose(tiles, running.peak, uniforms[:, :, 0], divisor))
    return HeadStats(
        argmax=running.argmax,
        sample=sample,
        entropy=jnp.log(running.total) - running.weighted / running.total,
        logprob=running.peak - running.raw_lse,
        soft=(running.soft / running.total[..., None] * scale).astype(table.dtype),
    )


def chunk_size(positions: int, vocab: int) -> int:
    """Ids per chunk: as many tiles as TEMPORARY_BYTES allow for the canvas positions of all rows, at least one."""
    tiles = TEMPORARY_BYTES // (4 * ARRAYS_PER_CHUNK * TILE * positions)
    return TILE * max(1, min(tiles, -(-vocab // TILE)))


def _empty(hidden: CanvasHidden, softcap: float) -> Running:
    B, C, D = hidden.shape
    zeros = jnp.zeros((B, C), jnp.float32)
    # No soft-capped logit lies below -softcap, so this start is finite and never the maximum of a real distribution.
    peak = jnp.full((B, C), -softcap, jnp.float32)
    nothing = jnp.full((B, C), -jnp.inf, jnp.float32)
    return Running(peak, jnp.zeros((B, C), jnp.int32), zeros, zeros, nothing, jnp.zeros((B, C, D), jnp.float32))


def _weights(allowed: Logits, peak: Float32[Array, "B C"], divisor: PerRow) -> Logits:
    return jnp.exp((allowed - peak[..., None]) / divisor[:, None, None])


def _add(
    old: Running,
    raw: Logits,
    allowed: Logits,
    rows: Table,
    start: Int32[Array, ""],
    temperature: PerRow,
) -> tuple[Running, Logits]:
    """The sums with a chunk added, and the chunk's weights relative to the new peak."""
    top = jnp.max(allowed, axis=-1)
    peak = jnp.maximum(old.peak, top)
    first = jnp.argmax(allowed, axis=-1).astype(jnp.int32) + start
    better = (top > old.peak) | ((old.total == 0) & (top >= old.peak))
    drop = (old.peak - peak) / temperature[:, None]
    keep = jnp.exp(drop)
    weights = _weights(allowed, peak, temperature)
    shifted = (allowed - peak[..., None]) / temperature[:, None, None]
    inner = jnp.sum(jnp.where(weights > 0, weights * shifted, 0.0), axis=-1)
    mean = jnp.einsum("bcv,vd->bcd", weights.astype(rows.dtype), rows, preferred_element_type=jnp.float32)
    new = Running(
        peak=peak,
        argmax=jnp.where(better, first, old.argmax),
        total=old.total * keep + jnp.sum(weights, axis=-1),
        weighted=(old.weighted + drop * old.total) * keep + inner,
        raw_lse=jnp.logaddexp(old.raw_lse, jax.nn.logsumexp(raw, axis=-1)),
        soft=old.soft * keep[..., None] + mean,
    )
    return new, weights


def _tiles(
    weights: Logits, peak: Float32[Array, "B C"], uniform: Float32[Array, "B C t"], start: Int32[Array, ""]
) -> Tiles:
    """Sum and choice of every tile in a chunk: first a block of the tile, then an id of the block."""
    B, C, n = weights.shape
    tiles = -(-n // TILE)
    weights = jnp.pad(weights, ((0, 0), (0, 0), (0, tiles * TILE - n)))
    weights = weights.reshape(B, C, tiles, TILE // BLOCK, BLOCK)
    upto = jnp.cumsum(jnp.sum(weights, axis=-1), axis=-1)
    target = uniform * upto[..., -1]
    block = jnp.sum(upto <= target[..., None], axis=-1, dtype=jnp.int32)
    before = jnp.where(block > 0, jnp.take_along_axis(upto, jnp.maximum(block - 1, 0)[..., None], axis=-1)[..., 0], 0.0)
    chosen = jnp.take_along_axis(weights, block[..., None, None], axis=3)[..., 0, :]
    inside = jnp.cumsum(chosen, axis=-1)
    # The block's own sum may be rounded below what the sums of blocks promise: stay inside it.
    target = jnp.minimum(target - before, jnp.nextafter(inside[..., -1], 0.0))
    within = jnp.sum(inside <= target[..., None], axis=-1, dtype=jnp.int32)
    first = start + TILE * jnp.arange(tiles, dtype=jnp.int32)
    return Tiles(upto[..., -1], jnp.broadcast_to(peak[..., None], upto.shape[:-1]), first + block * BLOCK + within)


def _choose(
    tiles: Tiles, peak: Float32[Array, "B C"], uniform: Float32[Array, "B C"], divisor: PerRow
) -> Int32[Array, "B C"]:
    """The candidate of a tile drawn in proportion to the tiles' sums, brought to one common peak."""
    sums = tiles.total * jnp.exp((tiles.peak - peak[..., None]) / divisor[:, None, None])
    return jnp.take_along_axis(tiles.choice, inverse_cdf(sums, uniform)[..., None], axis=-1)[..., 0]
