"""One denoising step of a batch of canvases."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Int32

from dgemma_jax.cache import KVCache
from dgemma_jax.config import Config
from dgemma_jax.diffusion.policy import Knobs, Policy
from dgemma_jax.diffusion.random import start_canvas, step_keys
from dgemma_jax.functional import denoise
from dgemma_jax.shapes import Array, Canvas, CanvasHidden, Lengths, RowKeys, RowMask


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CanvasState:
    """What a step hands to the next. Rows that are not running never change.

    canvas: the noisy input of the next pass. best: the argmax canvas, which is what gets committed (-1 before the first
    step). soft: self-conditioning input, zero before the first step. streak: steps in a row that left best unchanged.
    steps: passes made. running: neither stopped nor out of steps.
    """

    canvas: Canvas
    best: Canvas
    soft: CanvasHidden
    streak: Int32[Array, " B"]
    steps: Int32[Array, " B"]
    running: RowMask


def start(config: Config, keys: RowKeys, canvas_index: Lengths, active: RowMask, dtype: str) -> CanvasState:
    """Fresh random canvases for the active rows; the others are at rest. keys: the requests' own."""
    B, C = active.shape[0], config.canvas_length
    zeros = jnp.zeros(B, jnp.int32)
    return CanvasState(
        canvas=start_canvas(step_keys(keys, canvas_index, zeros), C, config.vocab_size),
        best=jnp.full((B, C), -1, jnp.int32),
        soft=jnp.zeros((B, C, config.hidden_size), dtype),
        streak=zeros,
        steps=zeros,
        running=active,
    )


def step(
    graph: nnx.GraphDef,
    params: dict,
    cache: KVCache,
    state: CanvasState,
    keys: RowKeys,
    canvas_index: Lengths,
    knobs: Knobs,
    suppress: Bool[Array, "B V"],
    policy: Policy,
) -> CanvasState:
    """One pass over every canvas, then acceptance, renoising and the stop test, row by row.

    Acceptance has no memory: an accepted position is drawn anew in each step and may be renoised later.
    """
    now = step_keys(keys, canvas_index, state.steps)
    temperature = policy.schedule(state.steps, knobs)
    stats = denoise(
        graph,
        params,
        state.canvas,
        cache,
        state.soft,
        temperature,
        now,
        suppress=suppress,
        draw_temperature=knobs.draw_temperature,
    )
    accepted = policy.accept(stats.entropy, knobs)
    streak = jnp.where(jnp.all(stats.argmax == state.best, axis=-1), state.streak + 1, 0)
    steps = state.steps + 1
    moved = CanvasState(
        canvas=policy.renoise(now, stats.sample, accepted, suppress.shape[1]),
        best=stats.argmax,
        soft=stats.soft,
        streak=streak,
        steps=steps,
        running=~policy.stop(streak, stats.entropy, knobs) & (steps < knobs.max_steps),
    )
    return jax.tree.map(lambda new, old: _select(state.running, new, old), moved, state)


def _select(rows: RowMask, new: Array, old: Array) -> Array:
    return jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)
