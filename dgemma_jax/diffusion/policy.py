"""How a canvas is denoised, as four pure functions, and the per-row numbers they are given.

The defaults are the reference's: a linear temperature, acceptance by entropy bound, uniform renoising, and stopping
once the best canvas is stable and confident. Source: transformers' `DiffusionGemmaGenerationMixin` and its
entropy-bound sampler. Pass a `Policy` with other functions to change one of them; they run inside the jitted loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int32

from dgemma_jax.diffusion.random import renoise_ids
from dgemma_jax.sampling import Resolved
from dgemma_jax.shapes import Array, Canvas, Lengths, PerRow, RowKeys, RowMask


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Knobs:
    """One number per row of all that shapes denoising in `dg.Sampling`; traced, so changing them compiles nothing.

    Named as there, but for max_steps (max_denoising_steps), stability and confidence (their thresholds) and
    draw_temperature (temperature). entropy_bound in nats. What Sampling switches off with None has a neutral value
    here: t_min = t_max = 1, confidence = -inf, top_k = 0, top_p = 1, top_logprobs = 0.
    """

    max_steps: Int32[Array, " B"]
    entropy_bound: PerRow
    t_min: PerRow
    t_max: PerRow
    stability: Int32[Array, " B"]
    confidence: PerRow
    draw_temperature: PerRow
    top_k: Int32[Array, " B"]
    top_p: PerRow
    top_logprobs: Int32[Array, " B"]

    @classmethod
    def of(cls, samplings: Sequence[Resolved]) -> "Knobs":
        """The knobs of a batch as NumPy arrays; samplings: one per row, with no field unset."""
        rows = [_row(sampling) for sampling in samplings]
        counts = {"max_steps", "stability", "top_k", "top_logprobs"}
        kinds = [np.int32 if field.name in counts else np.float32 for field in fields(cls)]
        return cls(*(np.array(column, kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)))


def _row(s: Resolved) -> tuple[int | float, ...]:
    cold, hot, stability, confidence = 1.0, 1.0, 0, -np.inf
    if s.t_min is not None and s.t_max is not None:
        cold, hot = s.t_min, s.t_max
    if s.stability_threshold is not None and s.confidence_threshold is not None:
        stability, confidence = s.stability_threshold, s.confidence_threshold
    return (
        s.max_denoising_steps,
        s.entropy_bound,
        cold,
        hot,
        stability,
        confidence,
        1.0 if s.temperature is None else s.temperature,
        0 if s.top_k is None else s.top_k,
        1.0 if s.top_p is None else s.top_p,
        s.top_logprobs or 0,
    )


def linear_schedule(step: Lengths, knobs: Knobs) -> PerRow:
    """Temperature of the step-th pass (from 0): t_max at first, falling by (t_max - t_min) / max_steps each step."""
    left = (knobs.max_steps - step).astype(jnp.float32) / knobs.max_steps.astype(jnp.float32)
    return knobs.t_min + (knobs.t_max - knobs.t_min) * left


def accept(entropy: Float32[Array, "B C"], bound: PerRow) -> Bool[Array, "B C"]:
    """Positions in ascending order of entropy for as long as the entropy accepted before them is at most the bound.

    The surest position of a row is always accepted. Source: entropy-bounded unmasking (arXiv 2505.24857).
    """
    order = jnp.argsort(entropy, axis=-1)
    ascending = jnp.take_along_axis(entropy, order, axis=-1)
    accepted = jnp.cumsum(ascending, axis=-1) - ascending <= bound[:, None]
    rows = jnp.arange(entropy.shape[0])[:, None]
    return jnp.zeros(entropy.shape, bool).at[rows, order].set(accepted)


def entropy_bound(entropy: Float32[Array, "B C"], knobs: Knobs) -> Bool[Array, "B C"]:
    """`accept` with the row's bound."""
    return accept(entropy, knobs.entropy_bound)


def uniform_renoise(keys: RowKeys, proposal: Canvas, accepted: Bool[Array, "B C"], vocab_size: int) -> Canvas:
    """The proposal where accepted, fresh uniform ids elsewhere: rejected positions do not keep their old token."""
    return jnp.where(accepted, proposal, renoise_ids(keys, proposal.shape[1], vocab_size))


def stable_and_confident(streak: Lengths, entropy: Float32[Array, "B C"], knobs: Knobs) -> RowMask:
    """The best canvas equals those of the last `stability` steps, and the mean entropy is below `confidence`.

    streak: how many steps in a row the best canvas has been what it was the step before (0 at the first step).
    """
    return (streak >= knobs.stability) & (jnp.mean(entropy, axis=-1) < knobs.confidence)


@dataclass(frozen=True)
class Policy:
    """The four decisions of a denoising step. Functions of arrays with a leading row axis, pure and jit-able.

    schedule(step i32[B], knobs) -> temperature f32[B], positive
    accept(entropy f32[B,C], knobs) -> bool[B,C]
    renoise(keys[B] of this step, proposal i32[B,C], accepted bool[B,C], vocab_size) -> next canvas i32[B,C]
    stop(streak i32[B], entropy f32[B,C], knobs) -> bool[B]: the row's canvas is finished

    A Policy is compiled once per distinct object, so build it once and reuse it.
    """

    schedule: Callable[[Lengths, Knobs], PerRow] = linear_schedule
    accept: Callable[[Float32[Array, "B C"], Knobs], Bool[Array, "B C"]] = entropy_bound
    renoise: Callable[[RowKeys, Canvas, Bool[Array, "B C"], int], Canvas] = uniform_renoise
    stop: Callable[[Lengths, Float32[Array, "B C"], Knobs], RowMask] = stable_and_confident
