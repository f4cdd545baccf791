"""Many requests in the slots of one scheduler: the pass that serves all of them, joining, leaving, cancelling."""

import random
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dgemma_jax as dg
from dgemma_jax.diffusion import slots as slots_module
from dgemma_jax.engine.programs import _advance
from dgemma_jax.engine.scheduler import FEW_PASSES, MOST_PASSES, Scheduler
from dgemma_jax.model.transformer import Transformer, merge
from tests.random_models import SMALL, random_model

C = SMALL.canvas_length
SLOTS = 4
ENDLESS = {"max_denoising_steps": 10_000, "confidence_threshold": None}


@pytest.fixture(scope="module")
def model():
    return random_model(max_model_len=200)


def scheduler(model, **how) -> Scheduler:
    parts = (model.config, model.params, model._programs, model.tokenizer, model.max_model_len)
    return Scheduler(*parts, SLOTS, dg.Policy(), **how)


def request(model, prompt, **chosen):
    return model._requests([prompt], dg.Sampling(**{"seed": 1, "max_new_tokens": 2 * C} | chosen), None)[0]


def answer(model, prompt, **chosen) -> dg.Completion:
    """Alone on the same number of slots."""
    (found,) = model.generate([prompt], dg.Sampling(**{"seed": 1, "max_new_tokens": 2 * C} | chosen), slots=SLOTS)
    return found


def test_one_pass_serves_rows_that_denoise_commit_and_rest():
    """Rows behind prefixes of other lengths, against passes of their own; what rests costs no expert and stays."""
    config = replace(SMALL, sliding_window=8)
    model = random_model(config)
    rng = np.random.default_rng(0)
    prompt, lengths = rng.integers(0, 96, (3, 30)), jnp.array([30, 11, 19])
    canvas = jnp.asarray(rng.integers(0, 96, (3, C)))
    soft = jnp.asarray(rng.normal(size=(3, C, config.hidden_size)), jnp.float32)
    encode = jax.jit(partial(dg.encode, model.graph))
    cache, _ = encode(model.params, jnp.asarray(prompt), lengths, dg.init_cache(config, 3, 64))
    network = merge(model.graph, model.params)
    denoising, committing = jnp.array([True, False, False]), jnp.array([False, True, False])

    after, mixed = jax.jit(network.denoise_or_commit)(canvas, soft, denoising, committing, cache)
    denoised = jax.jit(network.denoise)(canvas, cache, soft)
    encoded, states = jax.jit(network.encode)(canvas, jnp.array([0, C, 0]), cache)

    np.testing.assert_allclose(mixed[0], denoised[0], rtol=1e-5, atol=1e-5)
    assert np.isfinite(mixed[2]).all()
    np.testing.assert_allclose(mixed[1], states[1], rtol=1e-5, atol=1e-5)
    assert after.lengths.tolist() == encoded.lengths.tolist() == [30, 11 + C, 19]
    for mine, alone, before in zip(*map(jax.tree.leaves, (after, encoded, cache)), strict=True):
        np.testing.assert_allclose(mine, alone, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(mine[np.array([0, 2])], before[np.array([0, 2])])
    assert np.abs(mixed[1] - denoised[1]).max() > 0.1, "committing is another pass than denoising"


def drawn_requests(model, seed: int) -> list:
    rng = random.Random(seed)
    choices = (
        {},
        {"max_denoising_steps": 3},
        {"entropy_bound": 5.0},
        {"t_min": None, "t_max": None},
        {"temperature": 0},
        {"top_k": 4},
        {"logprobs": True, "top_logprobs": 5},
        {"confidence_threshold": 3.0},
    )
    found = []
    for index in range(12):
        prompt = [rng.randrange(96) for _ in range(rng.randint(1, 5 * SMALL.sliding_window))]
        found.append((prompt, {"seed": index, "max_new_tokens": rng.randint(1, 3 * C), **rng.choice(choices)}))
    return found


def test_requests_that_come_and_go_do_not_touch_each_other(model, schedule):
    """Twelve requests, joining at any time, a quarter of them cancelled: the others answer as if they were alone."""
    drawn, rng = drawn_requests(model, schedule), random.Random(-schedule)
    engine, jobs, waiting = scheduler(model), {}, list(enumerate(drawn))
    doomed = set(rng.sample(range(12), 3))
    while waiting or engine.busy:
        for _ in range(rng.randint(0, 3)):
            if waiting:
                index, (prompt, chosen) = waiting.pop(0)
                jobs[index] = engine.submit(request(model, prompt, **chosen), drafts=rng.choice((None, 1, 2)))
        for index in doomed & jobs.keys():
            if rng.random() < 0.3:
                engine.cancel(jobs[index])
        engine.advance()
    for index, (prompt, chosen) in enumerate(drawn):
        given, alone = jobs[index].answer.completion(), answer(model, prompt, **chosen)
        if given.logprobs is not None:
            assert len(given.logprobs) == len(given.top_logprobs) == len(given.tokens)
        if given.finish_reason == "cancelled":
            assert given.tokens == alone.tokens[: len(given.tokens)]
        else:
            assert given == alone


def test_cancelling_frees_the_slot_in_the_middle_of_a_canvas(model):
    engine = scheduler(model)
    long = engine.submit(request(model, [5] * 9, max_new_tokens=8 * C, confidence_threshold=None), drafts=1)
    others = [engine.submit(request(model, [6, 7], max_new_tokens=4 * C, seed=seed)) for seed in range(SLOTS)]
    short = others[-1]
    for _ in range(4):
        events = engine.advance()
    assert any(job is long and isinstance(event, dg.Draft) for job, event in events)
    assert short.slot is None
    engine.cancel(long)
    ((job, event),) = [pair for pair in engine.advance() if isinstance(pair[1], dg.Finished)][:1]
    assert job is long
    assert event.completion.finish_reason == "cancelled"
    assert event.completion.tokens == []
    while engine.busy:
        engine.advance()
    assert short.answer.completion().finish_reason == "length"


def passes(engine, job, most: int) -> int:
    """How many rounds it takes until a request is at work."""
    for count in range(most):
        if job.at_work:
            return count
        engine.advance()
    raise AssertionError(f"not at work after {most} rounds")


def test_a_long_prompt_stalls_the_others_by_one_chunk_at_most(model):
    engine = scheduler(model, prefill_chunk=16)
    first = engine.submit(request(model, [5, 6], **ENDLESS), drafts=1)
    engine.advance()
    engine.submit(request(model, [7] * 96))
    for _ in range(6):
        assert any(job is first for job, _ in engine.advance())


def test_short_prompts_share_a_chunk(model):
    """As many as it holds begin in one round, and none is cut where it would not be cut alone."""
    engine = scheduler(model, prefill_chunk=256)
    few = [engine.submit(request(model, [5 + i] * n, **ENDLESS)) for i, n in enumerate((3, 60, 64))]
    large = engine.submit(request(model, [9] * 100, **ENDLESS))
    engine.advance()
    assert [job.at_work for job in few] == [True] * 3
    assert large.encoded == 0, "64 of 256 tokens are left, and it takes more"
    engine.advance()
    assert large.at_work


def test_prompts_are_encoded_in_the_order_in_which_they_came(model):
    """Also where a later one sits in a lower slot: else those that come and go would keep a long one waiting."""
    engine = scheduler(model, prefill_chunk=16)
    blocker = engine.submit(request(model, [5], **ENDLESS), drafts=1)
    engine.advance()
    long = engine.submit(request(model, [7] * 100, **ENDLESS))
    engine.advance()
    engine.cancel(blocker)
    later = engine.submit(request(model, [8] * 30, **ENDLESS))
    engine.advance()
    assert later.slot < long.slot
    assert passes(engine, long, 9) <= 5
    assert not later.at_work


def test_a_newcomer_waits_for_a_few_passes_not_for_a_canvas(model):
    engine = scheduler(model)
    first = engine.submit(request(model, [5], **ENDLESS))
    engine.advance()
    assert 0 < first.steps <= FEW_PASSES
    others = [engine.submit(request(model, [6], **ENDLESS)) for _ in range(SLOTS - 1)]
    assert passes(engine, others[-1], 3) <= 1
    before = first.steps
    engine.advance()
    assert FEW_PASSES < first.steps - before <= MOST_PASSES
    engine.cancel(first)
    assert [job for job, _ in engine.advance()] == [first]


def test_the_head_is_told_who_denoises(model, monkeypatch):
    """It skips the other rows, so one that is cancelled costs nothing even if it asked for a slow way to draw."""
    engine, asked = scheduler(model), []
    engine.submit(request(model, [5], **ENDLESS, top_k=3, top_p=0.5, temperature=0.5))
    engine.submit(request(model, [6], **ENDLESS))
    engine.advance()

    class Enough(Exception):
        """The head is not needed."""

    def head(network, hidden, temperature, keys, suppress, draw_temperature, top_k, top_p, active):
        asked.append(active.tolist())
        raise Enough

    pass_by = lambda self, canvas, soft, denoising, committing, cache: (cache, soft)  # noqa: E731
    monkeypatch.setattr(Transformer, "denoise_or_commit", pass_by)
    monkeypatch.setattr(slots_module, "head_stats", head)
    nobody = jnp.zeros(SLOTS, bool)
    states = ([True, True, False, False], [False, True, False, False])
    for active in states:
        with jax.disable_jit(), pytest.raises(Enough):
            arguments = (engine.params, engine.cache, engine.slots, jnp.array(active), nobody, jnp.int32(1))
            _advance(model.graph, model.config, dg.Policy(), *arguments)
    assert asked == [*states]


def test_memory_stays_as_it_was_after_the_first_canvas(model):
    """What is donated is used: the cache moves on in place, and nothing piles up, canvas after canvas."""
    engine = scheduler(model)
    engine.submit(request(model, [5, 6], max_new_tokens=6 * C))
    sizes = []
    while engine.busy:
        before = [*engine.cache.k, engine.cache.lengths, engine.slots.state.soft]
        done = any(isinstance(event, dg.Canvas) for _, event in engine.advance())
        assert all(array.is_deleted() for array in before)
        if done:
            sizes.append(sum(array.nbytes for array in jax.live_arrays()))
    assert len(sizes) == 6
    assert max(sizes) == sizes[0]


def test_drafts_come_at_the_chosen_interval(model):
    for interval in (1, 2, 5):
        engine = scheduler(model)
        chosen = {"max_denoising_steps": 6, "confidence_threshold": None, "max_new_tokens": 2 * C}
        engine.submit(request(model, [5, 6], **chosen), drafts=interval)
        events = []
        while engine.busy:
            events += [event for _, event in engine.advance()]
        steps = [event.step for event in events if isinstance(event, dg.Draft)]
        assert steps == [step for step in range(1, 7) if step % interval == 0] * 2
