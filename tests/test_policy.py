"""Schedule, acceptance, renoising and stopping, each against its definition."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dgemma_jax.diffusion.policy import Knobs, Policy, accept, linear_schedule, stable_and_confident, uniform_renoise
from dgemma_jax.diffusion.random import key_from_seed, renoise_ids
from dgemma_jax.sampling import BUILT_IN, Sampling


def knobs(**chosen):
    return Knobs.of([Sampling(**chosen).merged(BUILT_IN)])


@settings(max_examples=100, deadline=None)
@given(
    entropy=hnp.arrays(np.float32, (1, 7), elements=st.floats(0, 4, width=32)),
    bound=st.floats(0.0009765625, 10, width=32),
)
def test_acceptance_is_the_longest_prefix_of_the_surest_positions(entropy, bound):
    got = np.asarray(accept(jnp.asarray(entropy), jnp.array([bound], jnp.float32)))[0]
    order = np.argsort(entropy[0], kind="stable")
    ascending = entropy[0][order]
    before = np.cumsum(ascending, dtype=np.float32) - ascending
    clear = np.abs(before - np.float32(bound)) > 1e-5  # elsewhere the order of a float32 sum decides
    assert np.array_equal(got[order][clear], (before <= np.float32(bound))[clear])
    assert got[order[0]]


def test_rows_have_their_own_bound():
    entropy = jnp.array([[0.3, 0.1, 0.2]] * 3)
    got = accept(entropy, jnp.array([0.05, 0.15, 5.0]))
    assert got.tolist() == [[False, True, False], [False, True, True], [True, True, True]]


def test_the_temperature_falls_from_t_max_and_never_reaches_t_min():
    row = knobs(max_denoising_steps=4, t_min=0.4, t_max=0.8)
    got = [float(linear_schedule(jnp.array([step]), row)[0]) for step in range(4)]
    np.testing.assert_allclose(got, [0.8, 0.7, 0.6, 0.5], rtol=1e-6)


@pytest.mark.parametrize("off", [{"t_min": None}, {"t_max": None}])
def test_no_temperature_divides_by_one(off):
    assert float(linear_schedule(jnp.array([3]), knobs(**off))[0]) == 1.0


@pytest.mark.parametrize(("threshold", "stops_at"), [(0, 1), (1, 3), (2, 4)])
def test_a_canvas_stops_after_threshold_further_equal_bests(threshold, stops_at):
    """Best canvases A, B, B, B with a mean entropy of 0.001."""
    streaks, entropy = [0, 0, 1, 2], jnp.full((1, 5), 0.001)
    row = knobs(stability_threshold=threshold)
    stops = [bool(stable_and_confident(jnp.array([streak]), entropy, row)[0]) for streak in streaks]
    assert stops.index(True) + 1 == stops_at


def test_off_is_a_neutral_value_and_choices_are_row_by_row():
    rows = Knobs.of([Sampling(top_k=k, top_p=p).merged(BUILT_IN) for k, p in ((None, None), (0, 1), (40, 0.9))])
    assert rows.top_k.tolist() == [0, 0, 40] and rows.top_k.dtype == np.int32
    assert rows.top_p.tolist() == [1, 1, np.float32(0.9)] and rows.top_p.dtype == np.float32


def test_confidence_is_strict_and_either_none_switches_stopping_off():
    at_bound, streak = jnp.full((1, 4), 0.25), jnp.array([9])
    assert not stable_and_confident(streak, at_bound, knobs(confidence_threshold=0.25))[0]
    assert stable_and_confident(streak, at_bound, knobs(confidence_threshold=0.26))[0]
    for off in ({"confidence_threshold": None}, {"stability_threshold": None}):
        assert not stable_and_confident(streak, jnp.zeros((1, 4)), knobs(**off))[0]


def test_rejected_positions_get_fresh_ids():
    keys, proposal = jnp.stack([key_from_seed(0)]), jnp.full((1, 6), 999, jnp.int32)
    accepted = jnp.array([[True, False, True, False, False, True]])
    got = np.asarray(uniform_renoise(keys, proposal, accepted, 100))
    np.testing.assert_array_equal(got[accepted], 999)
    np.testing.assert_array_equal(got[~accepted], np.asarray(renoise_ids(keys, 6, 100))[~accepted])


def test_a_policy_is_a_value():
    assert Policy() == Policy()
    assert hash(Policy()) == hash(Policy())
    assert Policy(stop=lambda streak, entropy, knobs: streak > 0) != Policy()
