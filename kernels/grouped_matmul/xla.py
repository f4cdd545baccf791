"""The expert layer over tokens sorted by expert, block by block: only chosen experts are multiplied."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from dgemma_jax.kernels.quantized import Quantized, Weight, dequantized, taken
from dgemma_jax.shapes import Array

SMALLEST_BLOCK, LARGEST_BLOCK = 8, 128


class Plan(NamedTuple):
    """Where each pair (token, chosen expert) goes: to a slot of its expert's blocks.

    slots: i32[R,A] slot of each pair, beyond all slots for pairs of no expert. pairs: i32[slots] pair (token * A +
    choice) of each slot, R * A where a block is not full. expert: i32[blocks] expert of each block. used: blocks that
    hold anything; the others are never visited.
    """

    slots: Int32[Array, "R A"]
    pairs: Int32[Array, " S"]
    expert: Int32[Array, " blocks"]
    used: Int32[Array, ""]


def plan(ids: Int32[Array, "R A"], experts: int, block: int) -> Plan:
    """Sort the pairs by expert and pad every expert's share to whole blocks; ids of `experts` are no expert's."""
    R, A = ids.shape
    blocks = -(-R * A // block) + min(experts, R * A)
    chosen = ids.reshape(-1)
    count = jnp.bincount(chosen, length=experts)
    last = jnp.cumsum(-(-count // block))
    order = jnp.argsort(chosen, stable=True)
    rank = jnp.arange(R * A) - (jnp.cumsum(count) - count)[chosen[order]]
    slot = (last - -(-count // block))[chosen[order]] * block + rank
    slot = jnp.where(chosen[order] < experts, slot, blocks * block)
    slots = jnp.zeros(R * A, jnp.int32).at[order].set(slot.astype(jnp.int32))
    pairs = jnp.full(blocks * block, R * A, jnp.int32).at[slot].set(order.astype(jnp.int32), mode="drop")
    expert = jnp.searchsorted(last, jnp.arange(blocks), side="right").astype(jnp.int32)
    return Plan(slots.reshape(R, A), pairs, jnp.minimum(expert, experts - 1), last[-1].astype(jnp.int32))


def block_size(pairs: int, experts: int) -> int:
    """Rows per block: the power of two next to an expert's average share, so that blocks are mostly full."""
    share = max(1, pairs // experts)
    return min(LARGEST_BLOCK, max(SMALLEST_BLOCK, 1 << (share - 1).bit_length()))


def experts(
    x: Float[Array, "R D"],
    gate_up: Float[Array, "E D F"] | Quantized,
    down: Float[Array, "E I D"] | Quantized,
    weights: Float32[Array, "R A"],
    ids: Int32[Array, "R A"],
    *,
    among: int | None = None,
) -> Float32[Array, "R D"]:
    """See `dgemma_jax.kernels.grouped_matmul.experts`, before the sum is rounded; ids of E are no expert's.

    among: how many experts the tokens choose from, None: E; a block has the size of an expert's share of them. The trip
    count is data, so there is no reverse mode.
    """
    (E, width, D), A = down.shape, ids.shape[1]
    block = block_size(ids.size, among or E)
    where = plan(ids, E, block)
    padded = jnp.concatenate([x, jnp.zeros((1, D), x.dtype)])

    def visit(index: Int32[Array, ""], out: Float32[Array, "S D"]) -> Float32[Array, "S D"]:
        expert = where.expert[index]
        rows = padded[jax.lax.dynamic_slice_in_dim(where.pairs, index * block, block) // A]
        inner = rows @ _of(expert, gate_up, x.dtype)
        hidden = jax.nn.gelu(inner[:, :width], approximate=True) * inner[:, width:]
        result = jnp.matmul(hidden, _of(expert, down, x.dtype), preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, result, index * block, axis=0)

    # What no pair fills is never read. Zeros would be one constant for all layers, which each had to copy first.
    slots = jnp.broadcast_to(x[:1].astype(jnp.float32), (where.pairs.shape[0], D))
    slots = jax.lax.fori_loop(0, where.used, visit, slots)
    return combine(weights, slots[where.slots], ids, E)


def combine(
    weights: Float32[Array, "R A"], results: Float32[Array, "R A D"], ids: Int32[Array, "R A"], experts: int
) -> Float32[Array, "R D"]:
    """The weighted sum over a token's experts, in a fixed order; results of pairs of no expert may be anything."""
    return jnp.einsum("ra,rad->rd", weights, jnp.where((ids < experts)[..., None], results, 0.0))


def _of(expert: Int32[Array, ""], weights: Weight, dtype: jnp.dtype) -> Float[Array, "K N"]:
    """The matrix of one expert."""
    return dequantized(taken(weights, expert, 1, axis=0), dtype)[0]
