"""What callers may do to an engine: odd settings, cancelling at any time, handles that nobody keeps, signals."""

import gc
import math
import random
import signal
import threading
import time
import weakref
from dataclasses import replace

import jax
import pytest

import dgemma_jax as dg
from dgemma_jax.engine.scheduler import Scheduler
from tests.random_models import SMALL, random_model
from tests.test_generate import small_tokenizer

C, V = SMALL.canvas_length, SMALL.vocab_size
SLOTS = 4
SHORT = dg.Sampling(max_new_tokens=C + 4, seed=1)
ENDLESS = dg.Sampling(max_new_tokens=150, max_denoising_steps=2**31 - 1, confidence_threshold=None, seed=1)
MOST, TINY, HUGE = 2**31 - 1, 1e-30, 1e30
EXTREMES = [
    {"entropy_bound": TINY},
    {"entropy_bound": HUGE},
    {"t_min": 0, "t_max": TINY},
    {"t_min": HUGE / 2, "t_max": HUGE},
    {"temperature": TINY},
    {"temperature": HUGE},
    {"t_min": 0, "t_max": TINY, "temperature": TINY},
    {"t_min": HUGE / 2, "t_max": HUGE, "temperature": HUGE},
    {"t_min": HUGE / 2, "t_max": HUGE, "temperature": HUGE, "top_k": 2, "top_p": TINY},
    {"top_k": 1},
    {"top_k": 40, "top_p": 0.9, "max_new_tokens": 10},
    {"top_k": MOST, "top_p": 5e-324},
    {"stability_threshold": MOST},
    {"confidence_threshold": HUGE, "stability_threshold": 0},
    {"confidence_threshold": TINY},
    {"seed": 2**63 - 1},
    {"max_new_tokens": 10**30},
    {"suppress": range(1, V), "logprobs": True, "top_logprobs": 20},
    {"stop_token_ids": range(V)},
    {"stop": [chr(code) for code in range(33, 500)]},
    {"canvas": [7] * C, "pinned": [True] * C},
]

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def model():
    return random_model(tokenizer=small_tokenizer(), max_model_len=200)


@pytest.fixture
def engine(model):
    with dg.Engine(model, slots=SLOTS) as engine:
        yield engine
        engine.close(cancel=True)  # a test that fails may leave a request that never ends


def alone(model, prompt, sampling=SHORT) -> dg.Completion:
    return model.generate([prompt], sampling, slots=SLOTS)[0]


def result(handle) -> dg.Completion:
    """Of a prompt that may have been encoded before."""
    return replace(handle.result(300), cached_tokens=0)


def test_extreme_settings_give_sound_answers_and_touch_no_other(model, engine):
    """Every draft is of ids that may be, with entropies that are numbers; the requests beside them are as alone."""
    plain = [[5, 6], [7]]
    samplings = [replace(replace(SHORT, max_denoising_steps=3), **chosen) for chosen in EXTREMES]
    odd = [engine.submit([5, 6], sampling, drafts=1) for sampling in samplings]
    beside = [engine.submit(prompt, SHORT) for prompt in plain]
    for handle, sampling in zip(odd, samplings, strict=True):
        forbidden = set() if sampling.suppress is dg.UNSET else set(sampling.suppress)
        drafts = [event for event in handle if isinstance(event, dg.Draft)]
        assert drafts
        for draft in drafts:
            assert all(0 <= id < V for id in draft.tokens) and not forbidden & set(draft.tokens)
            assert any(draft.accepted) or sampling.pinned
            assert all(math.isfinite(value) and value >= -1e-6 for value in draft.entropies)
        assert handle.result().finish_reason in ("stop", "length")
    assert [result(handle) for handle in beside] == [alone(model, prompt) for prompt in plain]


def test_a_tiny_temperature_is_the_argmax(model):
    few = replace(SHORT, max_denoising_steps=3, entropy_bound=30)
    zero, tiny = (alone(model, [5, 6], replace(few, temperature=temperature)) for temperature in (0, TINY))
    assert tiny.tokens == zero.tokens


@pytest.mark.parametrize("drafts", [MOST, 2**40, 10**30])
def test_any_interval_of_drafts(model, engine, drafts):
    """Longer than any canvas: none comes."""
    events = list(engine.submit([5, 6], SHORT, drafts=drafts))
    assert not any(isinstance(event, dg.Draft) for event in events)
    assert events[-1].completion == alone(model, [5, 6])


def test_a_number_of_answers_beyond_memory_is_refused_at_once(engine):
    with pytest.raises(ValueError, match=r"n is 1000000000000000; one answer is given here"):
        engine.submit([5], replace(SHORT, n=10**15))


def test_cancelling_at_any_time(model, engine, soak):
    """From many threads: at once, before a slot is free, in a prompt, in a canvas, at its end, twice."""
    rng = random.Random(0)
    plan = [(rng.randint(1, 150), rng.uniform(0, 0.02), rng.random() < 0.5) for _ in range(200 if soak else 40)]
    done = []

    def ask(length: int, pause: float, long: bool) -> None:
        handle = engine.submit([7] * length, ENDLESS if long else SHORT, drafts=rng.choice((None, 1, 3)))
        time.sleep(pause)
        handle.cancel()
        handle.cancel()
        done.append((length, long, result(handle)))

    threads = [threading.Thread(target=ask, args=one) for one in plan]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for length, long, answer in done:
        assert answer.finish_reason == "cancelled" or (not long and answer == alone(model, [7] * length))
    stats = engine.stats
    assert (stats.requests, stats.finished + stats.cancelled, stats.failed) == (len(plan), len(plan), 0)
    assert (stats.running, stats.waiting) == (0, 0)
    assert result(engine.submit([5, 6], SHORT)) == alone(model, [5, 6])


def test_a_cancelled_request_whose_text_cannot_be_made_fails_alone(model, engine, monkeypatch):
    handle = engine.submit([5, 6], ENDLESS, drafts=1)
    fine = engine.submit([7], ENDLESS, drafts=1)
    next(iter(handle))
    decode = type(model.tokenizer).decode

    def broken(self, ids, *args, **kwargs):
        raise LookupError("no such word")

    with monkeypatch.context() as patch:
        patch.setattr(type(model.tokenizer), "decode", broken)
        handle.cancel()
        with pytest.raises(LookupError, match="no such word"):
            handle.result(300)
    assert type(model.tokenizer).decode is decode
    fine.cancel()
    assert fine.result(300).finish_reason == "cancelled"
    assert (engine.stats.failed, engine.stats.cancelled, engine.error) == (1, 1, None)


@pytest.mark.parametrize("when", ["waiting", "in its prompt", "in its canvas"])
def test_closing_while_a_request_is(model, when):
    engine = dg.Engine(model, slots=1, prefill_chunk=1, prefix_cache_bytes=0)
    others = [engine.submit([9], ENDLESS)] if when == "waiting" else []
    handle = engine.submit([7] * (2 if when == "in its canvas" else 150), ENDLESS, drafts=1)
    if when == "in its canvas":
        next(iter(handle))
    engine.close(cancel=True)
    for one in (handle, *others):
        assert one.result(0).finish_reason == "cancelled"
    assert handle.result(0).tokens == []


def test_handles_that_nobody_keeps(model, engine):
    """Their requests are answered all the same, and nothing holds them afterwards."""
    kept = engine.submit([5, 6], SHORT)
    lost = [weakref.ref(engine.submit([5 + n], SHORT, drafts=1)) for n in range(8)]
    broken_off = engine.submit([6], SHORT, drafts=1)
    for _ in broken_off:
        break
    lost.append(weakref.ref(broken_off))
    del broken_off
    assert result(kept) == alone(model, [5, 6])
    until(lambda: engine.stats.finished == 10)
    until(lambda: gc.collect() >= 0 and not any(ref() for ref in lost))


def device_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_an_engine_that_nobody_holds(model):
    """It answers what it was asked, its thread ends, and the device's memory is free again: cells are run twice."""
    expected, before = alone(model, [5, 6]), device_bytes()
    engine = dg.Engine(model, slots=SLOTS)
    worker, handle = weakref.ref(engine._worker), engine.submit([5, 6], SHORT)
    assert device_bytes() > before
    del engine
    assert handle.result(300) == expected
    until(lambda: device_bytes() <= before)
    del handle
    until(lambda: gc.collect() >= 0 and worker() is None)


@pytest.mark.parametrize("how", ["closed", "failed"])
def test_the_memory_of_an_engine_that_has_ended_is_free(model, monkeypatch, how):
    before = device_bytes()
    engine = dg.Engine(model, slots=SLOTS)
    if how == "failed":
        monkeypatch.setattr(Scheduler, "advance", lambda self: 1 / 0)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            engine.submit([5], SHORT).result(300)
    engine.close()
    assert device_bytes() <= before
    assert engine.stats.requests == (how == "failed")


def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def _interruptible():
    """A shell starts what it runs in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("how", ["result", "iterate", "drafts"])
def test_ctrl_c(model, engine, how):
    """The call ends, its request is cancelled, the engine goes on."""
    handle = engine.submit([5, 6], ENDLESS, drafts=1 if how == "drafts" else None)

    def interrupt() -> None:
        until(lambda: handle._changed._waiters)  # the main thread is in the call
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        handle.result() if how == "result" else list(handle)
    thread.join()
    assert handle.result(300).finish_reason == "cancelled"
    assert result(engine.submit([5, 6], SHORT)) == alone(model, [5, 6])


@pytest.mark.parametrize("length", [7, C + 1])
def test_contexts_around_the_window_and_the_canvas(model, length):
    """The shortest and the longest prompt; both answers are the beginning of what a longer context gives."""
    with dg.Engine(model, slots=1, max_model_len=length, prefix_cache_bytes=0) as engine:
        for prompt in ([5], [5 + i for i in range(length - 1)]):
            answer = engine.submit(prompt, dg.Sampling(seed=1)).result(300)
            assert len(prompt) + len(answer.tokens) == length
            longer = model.generate([prompt], dg.Sampling(seed=1, max_new_tokens=len(answer.tokens)), slots=1)[0]
            assert answer == longer
        with pytest.raises(ValueError, match=f"{length} tokens leaves no room in a context of {length}"):
            engine.submit([5] * length)


def test_what_the_time_went_to(engine):
    finished = list(engine.submit([7] * 100, SHORT))[-1]
    assert 0 <= finished.timings.waiting < 5
    assert 0 < finished.timings.encoding < 60 and 0 < finished.timings.denoising < 60
    handle = engine.submit([7] * 100, ENDLESS)
    handle.cancel()
    (last,) = handle
    assert last.timings.waiting >= 0
