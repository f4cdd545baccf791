"""The functional layer: (graph, params, arrays) in, arrays out, for notebooks, training and the denoising loop.

Call these inside a jitted function that closes over graph: `jax.jit(partial(dg.encode, model.graph))`. Called as they
are they run operation by operation, which is slow to start but shows every value. params is the plain nested dict of
`Model.params`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Bool, Float, Int

from dgemma_jax.cache import KVCache
from dgemma_jax.config import Config
from dgemma_jax.diffusion.random import proposal_uniforms
from dgemma_jax.image_batch import ImageBatch
from dgemma_jax.kernels.vocab_head import HeadStats, vocab_head
from dgemma_jax.kernels.vocab_head import reference as head_reference
from dgemma_jax.model.transformer import Transformer, merge
from dgemma_jax.model.vision import place
from dgemma_jax.shapes import Array, Canvas, CanvasHidden, Hidden, Lengths, Logits, PerRow, RowKeys, RowMask, Tokens
from dgemma_jax.spmd import CACHE, ROWS, WHOLE, on_devices


def encode(
    graph: nnx.GraphDef,
    params: dict,
    tokens: Tokens,
    lengths: Lengths,
    cache: KVCache,
    images: ImageBatch | None = None,
) -> tuple[KVCache, Hidden]:
    """Read tokens causally and append them to the cache: prompt prefill, whole or in chunks, and commits.

    tokens i32[B,T], rows right-padded; lengths i32[B]: tokens of each row that count (0 leaves a row as it is).
    images: their soft tokens take the places of the `image_token_id` among the tokens, in order, row after row; an
    image must lie in one call, and its tokens see each other as `Config.image_blocks` says.
    Returns the cache with lengths added and the final-normed states f[B,T,D]; states of padding mean nothing.
    Outside jit, raises ValueError for ids outside the vocabulary, lengths outside 0 .. T, a row that would exceed the
    cache's capacity, and images that do not fit their places; inside jit these are the caller's care.
    """
    config = merge(graph, params).config
    _check_ids("tokens", tokens, cache, config)
    _check_lengths(lengths, tokens.shape[1], cache)
    placed = ()
    if images is not None:
        _check_tower(config)
        holes = (tokens == config.image_token_id) & (jnp.arange(tokens.shape[1]) < lengths[:, None])
        _check_places(images, holes)
        placed = place(image_features(graph, params, images), jnp.asarray(images.counts), holes)
    takes = (ROWS, ROWS, CACHE, *[ROWS] * len(placed))
    run = on_devices(graph, params, len(tokens), Transformer.encode, takes, (CACHE, ROWS))
    return run(tokens, lengths, cache, *placed)


def image_features(graph: nnx.GraphDef, params: dict, images: ImageBatch) -> Float[Array, "n Q D"]:
    """The soft tokens of images, f[n,Q,D] in the text model's width; those of an image beyond its count mean nothing.

    Q is P over the square of the pooling kernel. ValueError if the model has no image tower.
    """
    _check_tower(merge(graph, params).config)
    see = lambda model, images: model.vision(images)  # noqa: E731  (the same on every device of a mesh)
    return on_devices(graph, params, len(images.counts), see, (WHOLE,), WHOLE)(images)


def denoise_logits(
    graph: nnx.GraphDef, params: dict, canvas: Canvas, cache: KVCache, soft: CanvasHidden | None = None
) -> Logits:
    """Logits f32[B,C,V] of a canvas behind the cached prefix: soft-capped, without temperature.

    soft f[B,C,D]: self-conditioning input of the step before (`soft_embedding`); None and zeros both mean none, as in
    the first step of every canvas.
    """
    _check_ids("canvas", canvas, cache, merge(graph, params).config)

    def run(model: Transformer, canvas: Canvas, cache: KVCache, soft: CanvasHidden | None) -> Logits:
        hidden, embedder = model.denoise(canvas, cache, soft), model.embedder
        own = head_reference.capped_logits(hidden, embedder.table[...], model.config.final_logit_softcapping)
        return embedder.shard.gather(own, axis=2)[..., : embedder.shard.size]

    return on_devices(graph, params, len(canvas), run, (ROWS, CACHE, ROWS), ROWS)(canvas, cache, soft)


def soft_embedding(graph: nnx.GraphDef, params: dict, logits: Logits) -> CanvasHidden:
    """softmax(logits) @ table * sqrt(D), f[B,C,D]; logits f32[B,C,V] already divided by the step's temperature."""

    def run(model: Transformer, logits: Logits) -> CanvasHidden:
        embedder, probabilities = model.embedder, jax.nn.softmax(logits, axis=-1)
        own = embedder.shard.part(probabilities, axis=2)
        how = (embedder.scale, embedder.dtype, embedder.shard)
        return head_reference.soft_embedding(own, embedder.table[...], *how)

    return on_devices(graph, params, len(logits), run, (ROWS,), ROWS)(logits)


def denoise(
    graph: nnx.GraphDef,
    params: dict,
    canvas: Canvas,
    cache: KVCache,
    soft: CanvasHidden | None,
    temperature: PerRow,
    keys: RowKeys,
    *,
    suppress: Bool[Array, " V"] | Bool[Array, "B V"] | Int[Array, " n"] | None = None,
    draw_temperature: PerRow | None = None,
    top_k: Lengths | None = None,
    top_p: PerRow | None = None,
) -> HeadStats:
    """One pass over a canvas and its vocabulary head: argmax, sample, entropy, logprob and the next soft embedding.

    temperature f32[B] > 0. keys: one per row, already holding canvas and step (`diffusion.random.step_keys`).
    suppress: ids never produced, as a mask (True = suppressed, for all rows or row by row) or as ids.
    draw_temperature f32[B] divides the proposal's logits once more; 0: the proposal is the argmax; None: 1.
    top_k i32[B], top_p f32[B]: the logits before temperature are cut to the likeliest ids, see
    `kernels.vocab_head.reference.floor`; 0 and 1 leave a row whole, None all rows.
    """
    config = merge(graph, params).config
    _check_ids("canvas", canvas, cache, config)

    def run(model: Transformer, canvas: Canvas, cache: KVCache, soft: CanvasHidden | None, *rows: Any) -> HeadStats:
        return head_stats(model, model.denoise(canvas, cache, soft), *rows)

    suppress = _suppression(suppress, len(canvas), config.vocab_size)
    rows = (temperature, keys, suppress, draw_temperature, top_k, top_p)
    takes = (ROWS, CACHE, ROWS, *[ROWS] * len(rows))
    return on_devices(graph, params, len(canvas), run, takes, ROWS)(canvas, cache, soft, *rows)


def head_stats(
    model: Transformer,
    hidden: CanvasHidden,
    temperature: PerRow,
    keys: RowKeys,
    suppress: Bool[Array, "B V"] | None,
    draw_temperature: PerRow | None,
    top_k: Lengths | None,
    top_p: PerRow | None,
    active: RowMask | None = None,
) -> HeadStats:
    """The vocabulary head over the states of a canvas, see `denoise`; on a mesh, of one device's rows.

    active: rows of which anything is asked, None: all.
    """
    B, C = hidden.shape[:2]
    config: Config = model.config
    return vocab_head(
        hidden,
        model.embedder.table[...],
        temperature,
        jnp.ones(B, jnp.float32) if draw_temperature is None else draw_temperature,
        proposal_uniforms(keys, C, config.vocab_size),
        suppress,
        softcap=config.final_logit_softcapping,
        scale=model.embedder.scale,
        top_k=top_k,
        top_p=top_p,
        active=active,
        shard=model.embedder.shard,
        implementation=model.implementations.head,
    )


def _suppression(suppress: Array | None, rows: int, vocab: int) -> Bool[Array, "B V"] | None:
    if suppress is None:
        return None
    suppress = jnp.asarray(suppress)
    if suppress.dtype != bool:
        suppress = jnp.zeros(vocab, bool).at[suppress.astype(jnp.int32)].set(True)
    return jnp.broadcast_to(suppress, (rows, vocab))


def _check_ids(name: str, ids: Array, cache: KVCache, config: Config) -> None:
    """Rows must be the cache's; a lookup clamps ids beyond the table without a word, so they are found here."""
    if ids.shape[0] != len(cache.lengths):
        raise ValueError(f"{name} have {ids.shape[0]} rows and the cache {len(cache.lengths)}; they must be the same")
    if isinstance(ids, Tracer):
        return
    low, high = int(jnp.min(ids)), int(jnp.max(ids))
    if low < 0 or high >= config.vocab_size:
        raise ValueError(f"{name} hold id {low if low < 0 else high}; expected ids in 0 .. {config.vocab_size - 1}")


def _check_tower(config: Config) -> None:
    if config.vision is None or config.image_token_id is None:
        raise ValueError("this model reads no images: its config.json has no vision_config, or no id for images")


def _check_places(images: ImageBatch, holes: Array) -> None:
    if len(images.counts) == 0:
        raise ValueError("images hold no image; expected at least one, or None")
    if isinstance(holes, Tracer) or isinstance(images.counts, Tracer):
        return
    places, tokens = int(jnp.sum(holes)), int(np.sum(images.counts))
    if places != tokens:
        raise ValueError(f"the tokens hold {places} placeholders of images, which are {tokens} soft tokens together")


def _check_lengths(lengths: Array, tokens: int, cache: KVCache) -> None:
    if lengths.shape != cache.lengths.shape or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths are {lengths.dtype}{list(lengths.shape)}; expected one integer per row of the cache")
    if isinstance(lengths, Tracer) or isinstance(cache.lengths, Tracer):
        return
    low, high, total = int(jnp.min(lengths)), int(jnp.max(lengths)), int(jnp.max(cache.lengths + lengths))
    if low < 0 or high > tokens:
        raise ValueError(f"lengths hold {low if low < 0 else high}; expected 0 .. {tokens}, the width of tokens")
    if total > cache.capacity:
        raise ValueError(
            f"encode: {total} positions exceed the cache's capacity of {cache.capacity}; "
            "make it larger with init_cache(config, batch, capacity)"
        )
