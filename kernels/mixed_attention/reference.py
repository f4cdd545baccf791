"""Mixed-causal attention, written down: the definition every other implementation is tested against."""

import jax.numpy as jnp
from jaxtyping import Bool, Int32

from dgemma_jax.shapes import Array, Blocks, CachedKeys, Keys, Lengths, LogSums, Queries, RowMask


def slot_positions(length: Lengths, slots: int) -> Int32[Array, "B S"]:
    """The position that each slot of a ring holds after `length` writes, position p having gone to slot p % slots.

    Negative where nothing was written yet. A buffer that never wraps (length <= slots) obeys the same formula.
    """
    last = length[:, None] - 1
    return last - (last - jnp.arange(slots)) % slots


def visible(
    prefix_length: Lengths, own_length: Lengths, causal: RowMask, slots: int, tokens: int, window: int | None
) -> tuple[Bool[Array, "B T S"], Bool[Array, "B T T"]]:
    """Which cached positions and which keys of the pass itself each query sees.

    With a window of 3, two cached positions c and own keys o, a causal row and a denoising row see:

        causal    c c o o o        denoising  c c o o o
        query 0   1 1 1 . .        query 0    1 1 1 1 1
        query 1   . 1 1 1 .        query 1    1 1 1 1 1
        query 2   . . 1 1 1        query 2    1 1 1 1 1

    A causal query sees `window` keys up to and including itself. All queries of a denoising row see the whole canvas
    and the same last window - 1 cached keys: those the first canvas position would see causally.
    """
    query = jnp.arange(tokens)[None, :, None]
    key = jnp.arange(tokens)[None, None, :]
    causal = causal[:, None, None]
    position = slot_positions(prefix_length, slots)[:, None, :]
    cached = jnp.broadcast_to(position >= 0, (prefix_length.shape[0], tokens, slots))
    own = (key < own_length[:, None, None]) & (~causal | (key <= query))
    if window is not None:
        first = prefix_length[:, None, None] + jnp.where(causal, query, 0)
        cached &= position > first - window
        own &= ~causal | (key > query - window)
    return cached, own


def same_block(blocks: Blocks) -> Bool[Array, "B T T"]:
    """Whether two tokens lie in one image, a run of adjacent tokens with the same id other than 0.

    A causal query sees its own image whole, later tokens and those outside the window included, in both kinds of
    layers: transformers joins this mask to the causal one after the window has been applied to that. (Its Gemma 4 joins
    them before, in sliding layers alone: clip_blocks.)
    """
    run = jnp.cumsum(blocks != jnp.roll(blocks, 1, axis=1), axis=1)
    return (run[:, :, None] == run[:, None, :]) & (blocks != 0)[:, None, :]


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
) -> tuple[Queries, LogSums]:
    """See `dgemma_jax.kernels.mixed_attention.mixed_attention`; the softmax is in fp32, unscaled."""
    B, T, N, H = q.shape
    K, S = k.shape[2], prefix_k.shape[1]
    cached, own = visible(prefix_length, own_length, causal, S, T, window)
    if blocks is not None:
        counts = (jnp.arange(T) < own_length[:, None])[:, None, :]
        if window is not None and clip_blocks:
            counts &= jnp.arange(T) > jnp.arange(T)[:, None] - window
        own |= same_block(blocks) & counts & causal[:, None, None]
    # A slot that was never written may hold anything, NaN included: 0 * NaN would still poison the sum.
    written = slot_positions(prefix_length, S) >= 0
    prefix_v = jnp.where(written[:, :, None, None], prefix_v, 0)
    keys = jnp.concatenate([k, prefix_k.astype(k.dtype)], axis=1)
    values = jnp.concatenate([v, prefix_v.astype(v.dtype)], axis=1)
    mask = jnp.concatenate([own, cached], axis=2)[:, None, None]

    grouped = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1.0, total)).astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, values, preferred_element_type=jnp.float32)
    log_sums = jnp.moveaxis((peak + jnp.log(total))[..., 0], 3, 1).reshape(B, T, N)
    return out.reshape(B, T, N, H).astype(q.dtype), log_sums
