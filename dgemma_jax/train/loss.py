"""The diffusion loss: how well the denoiser recovers a canvas from a noised one, given the encoded prompt.

It runs the very functions that generation runs, so what is trained is what answers. It knows arrays only: any data
packed as a `Batch` and any config can be trained with it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Key

from dgemma_jax.cache import init_cache
from dgemma_jax.config import Config
from dgemma_jax.functional import denoise_logits, encode, soft_embedding
from dgemma_jax.shapes import Array, Canvas, Logits, PerRow, RowMask
from dgemma_jax.train.data import Batch


@dataclass(frozen=True)
class Objective:
    """What is asked of the model.

    copies: differently noised copies of each row's canvas; they share one encoding of the prompt.
    pure_noise: share of the copies that are noise throughout, the state every generation starts from.
    fill_weight: weight of a position after the stop id, against 1 for the answer's own.
    temperatures: range of the temperature at which a draft is fed back, as generation's schedule does.
    remat: recompute instead of keeping what is not a matrix product; less memory, more time, equal gradients.
    """

    copies: int = 4
    pure_noise: float = 0.2
    fill_weight: float = 0.1
    temperatures: tuple[float, float] = (0.4, 0.8)
    remat: bool = False


class Metrics(NamedTuple):
    """Scalars of a batch. one_shot: share of the copies noised above 0.9 whose whole answer the argmax gets right."""

    loss: Array
    one_shot: Array


def noise_levels(key: Key[Array, ""], rows: int, copies: int, pure_noise: float) -> Float32[Array, "B copies"]:
    """Probability that a position is replaced, uniform over [0, 1] with a share of ones; stratified over the copies."""
    uniform = (jnp.arange(copies) + jax.random.uniform(key, (rows, copies))) / copies
    return jnp.minimum(uniform / (1 - pure_noise), 1.0)


def add_noise(
    key: Key[Array, ""], canvas: Canvas, level: PerRow, pinned: Bool[Array, "B C"], vocab_size: int
) -> Canvas:
    """Replaces each id with probability level by one drawn uniformly from the whole vocabulary, as renoising does.

    Pinned positions stay as they are.
    """
    where, what = jax.random.split(key)
    replaced = (jax.random.uniform(where, canvas.shape) < level[:, None]) & ~pinned
    return jnp.where(replaced, jax.random.randint(what, canvas.shape, 0, vocab_size), canvas)


def diffusion_loss(
    graph, config: Config, objective: Objective, params: dict, batch: Batch, key: Key[Array, ""], self_condition: bool
) -> tuple[Float32[Array, ""], Metrics]:
    """Mean cross-entropy (nats) of the true canvas under the denoiser, over noised copies of B rows.

    With self_condition the denoiser first makes a draft without feedback, which is fed back as generation does; no
    gradient flows into the draft.
    """
    level_key, noise_key, temperature_key = jax.random.split(key, 3)
    rows, copies = len(batch.tokens), objective.copies
    denoise_pass, encode_pass = _passes(graph, objective.remat)

    cache = init_cache(config, rows, batch.tokens.shape[1], "float32")
    cache = encode_pass(params, batch.tokens, batch.lengths, cache, batch.images)
    each = (cache, batch.canvas, batch.answer, batch.pinned)
    cache, target, answer, pinned = jax.tree.map(lambda array: jnp.repeat(array, copies, axis=0), each)

    level = noise_levels(level_key, rows, copies, objective.pure_noise).reshape(-1)
    canvas = add_noise(noise_key, target, level, pinned, config.vocab_size)
    soft = None
    if self_condition:
        low, high = objective.temperatures
        temperature = jax.random.uniform(temperature_key, level.shape, minval=low, maxval=high)
        draft = jax.lax.stop_gradient(denoise_logits(graph, params, canvas, cache, None))
        soft = soft_embedding(graph, params, draft / temperature[:, None, None])
    logits = denoise_pass(params, canvas, cache, soft)

    is_answer = jnp.arange(target.shape[1]) < answer[:, None]
    weights = jnp.where(pinned, 0.0, jnp.where(is_answer, 1.0, objective.fill_weight))
    loss = _weighted_mean(_cross_entropy(logits, target), weights)
    return loss, Metrics(loss, _one_shot(logits, target, is_answer & ~pinned, level > 0.9))


def _passes(graph, remat: bool):
    def encode_pass(params, tokens, lengths, cache, images):
        return encode(graph, params, tokens, lengths, cache, images)[0]

    def denoise_pass(params, canvas, cache, soft):
        return denoise_logits(graph, params, canvas, cache, soft)

    if not remat:
        return denoise_pass, encode_pass
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(denoise_pass, policy=policy), jax.checkpoint(encode_pass, policy=policy)


def _cross_entropy(logits: Logits, target: Canvas) -> Float32[Array, "B C"]:
    picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def _weighted_mean(values: Array, weights: Array) -> Float32[Array, ""]:
    return jnp.sum(values * weights) / jnp.sum(weights)


def _one_shot(
    logits: Logits,
    target: Canvas,
    is_answer: Bool[Array, "B C"],
    counted: RowMask,
) -> Float32[Array, ""]:
    right = ((logits.argmax(-1) == target) | ~is_answer).all(-1)
    return jnp.sum(right & counted) / jnp.maximum(jnp.sum(counted), 1)
