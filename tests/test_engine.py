"""The engine: many callers at once, cancelling, failing, closing."""

import asyncio
import os
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import dgemma_jax as dg
from dgemma_jax.engine.scheduler import Scheduler
from tests.compilations import Compilations
from tests.random_models import SMALL, random_model
from tests.test_generate import small_tokenizer

C = SMALL.canvas_length
SLOTS = 4
SHORT = dg.Sampling(max_new_tokens=C + 4, seed=1, logprobs=True)  # by which answers are compared to the last bit
ENDLESS = dg.Sampling(max_new_tokens=150, max_denoising_steps=10_000, confidence_threshold=None, seed=1)


@pytest.fixture(scope="module")
def model():
    return random_model(tokenizer=small_tokenizer(), max_model_len=200)


@pytest.fixture
def engine(model):
    with dg.Engine(model, slots=SLOTS, prefix_cache_bytes=0) as engine:
        yield engine
        engine.close(cancel=True)  # a test that fails may leave a request that never ends


def alone(model, prompt, sampling=SHORT):
    return model.generate([prompt], sampling, slots=SLOTS)[0]


def test_many_threads_get_what_they_would_get_alone(model, engine):
    found: dict[int, dg.Completion] = {}

    def ask(index: int) -> None:
        for turn in range(3):
            number = 3 * index + turn
            found[number] = engine.submit([5 + number, 6], replace(SHORT, seed=number)).result(300)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: alone(model, [5 + n, 6], replace(SHORT, seed=n)) for n in range(18)}


def test_events_in_order_and_again(engine):
    handle = engine.submit([5, 6], SHORT, drafts=1)
    events = list(handle)
    assert [type(event) for event in events[-2:]] == [dg.Canvas, dg.Finished]
    assert events[-1].completion == handle.result()
    assert sum(isinstance(event, dg.Draft) for event in events) == sum(handle.result().steps)
    assert list(handle) == events
    assert handle.done


def test_event_loops_wait_without_blocking(model, engine):
    async def main():
        handles = [engine.submit([5, 6], replace(SHORT, seed=seed), drafts=2) for seed in range(3)]
        completions = await asyncio.gather(*(wait(handle) for handle in handles))
        return completions, [event async for event in handles[0]]

    async def wait(handle):
        return await handle

    completions, events = asyncio.run(main())
    assert completions == [alone(model, [5, 6], replace(SHORT, seed=seed)) for seed in range(3)]
    assert events[-1].completion == completions[0]


def test_cancelling_frees_the_slot(model, engine):
    endless = [engine.submit([5, 6], ENDLESS, drafts=1) for _ in range(SLOTS)]
    waiting = engine.submit([7], SHORT)
    assert isinstance(next(iter(endless[0])), dg.Draft)
    endless[0].cancel()
    assert endless[0].result(300).finish_reason == "cancelled"
    assert waiting.result(300) == alone(model, [7])
    for handle in endless[1:]:
        handle.cancel()
    endless[0].cancel()  # twice, and after the end: nothing
    with pytest.raises(TimeoutError, match="no answer within"):
        engine.submit([5], ENDLESS).result(timeout=0.01)
    engine.close(cancel=True)


def test_a_request_that_fails_fails_alone(model, engine, monkeypatch):
    expected = alone(model, [7])
    decode = type(model.tokenizer).decode

    def broken(self, ids, *args, **kwargs):
        if len(ids) > C:
            raise LookupError("no such word")
        return decode(self, ids, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(model.tokenizer), "decode", broken)
        doomed = engine.submit([5, 6], replace(SHORT, stop=["never"]), drafts=1)
        fine = engine.submit([7], replace(SHORT, max_new_tokens=C))
        assert fine.result(300).tokens == expected.tokens[:C]
        with pytest.raises(LookupError, match="no such word"):
            doomed.result(300)
        with pytest.raises(LookupError):
            list(doomed)
    assert engine.submit([7], SHORT).result(300) == expected


def test_counters(model):
    with dg.Engine(model, slots=SLOTS, prefix_cache_bytes=10**6) as engine:
        engine.submit([5, 6], SHORT).result(300)
        done = engine.submit([5, 6, 7], SHORT).result(300)
        engine.submit([5], ENDLESS).cancel()
    stats = engine.stats
    assert (stats.requests, stats.finished, stats.cancelled, stats.failed) == (3, 2, 1, 0)
    assert (stats.tokens, stats.cached_tokens) == (2 * len(done.tokens), 2)
    assert stats.canvases >= 4 and stats.denoising_steps >= 2 * sum(done.steps) > 0
    assert stats.empty == 0
    assert 0 < stats.device_seconds < stats.busy_seconds
    assert 0 < stats.host_share < 1


def test_what_looks_wrong_is_counted(model):
    """Canvases that never settled, and answers that say nothing."""
    with dg.Engine(model, slots=SLOTS) as engine:
        done = engine.submit([5], replace(SHORT, stability_threshold=None)).result(300)
        assert engine.stats.at_step_limit == len(done.steps) > 0
        one = replace(SHORT, max_new_tokens=1)
        engine.submit([5], replace(one, stability_threshold=0, confidence_threshold=1e9)).result(300)
        assert engine.stats.at_step_limit == len(done.steps)
        engine.submit([5], replace(SHORT, stop_token_ids=done.tokens[:1])).result(300)
    assert (engine.stats.finished, engine.stats.empty) == (3, 1)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("prefix_cache_bytes", [0, None], ids=["encoded each time", "encoded once"])
def test_identical_requests_leave_no_trace(model, soak, prefix_cache_bytes):
    """Memory, compilations and the time of the CPU, which other processes hardly change, stay flat."""
    count = 300 if soak else 60
    seconds, sizes = [], []
    with dg.Engine(model, slots=SLOTS, prefix_cache_bytes=prefix_cache_bytes) as engine:
        expected, *_ = [engine.submit([5, 6], SHORT).result(300) for _ in range(2)]
        with Compilations() as compiled:
            for _ in range(count):
                started = time.process_time()
                assert replace(engine.submit([5, 6], SHORT).result(300), cached_tokens=0) == expected
                seconds.append(time.process_time() - started)
                sizes.append(resident_bytes())
    assert compiled.names == []
    third = count // 3
    assert sizes[-1] - sizes[third] < 20e6
    assert statistics.median(seconds[-third:]) < 1.5 * statistics.median(seconds[:third]) + 0.01


def test_bad_requests_are_refused_at_once(engine):
    with pytest.raises(ValueError, match="is empty"):
        engine.submit("")
    with pytest.raises(ValueError, match="tools and thinking go with"):
        engine.submit("w5", thinking=True)
    for drafts in (0, -1, 1.5, "often"):
        with pytest.raises(ValueError, match="drafts is"):
            engine.submit("w5", drafts=drafts)
    with pytest.raises(ValueError, match=r"request is None; expected what model\.request returns"):
        engine.submit_request(None)
    assert engine.error is None


def test_a_fork_is_told_that_the_engine_stayed_behind(engine, monkeypatch):
    """It would wait for ever: a fork has no other thread."""
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="belongs to the process that this one was forked from"):
        engine.submit([5])


def test_a_worker_that_dies_tells_everybody(model, monkeypatch):
    engine = dg.Engine(model, slots=SLOTS)
    first = engine.submit([5, 6], ENDLESS, drafts=1)
    next(iter(first))

    def dead(self):
        raise MemoryError("device")

    monkeypatch.setattr(Scheduler, "advance", dead)
    with pytest.raises(RuntimeError, match=r"engine has failed \(MemoryError"):
        first.result(300)
    with pytest.raises(RuntimeError, match="make a new one"):
        engine.submit([5], SHORT)
    engine.close()


def test_closing_drains_or_cancels(model):
    engine = dg.Engine(model, slots=SLOTS)
    handles = [engine.submit([5 + i], SHORT) for i in range(6)]
    engine.close()
    assert [handle.result(0) for handle in handles] == [alone(model, [5 + i]) for i in range(6)]
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([5], SHORT)
    engine.close()
    with pytest.raises(KeyError), dg.Engine(model, slots=SLOTS) as engine:
        endless = engine.submit([5], ENDLESS)
        raise KeyError
    assert endless.result(0).finish_reason == "cancelled"
