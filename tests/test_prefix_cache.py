"""Encoded prompts that serve again: the same answers, bounded memory."""

import random
from dataclasses import replace

import pytest

import dgemma_jax as dg
from dgemma_jax.engine.capacity import cache_bytes
from tests.random_models import SMALL, random_model

C, SLOTS = SMALL.canvas_length, 4
SAMPLING = dg.Sampling(max_new_tokens=C + 3, seed=1)


@pytest.fixture(scope="module")
def model():
    return random_model(max_model_len=200)


def answer(engine, prompt, **chosen) -> dg.Completion:
    return engine.submit(prompt, replace(SAMPLING, **chosen)).result(300)


def cold(model, prompt, **chosen) -> dg.Completion:
    return model.generate([prompt], replace(SAMPLING, **chosen), slots=SLOTS)[0]


@pytest.mark.parametrize("first", [1, 7, 8, 9, 30, 70])
def test_a_second_turn_equals_a_fresh_one(model, first):
    """Prompts around the window of 8 and beyond it, in full buffers and rings."""
    with dg.Engine(model, slots=SLOTS, prefix_cache_bytes=10**6) as engine:
        opening = [3 + i % 90 for i in range(first)]
        once = answer(engine, opening)
        assert once == cold(model, opening)
        longer = [*opening, *once.tokens, 5, 6]
        again = answer(engine, longer, seed=2)
        assert again.cached_tokens == first
        assert replace(again, cached_tokens=0) == cold(model, longer, seed=2)
        assert replace(answer(engine, longer, seed=2), cached_tokens=0) == cold(model, longer, seed=2)


def test_the_longest_prefix_is_taken_and_another_text_never(model):
    with dg.Engine(model, slots=SLOTS, prefix_cache_bytes=10**6) as engine:
        for length in (10, 20, 30):
            answer(engine, list(range(length)))
        assert answer(engine, list(range(25))).cached_tokens == 20
        assert answer(engine, list(range(40))).cached_tokens == 30
        other = [*range(29), 77, 78, 79]
        found = answer(engine, other)
        assert found.cached_tokens == 25
        assert replace(found, cached_tokens=0) == cold(model, other)


def test_memory_is_bounded_and_the_oldest_go_first(model):
    with dg.Engine(model, slots=SLOTS) as engine:
        answer(engine, [1, 2, 3])
        one = engine._scheduler.prefixes.nbytes
    assert one > 0
    with dg.Engine(model, slots=SLOTS, prefix_cache_bytes=3 * one) as engine:
        prefixes = engine._scheduler.prefixes
        for index in range(5):
            answer(engine, [index, 2, 3])
            assert prefixes.nbytes <= 3 * one
        assert len(prefixes) == 3
        assert answer(engine, [2, 2, 3, 4]).cached_tokens == 3
        assert answer(engine, [1, 2, 3, 4]).cached_tokens == 0
    for room in (0, one - 1):
        with dg.Engine(model, slots=SLOTS, prefix_cache_bytes=room) as engine:
            answer(engine, [1, 2, 3])
            assert answer(engine, [1, 2, 3, 4]).cached_tokens == 0
    with pytest.raises(ValueError, match="prefix_cache_bytes is -1"):
        dg.Engine(model, prefix_cache_bytes=-1)


def test_a_snapshot_fits_a_cache_that_has_grown(model):
    with dg.Engine(model, slots=SLOTS) as engine:
        answer(engine, [1, 2, 3])
        answer(engine, [9] * 150)
        found = answer(engine, [1, 2, 3, 4, 5])
        assert found.cached_tokens == 3
        assert replace(found, cached_tokens=0) == cold(model, [1, 2, 3, 4, 5])


def test_prompts_in_turn_and_one_that_goes_on(model):
    """A, B, A, A with more behind it: what was encoded for one never serves the other."""
    a, b = [3 + i % 50 for i in range(60)], [60 - i % 50 for i in range(60)]
    with dg.Engine(model, slots=SLOTS, prefix_cache_bytes=10**6) as engine:
        for prompt in (a, b, a, [*a, 5, 6, 7]):
            assert replace(answer(engine, prompt), cached_tokens=0) == cold(model, prompt)
        assert engine.stats.prefix_hits == 2


def test_the_same_prompt_again_is_not_encoded_again(model):
    """Not even its last token: no logits are wanted of it."""
    with dg.Engine(model, slots=SLOTS, prefix_cache_bytes=10**6) as engine:
        first, *again = [answer(engine, [7] * 20, seed=seed) for seed in (1, 1, 2)]
        assert [found.cached_tokens for found in (first, *again)] == [0, 20, 20]
        assert replace(again[0], cached_tokens=0) == first
        assert replace(again[1], cached_tokens=0) == cold(model, [7] * 20, seed=2)
        handles = [engine.submit([8] * 20, replace(SAMPLING, seed=seed)) for seed in range(SLOTS)]
        assert [handle.result(300).cached_tokens for handle in handles] == [0, 20, 20, 20]


def test_nothing_wrong_comes_of_a_cache_that_is_always_full(model):
    """Prompts that share beginnings, at once and one after the other, in room for two or three of them."""
    rng = random.Random(0)
    stems = [[rng.randrange(96) for _ in range(length)] for length in (5, 8, 40)]
    prompts = [stem[: rng.randint(1, len(stem))] + [rng.randrange(96)] * rng.randint(0, 9) for stem in stems * 10]
    one = cache_bytes(model.config, 64, "float32")
    with dg.Engine(model, slots=SLOTS, prefix_cache_bytes=int(2.5 * one)) as engine:
        handles = [engine.submit(prompt, SAMPLING) for prompt in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            assert replace(handle.result(300), cached_tokens=0) == cold(model, prompt)
            assert 0 < engine._scheduler.prefixes.nbytes <= 2.5 * one
        assert engine.stats.prefix_hits > 3


def test_a_canvas_that_was_broken_off_is_not_kept(model):
    prompt, endless = list(range(40)), {"max_denoising_steps": 10_000, "confidence_threshold": None}
    with dg.Engine(model, slots=SLOTS, prefix_cache_bytes=10**6) as engine:
        handle = engine.submit(prompt, replace(SAMPLING, **endless), drafts=1)
        next(iter(handle))
        handle.cancel()
        assert handle.result(300).finish_reason == "cancelled"
        again = answer(engine, [*prompt, 9])
        assert again.cached_tokens == len(prompt)
        assert replace(again, cached_tokens=0) == cold(model, [*prompt, 9])
