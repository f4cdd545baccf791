"""The random stream is a contract: these numbers must never change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgemma_jax.diffusion import random
from dgemma_jax.kernels.vocab_head import TILE

GOLDEN = {
    "start": [106700, 31687, 9566, 58883, 13791, 200758],
    "renoise": [70224, 169761, 98222, 153322, 182470, 247110],
    "uniforms": [
        0.3974461555480957,
        0.16376709938049316,
        0.7267115116119385,
        0.8869792222976685,
        0.12106621265411377,
        0.6534345149993896,
        0.07573223114013672,
        0.01093745231628418,
        0.5297002792358398,
    ],
}


def rows(*seeds):
    return jnp.stack([random.key_from_seed(seed) for seed in seeds])


def at(keys, canvas=0, step=0):
    B = keys.shape[0]
    return random.step_keys(keys, jnp.full(B, canvas, jnp.int32), jnp.full(B, step, jnp.int32))


def draws(seed=1, canvas=2, step=3):
    keys = at(rows(seed), canvas, step)
    return (
        random.start_canvas(keys, 6, 262_144)[0],
        random.renoise_ids(keys, 6, 262_144)[0],
        random.proposal_uniforms(keys, 3, TILE + 1)[0],
    )


def test_the_numbers_of_the_contract():
    start, renoise, uniforms = draws()
    assert start.tolist() == GOLDEN["start"]
    assert renoise.tolist() == GOLDEN["renoise"]
    assert uniforms.shape == (3, 3)  # one row among tiles, one per tile
    np.testing.assert_array_equal(np.asarray(uniforms).ravel(), np.array(GOLDEN["uniforms"], np.float32))


FLAGS = {
    "x64": lambda: jax.enable_x64(True),
    "not partitionable": lambda: jax.threefry_partitionable(False),
    "rbg": lambda: jax.default_prng_impl("rbg"),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_no_flag_changes_them(flag):
    expected = draws()
    with FLAGS[flag]():
        for got, want in zip(draws(), expected, strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)


def test_all_bits_of_the_seed_count():
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63 - 1, 2**31, 2**32 - 1]
    canvases = {tuple(random.start_canvas(at(rows(seed)), 8, 1000)[0].tolist()) for seed in seeds}
    assert len(canvases) == len(seeds)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_outside_the_range_is_refused(seed):
    with pytest.raises(ValueError, match=str(seed)):
        random.key_from_seed(seed)


def test_a_row_draws_the_same_wherever_it_sits():
    together = random.proposal_uniforms(at(rows(7, 8, 9)), 5, 100)
    alone = [random.proposal_uniforms(at(rows(seed)), 5, 100)[0] for seed in (7, 8, 9)]
    np.testing.assert_array_equal(together, np.stack(alone))


def test_canvas_step_and_purpose_give_different_draws():
    keys = rows(3)
    found = {
        tuple(draw(at(keys, canvas, step), 8, 1000)[0].tolist())
        for canvas in range(3)
        for step in range(3)
        for draw in (random.start_canvas, random.renoise_ids)
    }
    assert len(found) == 18
