"""One denoising step of a batch of canvases."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float32, Int32

from dgemma_jax.cache import KVCache
from dgemma_jax.config import Config
from dgemma_jax.diffusion.policy import Knobs, Policy
from dgemma_jax.diffusion.random import start_canvas, step_keys
from dgemma_jax.functional import denoise
from dgemma_jax.kernels.vocab_head import HeadStats, Likeliest
from dgemma_jax.sampling import MOST_LOGPROBS
from dgemma_jax.shapes import Array, Canvas, CanvasHidden, Lengths, RowKeys, RowMask


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CanvasState:
    """What a step hands to the next. Rows that are not running never change.

    canvas: the noisy input of the next pass. best: the argmax canvas, which is what gets committed (-1 before the first
    step). logprob: log-probability (nats) of each id of best in the step that found it. likeliest: the ids that were
    the likeliest in that step, of rows that ask for them. pinned: positions that keep
    the id they have in canvas. accepted: positions whose proposal went into canvas. entropy: of each position (nats), 0
    where pinned. soft: self-conditioning input, zero before the first step. streak: steps in a row that
    left best unchanged. steps: passes made. running: neither stopped nor out of steps.
    """

    canvas: Canvas
    best: Canvas
    logprob: Float32[Array, "B C"]
    likeliest: Likeliest
    pinned: Bool[Array, "B C"]
    accepted: Bool[Array, "B C"]
    entropy: Float32[Array, "B C"]
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
        logprob=jnp.zeros((B, C), jnp.float32),
        likeliest=Likeliest(jnp.zeros((B, C, MOST_LOGPROBS), jnp.int32), jnp.zeros((B, C, MOST_LOGPROBS), jnp.float32)),
        pinned=jnp.zeros((B, C), bool),
        accepted=jnp.zeros((B, C), bool),
        entropy=jnp.zeros((B, C), jnp.float32),
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

    suppress bool[B,V]: ids that are never produced. Rows of the state that are not running stay as they are.
    Acceptance has no memory: an accepted position is drawn anew in each step and may be renoised later. The engine runs
    the same update behind a pass that also commits, see `dgemma_jax.diffusion.slots`.
    """
    now = step_keys(keys, canvas_index, state.steps)
    temperature = policy.schedule(state.steps, knobs)
    how = {"suppress": suppress, "draw_temperature": knobs.draw_temperature}
    cut = {"top_k": knobs.top_k, "top_p": knobs.top_p}
    stats = denoise(graph, params, state.canvas, cache, state.soft, temperature, now, **how, **cut)
    return update(state, stats, state.likeliest, now, knobs, policy, suppress.shape[1])


def update(
    state: CanvasState,
    stats: HeadStats,
    likeliest: Likeliest,
    now: RowKeys,
    knobs: Knobs,
    policy: Policy,
    vocab_size: int,
) -> CanvasState:
    """What the statistics of a pass make of the canvases of the running rows. now: the keys of the step.

    A pinned position is certain: it has no entropy, whatever the model thinks of it.
    """
    entropy = jnp.where(state.pinned, 0.0, stats.entropy)
    best = jnp.where(state.pinned, state.canvas, stats.argmax)
    accepted = policy.accept(entropy, knobs)
    renoised = policy.renoise(now, stats.sample, accepted, vocab_size)
    streak = jnp.where(jnp.all(best == state.best, axis=-1), state.streak + 1, 0)
    steps = state.steps + 1
    moved = CanvasState(
        canvas=jnp.where(state.pinned, state.canvas, renoised),
        best=best,
        logprob=jnp.where(state.pinned, 0.0, stats.logprob),
        likeliest=likeliest,
        pinned=state.pinned,
        accepted=accepted,
        entropy=entropy,
        soft=stats.soft,
        streak=streak,
        steps=steps,
        running=~policy.stop(streak, entropy, knobs) & (steps < knobs.max_steps),
    )
    return select(state.running, moved, state)


def select(rows: RowMask, chosen: CanvasState, other: CanvasState) -> CanvasState:
    """`chosen` in the given rows, `other` in the rest."""

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(pick, chosen, other)
