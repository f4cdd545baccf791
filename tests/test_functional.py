"""The functional layer outside jit says what inside jit is the caller's care; suppression comes as mask or ids."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dgemma_jax as dg
from dgemma_jax.diffusion import random
from tests.random_models import SMALL, random_model


@pytest.fixture(scope="module")
def model():
    return random_model()


def encode(model, tokens, lengths, capacity=16):
    cache = dg.init_cache(SMALL, len(tokens), capacity)
    return dg.encode(model.graph, model.params, jnp.array(tokens), jnp.array(lengths), cache)


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([[1, 96]], [2], "tokens hold id 96; expected ids in 0 .. 95"),
        ([[1, -1]], [2], "tokens hold id -1"),
        ([[1, 2]], [3], "lengths hold 3; expected 0 .. 2"),
        ([[1, 2]], [-1], "lengths hold -1"),
        ([[1] * 17], [17], "17 positions exceed the cache's capacity of 16"),
    ],
)
def test_what_cannot_be_encoded_is_refused(model, tokens, lengths, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        encode(model, tokens, lengths)


def test_a_canvas_beyond_the_vocabulary_is_refused(model):
    cache = dg.init_cache(SMALL, 1, 16)
    with pytest.raises(ValueError, match="canvas hold id 500"):
        dg.denoise_logits(model.graph, model.params, jnp.full((1, 16), 500), cache)
    with pytest.raises(ValueError, match="canvas have 2 rows and the cache 1"):
        dg.denoise_logits(model.graph, model.params, jnp.zeros((2, 16), jnp.int32), cache)


def test_suppression_is_a_mask_for_all_or_per_row_or_a_list_of_ids(model):
    cache = dg.init_cache(SMALL, 2, 16)
    keys = random.step_keys(jnp.stack([random.key_from_seed(s) for s in (1, 2)]), jnp.array([0, 0]), jnp.array([0, 0]))
    canvas = random.start_canvas(keys, 16, 96)
    jitted = jax.jit(partial(dg.denoise, model.graph), compiler_options={"xla_backend_optimization_level": 0})
    ids = jnp.array([5, 9, 90])
    mask = np.zeros(96, bool)
    mask[np.asarray(ids)] = True

    def stats(suppress):
        temperature = jnp.full(2, 0.8)
        return jitted(model.params, canvas, cache, None, temperature, keys, suppress=suppress)

    by_ids = stats(ids)
    for suppress in (jnp.array(mask), jnp.array(np.stack([mask, mask]))):
        assert np.array_equal(stats(suppress).sample, by_ids.sample)
    assert not np.isin(by_ids.sample, ids).any()
    assert np.array_equal(stats(jnp.array([], jnp.int32)).sample, stats(None).sample)
    plain = stats(None)
    np.testing.assert_allclose(
        plain.logprob[plain.argmax == by_ids.argmax], by_ids.logprob[plain.argmax == by_ids.argmax]
    )
