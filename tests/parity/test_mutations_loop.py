"""Plausible wrong readings of the denoising loop: each must change the tokens or the steps of a canvas.

The steps are made by our loop's step function; only the network pass below it is compiled, once for all mutants. The
reference is transformers' ``generate()`` fed with our random stream.
"""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import dgemma_jax as dg
from dgemma_jax.diffusion import policy, random
from dgemma_jax.diffusion import step as step_module
from dgemma_jax.diffusion.step import CanvasState
from dgemma_jax.sampling import BUILT_IN

from . import replay
from .ours import rel
from .test_generate import FREE, prompts, reference, seeds

pytestmark = pytest.mark.parity

ROWS = 3


def rising_schedule(step, knobs):
    """Counts the steps made instead of those left."""
    done = (step + 1).astype(jnp.float32) / knobs.max_steps
    return knobs.t_min + (knobs.t_max - knobs.t_min) * done


def schedule_that_reaches_the_end(step, knobs):
    left = (knobs.max_steps - 1 - step).astype(jnp.float32) / (knobs.max_steps - 1)
    return knobs.t_min + (knobs.t_max - knobs.t_min) * left


def accept_own_entropy_included(entropy, knobs):
    order = jnp.argsort(entropy, axis=-1)
    inside = jnp.cumsum(jnp.take_along_axis(entropy, order, axis=-1), axis=-1) <= knobs.entropy_bound[:, None]
    return jnp.zeros(entropy.shape, bool).at[jnp.arange(entropy.shape[0])[:, None], order].set(inside)


def stop_one_step_early(streak, entropy, knobs):
    return policy.stable_and_confident(streak + 1, entropy, knobs)


def stop_without_confidence(streak, entropy, knobs):
    return streak >= knobs.stability


def keep_rejected_proposals(keys, proposal, accepted, vocab_size):
    return proposal


WRONG_POLICIES = {
    "schedule counts up": {"schedule": rising_schedule},
    "acceptance includes the own entropy": {"accept": accept_own_entropy_included},
    "stops one step early": {"stop": stop_one_step_early},
    "stops without confidence": {"stop": stop_without_confidence},
    "rejected proposals are kept": {"renoise": keep_rejected_proposals},
}
# Of the figures of a pass, what it was conditioned on, and a function that gives the figures at temperature 1.
WRONG_FIGURES = {
    "conditioning is dropped": lambda stats, soft, untempered: replace(stats, soft=jnp.zeros_like(stats.soft)),
    "conditioning is one step late": lambda stats, soft, untempered: replace(stats, soft=soft),
    "entropies are untempered": lambda stats, soft, untempered: replace(stats, entropy=untempered().entropy),
}


@pytest.fixture(scope="module")
def expected(pair_of):
    """Two canvases of the reference: (tokens, steps) of each."""
    found = reference(pair_of(FREE.model), replace(FREE, canvases=2))
    return list(zip(np.split(found.tokens, 2, axis=1), found.steps, strict=True))


@pytest.fixture(scope="module")
def caches(pair_of, expected):
    """What is in front of each of the two canvases: the prompts, then the first canvas as well."""
    pair = pair_of(FREE.model)
    prompt, _ = pair.ours.prompt(prompts(pair.shape, ROWS), 64)
    return prompt, pair.ours.encode(expected[0][0], np.full(ROWS, pair.shape.canvas), prompt)[0]


def denoise_canvas(monkeypatch, ours, cache, policies=None, figures=None, index=0, soft=None) -> CanvasState:
    """One canvas by our step function under a policy. soft: what it begins with instead of nothing."""

    def network(graph, params, canvas, cache, soft, temperature, keys, **_):
        at = lambda temperature: ours.denoise(canvas, cache, soft, temperature, keys)  # noqa: E731
        stats = at(temperature)
        return figures(stats, soft, lambda: at(jnp.ones_like(temperature))) if figures else stats

    monkeypatch.setattr(step_module, "denoise", network)
    config, which = ours.config, jnp.full(ROWS, index, jnp.int32)
    keys = jnp.stack([random.key_from_seed(seed) for seed in seeds(FREE)])
    knobs = policy.Knobs.of([dg.Sampling(**FREE.settings).merged(BUILT_IN)] * ROWS)
    state = step_module.start(config, keys, which, jnp.ones(ROWS, bool), config.dtype)
    state = state if soft is None else replace(state, soft=soft)
    suppress = jnp.zeros((ROWS, config.vocab_size), bool)
    while bool(state.running.any()):
        state = step_module.step(
            ours.graph, ours.params, cache, state, keys, which, knobs, suppress, dg.Policy(**policies or {})
        )
    return state


def agrees(expected, state: CanvasState) -> bool:
    tokens, steps = expected
    return np.array_equal(state.best, tokens) and np.array_equal(state.steps, steps)


def test_without_a_mutation_all_agree(pair_of, expected, caches, monkeypatch):
    """And what is committed is the argmax, not the noisy canvas of the last step."""
    state = denoise_canvas(monkeypatch, pair_of(FREE.model).ours, caches[0])
    assert agrees(expected[0], state)
    assert not np.array_equal(state.canvas, state.best)


def test_conditioning_that_outlives_its_canvas_is_noticed(pair_of, expected, caches, monkeypatch):
    """The second canvas agrees if it begins with none, and not with what the first one ended with."""
    denoise = partial(denoise_canvas, monkeypatch, pair_of(FREE.model).ours)
    first = denoise(caches[0])
    assert agrees(expected[1], denoise(caches[1], index=1))
    assert not agrees(expected[1], denoise(caches[1], index=1, soft=first.soft))


@pytest.mark.parametrize("name", WRONG_POLICIES)
def test_wrong_policy_is_noticed(pair_of, expected, caches, monkeypatch, name):
    state = denoise_canvas(monkeypatch, pair_of(FREE.model).ours, caches[0], WRONG_POLICIES[name])
    assert not agrees(expected[0], state)


@pytest.mark.parametrize("steps", [2, 6, 48])
def test_schedule_equals_transformers(steps):
    """Every temperature of a canvas; a schedule that ends exactly at t_min is too close for tokens to tell."""
    made = jnp.arange(steps)
    knobs = policy.Knobs.of([dg.Sampling(**FREE.settings | {"max_denoising_steps": steps}).merged(BUILT_IN)] * steps)
    expected = replay.temperatures(FREE.settings["t_min"], FREE.settings["t_max"], steps)
    assert rel(policy.linear_schedule(made, knobs), expected) <= 1e-6
    for wrong in (rising_schedule, schedule_that_reaches_the_end):
        assert rel(wrong(made, knobs), expected) > 5e-3


@pytest.mark.parametrize("name", WRONG_FIGURES)
def test_wrong_figures_are_noticed(pair_of, expected, caches, monkeypatch, name):
    state = denoise_canvas(monkeypatch, pair_of(FREE.model).ours, caches[0], figures=WRONG_FIGURES[name])
    assert not agrees(expected[0], state)
