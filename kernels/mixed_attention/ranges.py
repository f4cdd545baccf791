"""Which keys a query sees, as three numbers: what the fast implementations mask by instead of `reference.visible`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Int32

from dgemma_jax.shapes import Array, Blocks, Lengths, RowMask


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ranges:
    """A query sees the newest `cached` positions of the prefix and own keys j with first <= j < last.

    Each i32[B,T]. There are no gaps: the window of a causal query and its image both hold the query itself.
    """

    cached: Int32[Array, "B T"]
    first: Int32[Array, "B T"]
    last: Int32[Array, "B T"]


def key_ranges(
    prefix_length: Lengths,
    own_length: Lengths,
    causal: RowMask,
    blocks: Blocks | None,
    *,
    slots: int,
    tokens: int,
    window: int | None,
    clip_blocks: bool = False,
) -> Ranges:
    """The ranges that `reference.visible` and `reference.same_block` describe pair by pair."""
    query = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    order = causal[:, None]
    cached = jnp.minimum(prefix_length, slots)[:, None]
    first, last = 0, query + 1
    if window is not None:
        cached = jnp.minimum(cached, jnp.maximum(window - 1 - jnp.where(order, query, 0), 0))
        first = jnp.maximum(last - window, 0)
    if blocks is not None:
        begin, end = _runs(blocks)
        if not clip_blocks:
            first = jnp.where(blocks != 0, jnp.minimum(first, begin), first)
        last = jnp.where(blocks != 0, end, last)
    first = jnp.where(order, first, 0)
    last = jnp.minimum(jnp.where(order, last, tokens), own_length[:, None])
    return Ranges(*jnp.broadcast_arrays(cached, first, last))


def _runs(ids: Blocks) -> tuple[Int32[Array, "B T"], Int32[Array, "B T"]]:
    """Where the run of equal ids around each token begins, and where it has ended."""
    T = ids.shape[1]
    index = jnp.arange(T, dtype=jnp.int32)[None, :]
    changes = ids[:, 1:] != ids[:, :-1]
    border = jnp.ones((ids.shape[0], 1), bool)
    begins = jnp.concatenate([border, changes], axis=1)
    ends = jnp.concatenate([changes, border], axis=1)
    begin = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    return begin, jax.lax.cummin(jnp.where(ends, index + 1, T), axis=1, reverse=True)
