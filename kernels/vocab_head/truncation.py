"""The floor that top_k and top_p leave, by bisection over the bits of a float32: exact, and no sort of the vocabulary.

A sort of 262,144 logits takes several times the passes over them that 32 halvings take, and twice their memory.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int32

from dgemma_jax.kernels.shard import Shard
from dgemma_jax.shapes import Array, Logits

Floor = Float32[Array, "B C"]


def floor(allowed: Logits, top_k: Int32[Array, ""], top_p: Float32[Array, ""], softcap: float, shard: Shard) -> Floor:
    """`reference.floor` where all rows have the same top_k and top_p; allowed: -softcap .. softcap, or -inf.

    allowed holds this device's ids; what is counted and summed is so over the parts of all devices.
    """
    peak = shard.max(jnp.max(allowed, axis=-1))

    def mass(above: Bool[Array, "B C V"], level: Floor) -> Floor:
        # Relative to the level, which moves: relative to the peak XLA would keep a second array of all ids.
        weights = jnp.where(above, jnp.exp(allowed - level[..., None]), 0.0)
        return shard.sum(jnp.sum(weights, axis=-1)) * jnp.exp(level - peak)

    def count(above: Bool[Array, "B C V"], _: Floor) -> Int32[Array, "B C"]:
        return shard.sum(jnp.sum(above, axis=-1, dtype=jnp.int32))

    def kth() -> Floor:
        return _lowest(allowed, bottom, peak, count, top_k)

    def nucleus() -> Floor:
        limit = top_p * mass(allowed >= lowest[..., None], lowest)
        return _lowest(allowed, lowest, peak, mass, limit)

    bottom = jnp.full(peak.shape, -softcap, jnp.float32)
    lowest = jax.lax.cond(top_k > 0, kth, lambda: bottom)
    return jax.lax.cond(top_p < 1, nucleus, lambda: lowest)


def _lowest(
    allowed: Logits,
    low: Floor,
    high: Floor,
    amount: Callable[[Bool[Array, "B C V"], Floor], Array],
    limit: Array,
) -> Floor:
    """The lowest level in low .. high with amount(logits above it) < limit, which must shrink as the level rises."""

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, rounded down; their sum would overflow
        level = _float(middle)
        enough = amount(allowed > level[..., None], level) < limit
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    return _float(jax.lax.fori_loop(0, 32, halve, (_ordered(low), _ordered(high)))[1])


def _ordered(x: Floor) -> Int32[Array, "B C"]:
    """The bits as an integer that orders like the float."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _float(ordered: Int32[Array, "B C"]) -> Floor:
    return jax.lax.bitcast_convert_type(ordered ^ ((ordered >> 31) & 0x7FFFFFFF), jnp.float32)
