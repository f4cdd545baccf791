"""Plausible wrong readings of the denoising loop: each must change the tokens or the steps of a canvas.

The steps are made by our loop's step function; only the network pass below it is compiled, once for all mutants. The
reference is transformers' ``generate()`` fed with our random stream.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import dgemma_jax as dg
from dgemma_jax.diffusion import policy, random
from dgemma_jax.diffusion import step as step_module
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
WRONG_CONDITIONING = {
    "conditioning is dropped": lambda now, previous: jnp.zeros_like(now),
    "conditioning is one step late": lambda now, previous: previous,
}


@pytest.fixture(scope="module")
def expected(pair_of):
    """The first canvas of the reference, its steps, and our cache behind the prompts."""
    pair = pair_of(FREE.model)
    found = reference(pair, replace(FREE, canvases=1))
    cache, _ = pair.ours.prompt(prompts(pair.shape, ROWS), 64)
    return found.tokens, found.steps[0], cache


def denoise_canvas(monkeypatch, ours, cache, wrong: dict, conditioning=None):
    """One canvas by our step function under a policy: argmax tokens, last noisy canvas, steps."""

    def network(graph, params, canvas, cache, soft, temperature, keys, **_):
        stats = ours.denoise(canvas, cache, soft, temperature, keys)
        return replace(stats, soft=conditioning(stats.soft, soft)) if conditioning else stats

    monkeypatch.setattr(step_module, "denoise", network)
    config, first = ours.config, jnp.zeros(ROWS, jnp.int32)
    keys = jnp.stack([random.key_from_seed(seed) for seed in seeds(FREE)])
    knobs = policy.Knobs.of([dg.Sampling(**FREE.settings).merged(BUILT_IN)] * ROWS)
    state = step_module.start(config, keys, first, jnp.ones(ROWS, bool), config.dtype)
    suppress = jnp.zeros((ROWS, config.vocab_size), bool)
    while bool(state.running.any()):
        state = step_module.step(
            ours.graph, ours.params, cache, state, keys, first, knobs, suppress, dg.Policy(**wrong)
        )
    return np.asarray(state.best), np.asarray(state.canvas), np.asarray(state.steps)


def agrees(expected, tokens, steps) -> bool:
    return np.array_equal(tokens, expected[0]) and np.array_equal(steps, expected[1])


def test_without_a_mutation_all_agree(pair_of, expected, monkeypatch):
    """And what is committed is the argmax, not the noisy canvas of the last step."""
    best, canvas, steps = denoise_canvas(monkeypatch, pair_of(FREE.model).ours, expected[2], {})
    assert agrees(expected, best, steps)
    assert not np.array_equal(canvas, best)


@pytest.mark.parametrize("name", WRONG_POLICIES)
def test_wrong_policy_is_noticed(pair_of, expected, monkeypatch, name):
    best, _, steps = denoise_canvas(monkeypatch, pair_of(FREE.model).ours, expected[2], WRONG_POLICIES[name])
    assert not agrees(expected, best, steps)


@pytest.mark.parametrize("steps", [2, 6, 48])
def test_schedule_equals_transformers(steps):
    """Every temperature of a canvas; a schedule that ends exactly at t_min is too close for tokens to tell."""
    made = jnp.arange(steps)
    knobs = policy.Knobs.of([dg.Sampling(**FREE.settings | {"max_denoising_steps": steps}).merged(BUILT_IN)] * steps)
    expected = replay.temperatures(FREE.settings["t_min"], FREE.settings["t_max"], steps)
    assert rel(policy.linear_schedule(made, knobs), expected) <= 1e-6
    for wrong in (rising_schedule, schedule_that_reaches_the_end):
        assert rel(wrong(made, knobs), expected) > 5e-3


@pytest.mark.parametrize("name", WRONG_CONDITIONING)
def test_wrong_conditioning_is_noticed(pair_of, expected, monkeypatch, name):
    wrong = WRONG_CONDITIONING[name]
    best, _, steps = denoise_canvas(monkeypatch, pair_of(FREE.model).ours, expected[2], {}, wrong)
    assert not agrees(expected, best, steps)
