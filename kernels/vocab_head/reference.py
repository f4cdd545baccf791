"""The vocabulary head with all logits in memory: the definition every streamed implementation is tested against."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int32

from dgemma_jax.kernels.quantized import Table, dequantized
from dgemma_jax.kernels.shard import Shard
from dgemma_jax.kernels.vocab_head.types import TILE, HeadStats
from dgemma_jax.shapes import Array, Canvas, CanvasHidden, Lengths, Logits, PerRow


def capped_logits(hidden: CanvasHidden, table: Table, softcap: float) -> Logits:
    """softcap * tanh(hidden . table / softcap), accumulated and capped in fp32: bf16 would tie the top logits."""
    table = dequantized(table, hidden.dtype)
    raw = jnp.einsum("bcd,vd->bcv", hidden, table, preferred_element_type=jnp.float32)
    return softcap * jnp.tanh(raw / softcap)


def soft_embedding(
    probabilities: Logits, table: Table, scale: float, dtype: jnp.dtype | str, shard: Shard | None = None
) -> CanvasHidden:
    """(p @ table) * scale in `dtype`, the expected scaled embedding; p is cast once, the sum is in fp32.

    shard: inside `shard_map`, which ids these are; every device gets the embedding over all of them.
    """
    table = dequantized(table, dtype)
    mean = jnp.einsum("bcv,vd->bcd", probabilities.astype(table.dtype), table, preferred_element_type=jnp.float32)
    return ((shard.sum(mean) if shard else mean) * scale).astype(dtype)


def inverse_cdf(weights: Float32[Array, "... n"], uniform: Float32[Array, "..."]) -> Int32[Array, "..."]:
    """The first index whose cumulative weight exceeds uniform * total; an index of weight 0 is never chosen."""
    cumulative = jnp.cumsum(weights, axis=-1)
    return jnp.sum(cumulative <= uniform[..., None] * cumulative[..., -1:], axis=-1, dtype=jnp.int32)


def draw(weights: Logits, uniforms: Float32[Array, "B U C"]) -> Canvas:
    """One id per position, with probability proportional to its weight: first the tile, then the id inside it.

    uniforms[b, 0] chooses among the tiles of TILE ids from their sums, uniforms[b, 1 + j] inside tile j.
    """
    B, C, V = weights.shape
    tiles = -(-V // TILE)
    weights = jnp.pad(weights, ((0, 0), (0, 0), (0, tiles * TILE - V))).reshape(B, C, tiles, TILE)
    tile = inverse_cdf(jnp.sum(weights, axis=-1), uniforms[:, 0])[..., None]
    inside = jnp.take_along_axis(weights, tile[..., None], axis=2)[:, :, 0]
    uniform = jnp.take_along_axis(jnp.swapaxes(uniforms[:, 1:], 1, 2), tile, axis=2)[..., 0]
    return tile[..., 0] * TILE + inverse_cdf(inside, uniform)


def floor(allowed: Logits, top_k: Lengths, top_p: PerRow) -> Float32[Array, "B C"]:
    """The lowest logit that top_k and top_p leave: an id stays where the likelier ids are few and do not hold enough.

    top_k[b] > 0: fewer than top_k ids are strictly likelier. top_p[b] < 1: of the distribution over those that are
    left, the strictly likelier ids hold less than top_p. Ids that tie share their fate; the likeliest always stay.
    """
    descending = -jnp.sort(-allowed, axis=-1)
    last = jnp.where(top_k > 0, jnp.minimum(top_k, allowed.shape[-1]), allowed.shape[-1]) - 1
    kth = jnp.take_along_axis(descending, last[:, None, None], axis=-1)
    chances = jax.nn.softmax(jnp.where(descending >= kth, descending, -jnp.inf), axis=-1)
    likelier = jnp.cumsum(chances, axis=-1) - chances
    limit = jnp.where(top_p < 1, top_p, jnp.inf)[:, None, None]
    stays = (likelier < limit).at[..., 0].set(True)
    return jnp.maximum(jnp.min(jnp.where(stays, descending, jnp.inf), axis=-1), kth[..., 0])


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
) -> HeadStats:
    """See `dgemma_jax.kernels.vocab_head.vocab_head`."""
    logits = capped_logits(hidden, table, softcap)
    allowed = logits if suppress is None else jnp.where(suppress[:, None], -jnp.inf, logits)
    if top_k is not None:
        assert top_p is not None  # both or neither
        allowed = jnp.where(allowed >= floor(allowed, top_k, top_p)[..., None], allowed, -jnp.inf)
    argmax = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    # Subtracting the peak before dividing keeps the small differences near it exact at low temperatures.
    shifted = (allowed - jnp.max(allowed, axis=-1, keepdims=True)) / temperature[:, None, None]
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    entropy = jnp.log(total) - jnp.sum(jnp.where(weights > 0, weights * shifted, 0.0), axis=-1) / total
    greedy = draw_temperature == 0
    divisor = jnp.where(greedy, 1.0, draw_temperature)
    sample = draw(jnp.exp(shifted / divisor[:, None, None]), uniforms)
    lse = jax.nn.logsumexp(logits, axis=-1)
    logprob = lambda ids: jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0] - lse  # noqa: E731
    return HeadStats(
        argmax=argmax,
        sample=jnp.where(greedy[:, None], argmax, sample),
        entropy=entropy,
        logprob=logprob(argmax),
        soft=soft_embedding(weights / total[..., None], table, scale, hidden.dtype),
        id_logprob=None if ids is None else logprob(ids),
    )
