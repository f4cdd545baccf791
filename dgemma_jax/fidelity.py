"""How far a model is from the one that it was made from: logits in the same states, and answers to the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dgemma_jax.cache import KVCache, init_cache
from dgemma_jax.config import Config
from dgemma_jax.diffusion.policy import Policy
from dgemma_jax.diffusion.random import key_from_seed
from dgemma_jax.diffusion.step import CanvasState, start, step
from dgemma_jax.engine.scheduler import admission
from dgemma_jax.events import Failed, Finished
from dgemma_jax.functional import denoise_logits, encode
from dgemma_jax.image_batch import ImageBatch
from dgemma_jax.images import image_batch
from dgemma_jax.images.placement import vision_of
from dgemma_jax.shapes import Array

if TYPE_CHECKING:
    from dgemma_jax.api import Model
    from dgemma_jax.engine.request import Request


class Runs(NamedTuple):
    """Answers: denoising steps per canvas, and the share of canvases that stopped before the step limit."""

    steps_per_canvas: float
    halting_rate: float


class Fidelity(NamedTuple):
    """rms_error: of the soft-capped logits, over all ids, positions and steps of the prompts' first canvases, where the
    source's own root mean square is source_rms. argmax_agreement: share of positions with the same likeliest id.
    steps: how many were compared. source, model: answers to the prompts, with the same seeds.
    """

    prompts: int
    steps: int
    rms_error: float
    source_rms: float
    argmax_agreement: float
    source: Runs
    model: Runs


def compare(source: Model, model: Model, requests: Sequence[Request], slots: int | None = None) -> Fidelity:
    """Both models on some requests. The logits are those of the states that the source goes through: canvas and
    self-conditioning are its own at each step, for both, behind a prompt that each has encoded itself.

    ValueError if the models differ in more than how their weights are stored, or without requests.
    """
    _check(source, model, requests)
    longest = max(len(request.ids) for request in requests)
    encoders = [_encoder(one, longest) for one in (source, model)]
    first = jax.jit(partial(_first_state, source.config, source.dtype))
    differences = jax.jit(partial(_differences, source.graph, model.graph))
    advance = jax.jit(partial(step, source.graph), static_argnums=7)
    sums, steps, zero = np.zeros(3), 0, np.zeros(1, np.int32)
    for request in requests:
        mine, other = (encoded(request) for encoded in encoders)
        asked = admission(source.config, request.sampling, key_from_seed(request.seed, request.copy))
        (keys, knobs, suppress, *_), state = asked, first(*asked)
        while bool(state.running[0]):
            sums += np.asarray(differences(source.params, model.params, state.canvas, state.soft, mine, other))
            state = advance(source.params, mine, state, keys, zero, knobs, suppress, Policy())
            steps += 1
    positions = steps * source.config.canvas_length
    error, own = (float(np.sqrt(total / positions / source.config.vocab_size)) for total in sums[:2])
    runs = [_answers(one, requests, slots) for one in (source, model)]
    return Fidelity(len(requests), steps, error, own, float(sums[2] / positions), *runs)


def _check(source: Model, model: Model, requests: Sequence[Request]) -> None:
    theirs, ours = (asdict(replace(one.config, dtype="float32", quantization=None)) for one in (source, model))
    if changed := [name for name, value in theirs.items() if ours[name] != value]:
        raise ValueError(f"the models differ in {', '.join(changed)}; name what the model was converted from")
    if not requests:
        raise ValueError("there are no prompts to compare the models on; give at least one")


def _encoder(model: Model, longest: int) -> Callable[[Request], KVCache]:
    """From a request to the cache behind its prompt. Prompts are padded to one length, so that this compiles once, and
    once for each number of images."""

    @jax.jit
    def run(params: dict, tokens: Array, lengths: Array, images: ImageBatch | None) -> KVCache:
        cache = init_cache(model.config, 1, longest + model.config.canvas_length, model.dtype)
        return encode(model.graph, params, tokens, lengths, cache, images)[0]

    def encoded(request: Request) -> KVCache:
        tokens = np.zeros((1, longest), np.int32)
        tokens[0, : len(request.ids)] = request.ids
        shown = [placed.image for placed in request.images]
        images = image_batch(shown, vision_of(model.config)) if shown else None
        return run(model.params, tokens, np.array([len(request.ids)], np.int32), images)

    return encoded


def _first_state(config: Config, dtype: str, keys: Array, *asked: Array) -> CanvasState:
    """asked: the rest of `admission`."""
    *_, canvas, pinned = asked
    state = start(config, keys, jnp.zeros(1, jnp.int32), jnp.ones(1, bool), dtype)
    return replace(state, canvas=jnp.where(canvas < 0, state.canvas, canvas), pinned=pinned)


def _differences(source_graph, graph, source_params, params, canvas, soft, mine, other) -> Array:
    """Sums over a canvas: of squared differences of the logits, of the source's squared logits, of equal argmaxes."""
    source = denoise_logits(source_graph, source_params, canvas, mine, soft)
    model = denoise_logits(graph, params, canvas, other, soft)
    equal = jnp.argmax(source, axis=-1) == jnp.argmax(model, axis=-1)
    return jnp.stack([jnp.sum(jnp.square(source - model)), jnp.sum(jnp.square(source)), jnp.sum(equal)])


def _answers(model: Model, requests: Sequence[Request], slots: int | None) -> Runs:
    steps, halted = [], []
    for index, event in model.serve(enumerate(requests), slots):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            limit = requests[index].sampling.max_denoising_steps
            steps += event.completion.steps
            halted += [count < limit for count in event.completion.steps]
    return Runs(float(np.mean(steps)), float(np.mean(halted)))
