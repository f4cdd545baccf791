"""The likeliest ids of every position and their log-probabilities: a pass over the table for those who ask."""

import jax
import jax.numpy as jnp
from jaxtyping import Float32, Int32

from dgemma_jax.kernels.quantized import Table, taken
from dgemma_jax.kernels.shard import Shard
from dgemma_jax.kernels.vocab_head.reference import capped_logits
from dgemma_jax.kernels.vocab_head.types import Likeliest
from dgemma_jax.kernels.vocab_head.xla import chunk_size, without_padding
from dgemma_jax.shapes import Array, CanvasHidden, Logits

Running = tuple[Float32[Array, "B C"], Float32[Array, "B C n"], Int32[Array, "B C n"]]


def likeliest(
    hidden: CanvasHidden,
    table: Table,
    n: int,
    softcap: float,
    chunk: int | None = None,
    shard: Shard | None = None,
) -> Likeliest:
    """The `n` ids with the largest soft-capped logits, without temperature or mask; n in 1 .. V.

    Chunk by chunk, as the head goes: [B, C, V] never exists. chunk: ids at a time; None: the head's `chunk_size`.
    shard: inside `shard_map`, which ids the table holds; every device gets the likeliest of all.
    """
    (B, C, D), V = hidden.shape, table.shape[0]
    shard = shard or Shard.whole(V)
    if not 1 <= n <= V:
        raise ValueError(f"likeliest: n is {n}; expected 1 .. {V}, the size of the vocabulary")
    chunk = chunk or chunk_size(B * C, (V, D), hidden.dtype)

    def visit(running: Running, start: Int32[Array, ""], size: int) -> Running:
        logits = capped_logits(hidden, taken(table, start, size, axis=0), softcap)
        return _add(running, without_padding(logits, start, shard), start)

    running: Running = (
        jnp.full((B, C), -jnp.inf, jnp.float32),
        jnp.full((B, C, n), -jnp.inf, jnp.float32),
        jnp.zeros((B, C, n), jnp.int32),
    )
    whole = V // chunk * chunk
    if whole:
        starts = jnp.arange(0, whole, chunk, dtype=jnp.int32)
        running, _ = jax.lax.scan(lambda carry, start: (visit(carry, start, chunk), None), running, starts)
    if whole < V:
        running = visit(running, jnp.int32(whole), V - whole)
    lse, largest, ids = running
    if shard.cut:
        peak = shard.max(lse)
        lse = peak + jnp.log(shard.sum(jnp.exp(lse - peak)))
        ids = shard.gather(ids + shard.first, axis=2)
        largest, place = jax.lax.top_k(shard.gather(largest, axis=2), n)  # lower ids come first here, too
        ids = jnp.take_along_axis(ids, place, axis=-1)
    return Likeliest(ids, largest - lse[..., None])


def _add(old: Running, logits: Logits, start: Int32[Array, ""]) -> Running:
    lse, largest, ids = old
    n, size = largest.shape[-1], logits.shape[-1]
    found, at = jax.lax.top_k(logits, min(n, size))
    # What was seen before comes first: on ties the lower id stays in front.
    largest, place = jax.lax.top_k(jnp.concatenate([largest, found], axis=-1), n)
    ids = jnp.take_along_axis(jnp.concatenate([ids, at + start], axis=-1), place, axis=-1)
    return jnp.logaddexp(lse, jax.nn.logsumexp(logits, axis=-1)), largest, ids
