"""The vocabulary head in one pass over the table, chunk by chunk: memory does not grow with the vocabulary.

Per position the pass keeps a running maximum M and sums relative to it, as in online softmax (arXiv 1805.02867), and
for the proposal the sum of every tile and one candidate inside it; the tile is chosen at the end, when all sums are
known. [B, C, V] never exists. Where devices share the table each makes the pass over its part, and what they find is
put together before the tile is chosen: figures per position and per tile go from one device to another.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int32

from dgemma_jax.kernels.quantized import Quantized, Table, after, dequantized, taken
from dgemma_jax.kernels.shard import Shard
from dgemma_jax.kernels.vocab_head import truncation
from dgemma_jax.kernels.vocab_head.proposal import Tiles, choose, tiles_of
from dgemma_jax.kernels.vocab_head.reference import capped_logits
from dgemma_jax.kernels.vocab_head.types import TILE, HeadStats
from dgemma_jax.shapes import Array, Canvas, CanvasHidden, Lengths, Logits, PerRow, RowMask

TEMPORARY_BYTES = 64 << 20  # what the arrays of a chunk may take together
ARRAYS_PER_CHUNK = 5
SMALLEST = 1e-37  # divisor of a logit: there is a difference to 0, and the inverse is finite
MOST_POSITIONS = 64  # whose logits over the whole vocabulary may exist at once, for top_k and top_p


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """What the head is told about each row, see `dgemma_jax.kernels.vocab_head.vocab_head`.

    among, inside: the numbers in [0, 1) that choose among the tiles, and inside each of this device's tiles.
    suppress: of this device's ids.
    """

    temperature: PerRow
    draw_temperature: PerRow
    among: Float32[Array, "B C"]
    inside: Float32[Array, "B t C"]
    suppress: Bool[Array, "B V"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Raw:
    """Of the logits seen so far: log of the sum of exp, and the logits of given ids."""

    lse: Float32[Array, "B C"]
    given: Float32[Array, "B C"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Running:
    """Sums over the ids seen so far; w = exp((z - peak) / temperature) with z the soft-capped allowed logits.

    peak: maximum of z, argmax: its lowest id. total: sum of w. weighted: sum of w (z - peak) / temperature.
    soft: sum of w times table rows. raw: figures of the soft-capped logits of all ids, suppressed too.
    """

    peak: Float32[Array, "B C"]
    argmax: Int32[Array, "B C"]
    total: Float32[Array, "B C"]
    weighted: Float32[Array, "B C"]
    soft: Float32[Array, "B C D"]
    raw: Raw


def vocab_head(
    hidden: CanvasHidden,
    table: Table,
    temperature: PerRow,
    draw_temperature: PerRow,
    uniforms: Float32[Array, "B U C"],
    suppress: Bool[Array, "B V"] | None,
    top_k: Lengths | None,
    top_p: PerRow | None,
    *,
    softcap: float,
    scale: float,
    ids: Canvas | None = None,
    active: RowMask | None = None,
    shard: Shard | None = None,
    chunk: int | None = None,
) -> HeadStats:
    """See `dgemma_jax.kernels.vocab_head.vocab_head`. chunk: ids at a time, a multiple of TILE; None: `chunk_size`.

    Row after row: one that is not active costs nothing, and neither memory nor a row's rounding depend on the others.
    Rows that ask for top_k or top_p are done once more, by `_truncated`; the others pay nothing for it.
    """
    (B, C, D), V = hidden.shape, table.shape[0]
    shard = shard or Shard.whole(V)
    rows = Rows(
        temperature,
        draw_temperature,
        uniforms[:, 0],
        shard.part(uniforms[:, 1:], axis=1, length=-(-V // TILE)),
        _suppressed(suppress, shard, (B, V)),
    )
    table = after(hidden, table)
    how = {"softcap": softcap, "scale": scale, "shard": shard, "chunk": chunk or chunk_size(C, (V, D), hidden.dtype)}
    batch = (hidden, rows, ids, top_k, top_p)

    def visit(index: Int32[Array, ""], found: HeadStats) -> HeadStats:
        row = order[index]
        mine = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), batch)
        put = lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, row, axis=0)  # noqa: E731
        return jax.tree.map(put, found, _row(table, *mine, **how))

    order = jnp.arange(B) if active is None else jnp.nonzero(active, size=B, fill_value=0)[0]
    count = B if active is None else jnp.sum(active, dtype=jnp.int32)
    whole, numbers = jnp.zeros((B, C), jnp.int32), jnp.zeros((B, C), jnp.float32)
    given = None if ids is None else numbers
    nothing = HeadStats(whole, whole, numbers, numbers, jnp.zeros((B, C, D), hidden.dtype), given)
    return jax.lax.fori_loop(0, count, visit, nothing)


def _row(
    table: Table,
    hidden: CanvasHidden,
    rows: Rows,
    ids: Canvas | None,
    top_k: Lengths | None,
    top_p: PerRow | None,
    *,
    softcap: float,
    shard: Shard,
    **how: Any,
) -> HeadStats:
    """The head of one row; B is 1."""

    def logits(start: Int32[Array, ""], size: int) -> Logits:
        return without_padding(capped_logits(hidden, taken(table, start, size, axis=0), softcap), start, shard)

    how |= {"softcap": softcap, "shard": shard}
    stats = _stream(logits, hidden, table, rows, None, ids, **how)
    if top_k is None or top_p is None:
        return stats
    return _truncated(stats, hidden, table, rows, top_k, top_p, **how)


def _truncated(
    stats: HeadStats,
    hidden: CanvasHidden,
    table: Table,
    rows: Rows,
    top_k: Lengths,
    top_p: PerRow,
    *,
    softcap: float,
    scale: float,
    shard: Shard,
    chunk: int,
) -> HeadStats:
    """stats of a row that asks for top_k or top_p, anew, a few positions with all their logits at a time.

    The floor and what is summed above it come from the same logits: computed twice they could differ in the last bit.
    """
    C, n = hidden.shape[1], positions_at_once(hidden.shape[1], table.shape[0])
    asks = (top_k[0] > 0) | (top_p[0] < 1)

    def visit(index: Int32[Array, ""], stats: HeadStats) -> HeadStats:
        first = jnp.minimum(index * n, C - n)
        here = lambda x: jax.lax.dynamic_slice_in_dim(x, first, n, axis=-1)  # noqa: E731
        mine = replace(rows, among=here(rows.among), inside=here(rows.inside))
        states = jax.lax.dynamic_slice_in_dim(hidden, first, n, axis=1)
        allowed = _all_logits(states, table, mine.suppress, softcap, chunk)
        part = _stream(
            lambda start, size: jax.lax.dynamic_slice_in_dim(allowed, start, size, axis=2),
            states,
            table,
            mine,
            truncation.floor(allowed, top_k[0], top_p[0], softcap, shard),
            None,
            softcap=softcap,
            scale=scale,
            shard=shard,
            chunk=chunk,
        )
        put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=1)  # noqa: E731
        changed = ("argmax", "sample", "entropy", "soft")  # log-probabilities know no mask
        return replace(stats, **{name: put(getattr(stats, name), getattr(part, name)) for name in changed})

    return jax.lax.fori_loop(0, jnp.where(asks, -(-C // n), 0), visit, stats)


def _all_logits(hidden: CanvasHidden, table: Table, suppress: Bool[Array, "B V"], softcap: float, chunk: int) -> Logits:
    """Soft-capped logits of all ids, -inf for suppressed ones; of a quantised table a chunk at a time are numbers."""
    (B, C), V = hidden.shape[:2], table.shape[0]

    def logits(table: Table, cut: Bool[Array, "B v"]) -> Logits:
        return jnp.where(cut[:, None], -jnp.inf, capped_logits(hidden, table, softcap))

    if not isinstance(table, Quantized) or chunk >= V:
        return logits(table, suppress)

    def visit(index: Int32[Array, ""], out: Logits) -> Logits:
        start = jnp.minimum(index * chunk, V - chunk)  # the last chunk overlaps the one before it
        cut = jax.lax.dynamic_slice_in_dim(suppress, start, chunk, axis=1)
        part = logits(taken(table, start, chunk, axis=0), cut)
        return jax.lax.dynamic_update_slice_in_dim(out, part, start, axis=2)

    return jax.lax.fori_loop(0, -(-V // chunk), visit, jnp.zeros((B, C, V), jnp.float32))


def _stream(
    logits: Callable[[Int32[Array, ""], int], Logits],
    hidden: CanvasHidden,
    table: Table,
    rows: Rows,
    floor: Float32[Array, "B C"] | None,
    ids: Canvas | None,
    *,
    softcap: float,
    scale: float,
    shard: Shard,
    chunk: int,
) -> HeadStats:
    """The head over chunks of the table. logits(start, size): soft-capped, of `size` ids from `start` on, of `hidden`.

    floor: logits below it are cut off like suppressed ids.
    """
    (B, C, D), V = hidden.shape, table.shape[0]
    greedy = rows.draw_temperature == 0
    product = rows.temperature * jnp.where(greedy, 1.0, rows.draw_temperature)
    divisor = jnp.clip(product, SMALLEST, 1 / SMALLEST)  # two numbers that float32 can hold, but not their product
    same = jnp.all(greedy | (rows.draw_temperature == 1))
    uniforms = jnp.swapaxes(rows.inside, 1, 2)
    own_ids = None if ids is None else ids - shard.first

    def visit(running: Running, start: Int32[Array, ""], size: int) -> tuple[Running, Tiles]:
        embedded = dequantized(taken(table, start, size, axis=0), hidden.dtype)
        cut = jax.lax.dynamic_slice_in_dim(rows.suppress, start, size, axis=1)[:, None]
        inside = jax.lax.dynamic_slice_in_dim(uniforms, start // TILE, -(-size // TILE), axis=2)
        raw = logits(start, size)
        allowed = jnp.where(cut if floor is None else cut | (raw < floor[..., None]), -jnp.inf, raw)
        running, weights = _add(running, allowed, embedded, start, rows.temperature)
        running = replace(running, raw=_add_raw(running.raw, raw, start, own_ids))
        weights = jax.lax.cond(same, lambda: weights, lambda: _weights(allowed, running.peak, divisor))
        return running, tiles_of(weights, running.peak, inside, start)

    running, whole = _empty((B, C, D), softcap, ids is not None), V // chunk * chunk
    pieces = []
    if whole:
        starts = jnp.arange(0, whole, chunk, dtype=jnp.int32)
        running, tiles = jax.lax.scan(lambda carry, start: visit(carry, start, chunk), running, starts)
        pieces.append(jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(B, C, -1), tiles))
    if whole < V:
        running, tiles = visit(running, jnp.int32(whole), V - whole)
        pieces.append(tiles)
    tiles = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), *pieces)
    if shard.cut:
        running, tiles = _merged(running, tiles, rows.temperature, shard)
    sample = jnp.where(greedy[:, None], running.argmax, choose(tiles, running.peak, rows.among, divisor))
    given = running.raw.given
    return HeadStats(
        argmax=running.argmax,
        sample=sample,
        entropy=jnp.log(running.total) - running.weighted / running.total,
        logprob=running.peak - running.raw.lse,
        soft=(running.soft / running.total[..., None] * scale).astype(hidden.dtype),
        id_logprob=None if given is None else given - running.raw.lse,
    )


def _suppressed(suppress: Bool[Array, "B V"] | None, shard: Shard, shape: tuple[int, int]) -> Bool[Array, "B v"]:
    """Which of this device's ids are never produced, its padding among them."""
    own = jnp.zeros(shape, bool) if suppress is None else shard.part(suppress, axis=1)
    return own if not shard.padded else own | (shard.first + jnp.arange(shape[1]) >= shard.size)


def without_padding(logits: Logits, start: int | Int32[Array, ""], shard: Shard) -> Logits:
    """The logits of this device's ids from `start` on, -inf where its part of the table ends in padding."""
    if not shard.padded:
        return logits
    id = shard.first + start + jnp.arange(logits.shape[-1])
    return jnp.where(id < shard.size, logits, -jnp.inf)


def _merged(running: Running, tiles: Tiles, temperature: PerRow, shard: Shard) -> tuple[Running, Tiles]:
    """The sums over all parts of the table, and the tiles of all of them, the same on every device."""
    peak = shard.max(running.peak)
    drop = (running.peak - peak) / temperature[:, None]
    keep = jnp.exp(drop)
    holds = (running.peak == peak) & (running.total > 0)  # nothing was allowed where the total is zero
    lse = shard.max(running.raw.lse)
    raw = Raw(
        lse + jnp.log(shard.sum(jnp.exp(running.raw.lse - lse))),
        None if running.raw.given is None else shard.sum(running.raw.given),
    )
    whole = Running(
        peak=peak,
        argmax=shard.min(jnp.where(holds, running.argmax + shard.first, shard.size)),
        total=shard.sum(running.total * keep),
        weighted=shard.sum((running.weighted + drop * running.total) * keep),
        soft=shard.sum(running.soft * keep[..., None]),
        raw=raw,
    )
    tiles = replace(tiles, choice=tiles.choice + shard.first)
    return whole, jax.tree.map(lambda x: shard.gather(x, axis=2), tiles)


def chunk_size(positions: int, table: tuple[int, int], dtype: jnp.dtype) -> int:
    """Ids per chunk: as many tiles as TEMPORARY_BYTES allow for so many positions, at least one.

    A chunk takes ARRAYS_PER_CHUNK numbers in fp32 for every position and id, and a copy of its rows of the table (of
    that shape) in `dtype`.
    """
    V, D = table
    tiles = TEMPORARY_BYTES // (TILE * (4 * ARRAYS_PER_CHUNK * positions + D * dtype.itemsize))
    return TILE * max(1, min(tiles, -(-V // TILE)))


def positions_at_once(C: int, V: int) -> int:
    """Positions whose logits over all of V exist at once, with one more array of that size: a part of the canvas."""
    return max(1, min(MOST_POSITIONS, C // 4, TEMPORARY_BYTES // (2 * 4 * V)))


def _empty(shape: tuple[int, int, int], softcap: float, given: bool) -> Running:
    B, C, D = shape
    zeros = jnp.zeros((B, C), jnp.float32)
    # No soft-capped logit lies below -softcap, so this start is finite and never the maximum of a real distribution.
    peak = jnp.full((B, C), -softcap, jnp.float32)
    nothing = jnp.full((B, C), -jnp.inf, jnp.float32)
    raw = Raw(nothing, zeros if given else None)
    return Running(peak, jnp.zeros((B, C), jnp.int32), zeros, zeros, jnp.zeros((B, C, D), jnp.float32), raw)


def _weights(allowed: Logits, peak: Float32[Array, "B C"], divisor: PerRow) -> Logits:
    return jnp.exp((allowed - peak[..., None]) / divisor[:, None, None])


def _add(
    old: Running,
    allowed: Logits,
    rows: Float[Array, "v D"],
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
        soft=old.soft * keep[..., None] + mean,
        raw=old.raw,
    )
    return new, weights


def _add_raw(old: Raw, logits: Logits, start: Int32[Array, ""], ids: Canvas | None) -> Raw:
    """The figures of the logits with a chunk added, whose first id is `start`."""
    given, size = old.given, logits.shape[-1]
    if given is not None and ids is not None:
        inside = (ids >= start) & (ids < start + size)
        found = jnp.take_along_axis(logits, jnp.clip(ids - start, 0, size - 1)[..., None], axis=-1)[..., 0]
        given = jnp.where(inside, found, given)
    return Raw(jnp.logaddexp(old.lse, jax.nn.logsumexp(logits, axis=-1)), given)
