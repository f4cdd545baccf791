"""What the server tells about itself: Prometheus series and a log line, both read from the engine's counters.

Our own series count denoising steps and commits apart. vLLM's series count passes: each denoising step is one, and so
is the commit of a finished canvas, which has all positions of the canvas as its committed tokens. vLLM commits every
canvas, the engine all but the last of an answer, whose encoding nobody would read; under vLLM's names that one is
counted like the others, so that what dashboards derive (`passes - committed / width` are steps) is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from dgemma_jax.engine.stats import EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)  # upper bounds

STEPS, CANVASES = "dgemma_denoising_steps_total", "dgemma_canvases_total"
POSITIONS, COMMITTED = "dgemma_canvas_positions_total", "dgemma_committed_tokens_total"
VLLM_PASSES = "vllm:diffusion_num_denoising_steps_total"
VLLM_POSITIONS = "vllm:diffusion_num_canvas_positions_total"
VLLM_COMMITTED = "vllm:diffusion_num_committed_tokens_total"


class Passes(NamedTuple):
    """vLLM's three counters: passes over a canvas, positions that they evaluated, tokens that they committed."""

    passes: int
    positions: int
    committed: int

    @classmethod
    def of(cls, stats: EngineStats, canvas_length: int) -> Passes:
        """As vLLM would have counted the same work."""
        passes = stats.denoising_steps + stats.canvases
        return cls(passes, passes * canvas_length, stats.canvases * canvas_length)

    def since(self, before: Passes) -> Passes:
        """What was added to an earlier reading."""
        return Passes(*(now - then for now, then in zip(self, before, strict=True)))


class Metrics:
    """The series of one server. Counters come from the engine's, so only what it cannot know is kept here: how long
    requests took, and how many were turned away.

    vllm_names: add the series that vLLM's dashboards read. model_name: the label of every series.
    """

    def __init__(self, vllm_names: bool, model_name: str, canvas_length: int):
        self.vllm_names, self.canvas_length = vllm_names, canvas_length
        self._labels = {"model_name": model_name}
        self._vllm_labels = self._labels | {"engine": "0"}
        self._rejected = 0
        self._histograms = CollectorRegistry()
        self._latency = self._timer("request_latency", "e2e_request_latency", "from a request to its end")
        self._first_canvas = self._timer(
            "time_to_first_canvas", "time_to_first_token", "from a request to its first canvas"
        )

    def observe(self, latency_s: float, first_canvas_s: float | None) -> None:
        """Count a request that has ended: its seconds, and those up to its first canvas, None if it had none."""
        for histogram in self._latency:
            histogram.observe(latency_s)
        if first_canvas_s is not None:
            for histogram in self._first_canvas:
                histogram.observe(first_canvas_s)

    def count_rejected(self) -> None:
        """Count a request that was turned away before the engine saw it."""
        self._rejected += 1

    def exposition(self, stats: EngineStats) -> bytes:
        """All series in Prometheus' text format, of the type CONTENT_TYPE."""
        families = [*self._own(stats), *(self._vllm(stats) if self.vllm_names else ())]
        return generate_latest(_Collected([*families, *self._histograms.collect()]))

    def _timer(self, name: str, vllm_name: str, what: str) -> list[Histogram]:
        """The same histogram under every name that is wanted."""
        names = [(f"dgemma_{name}_seconds", self._labels)]
        if self.vllm_names:
            names.append((f"vllm:{vllm_name}_seconds", self._vllm_labels))
        return [
            Histogram(name, f"Seconds {what}.", labels, buckets=SECONDS, registry=self._histograms).labels(**labels)
            for name, labels in names
        ]

    def _own(self, stats: EngineStats) -> Iterator[Metric]:
        yield from _families(
            self._labels,
            (STEPS, "Denoising steps of finished canvases; commits are not among them.", stats.denoising_steps),
            (POSITIONS, "Canvas positions that these steps evaluated.", stats.denoising_steps * self.canvas_length),
            (CANVASES, "Canvases finished.", stats.canvases),
            ("dgemma_canvases_at_step_limit_total", "Those that took all their steps.", stats.at_step_limit),
            (COMMITTED, "Tokens of answers.", stats.tokens),
            ("dgemma_empty_answers_total", "Finished requests without a token.", stats.empty),
            ("dgemma_commits_total", "Passes that encoded a finished canvas.", stats.commits),
            ("dgemma_prompt_tokens_total", "Tokens of prompts.", stats.prompt_tokens),
            ("dgemma_cached_prompt_tokens_total", "Those that earlier requests had encoded.", stats.cached_tokens),
            ("dgemma_prefix_cache_hits_total", "Prompts that began with a kept one.", stats.prefix_hits),
            ("dgemma_compilations_total", "Programs compiled.", stats.compilations),
            ("dgemma_requests_waiting", "Requests without a slot.", stats.waiting),
            ("dgemma_slots_in_use", "Requests with a slot.", stats.running),
            ("dgemma_slots", "Requests that run together at most.", stats.slots),
        )
        ended = {"finished": stats.finished, "cancelled": stats.cancelled, "failed": stats.failed}
        family = CounterMetricFamily("dgemma_requests", "Requests that have ended.", labels=[*self._labels, "outcome"])
        for outcome, count in (ended | {"rejected": self._rejected}).items():
            family.add_metric([*self._labels.values(), outcome], count)
        yield family

    def _vllm(self, stats: EngineStats) -> Iterator[Metric]:
        counted = Passes.of(stats, self.canvas_length)
        return _families(
            self._vllm_labels,
            (VLLM_PASSES, "Denoising steps and commits.", counted.passes),
            (VLLM_POSITIONS, "Canvas positions of denoising steps and commits.", counted.positions),
            (VLLM_COMMITTED, "Positions of finished canvases.", counted.committed),
            ("vllm:prompt_tokens_total", "Tokens of prompts.", stats.prompt_tokens),
            ("vllm:generation_tokens_total", "Tokens of answers.", stats.tokens),
            ("vllm:num_requests_running", "Requests with a slot.", stats.running),
            ("vllm:num_requests_waiting", "Requests without a slot.", stats.waiting),
        )


class LogLine:
    """What happened since the last line.

    vllm_names: vLLM's line, whose steps per canvas include the commit. stats: where counting begins. clock: seconds.
    """

    def __init__(
        self, vllm_names: bool, canvas_length: int, stats: EngineStats, clock: Callable[[], float] = time.monotonic
    ):
        self.vllm_names, self.canvas_length = vllm_names, canvas_length
        self._clock, self._time, self._stats = clock, clock(), stats

    def line(self, stats: EngineStats) -> str | None:
        """The line of the time since the last call, None if no canvas was worked on."""
        before, began = self._stats, self._time
        self._stats, self._time = stats, self._clock()
        seconds = self._time - began
        if self.vllm_names:
            counted = Passes.of(stats, self.canvas_length).since(Passes.of(before, self.canvas_length))
            return vllm_line(counted, seconds) if counted.passes else None
        return _own_line(before, stats, seconds) if stats.denoising_steps != before.denoising_steps else None


def vllm_line(counted: Passes, seconds: float) -> str:
    """vLLM's log line, for the same tools to read."""
    passes, positions, committed = counted
    return (
        f"DiffusionDecoding metrics: Committed token throughput: {_ratio(committed, seconds)} tokens/s, "
        f"Mean denoising steps per canvas: {_ratio(positions, committed)}, "
        f"Mean tokens committed per denoising step: {_ratio(committed, passes)}, "
        f"Committed: {committed} tokens, Denoising steps: {passes}, Canvas positions evaluated: {positions}"
    )


def _own_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    steps, canvases, tokens = (
        now.denoising_steps - before.denoising_steps,
        now.canvases - before.canvases,
        now.tokens - before.tokens,
    )
    return (
        f"{_ratio(tokens, seconds)} committed tokens/s, {_ratio(steps, canvases)} denoising steps per canvas, "
        f"{_ratio(tokens, steps)} tokens per step (tokens: {tokens}, canvases: {canvases}, steps: {steps}, "
        f"commits: {now.commits - before.commits}), running: {now.running}, waiting: {now.waiting}"
    )


def _ratio(part: float, whole: float) -> str:
    """Two places; nan where nothing was there to divide by, as vLLM prints it."""
    return f"{part / whole:.2f}" if whole else "nan"


class _Collected(Collector):
    """Families that are there already, for prometheus-client to write."""

    def __init__(self, families: Iterable[Metric]):
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(labels: dict[str, str], *rows: tuple[str, str, float]) -> Iterator[Metric]:
    """A family for each (name, what it is, value); a name that ends in _total is a counter's."""
    for name, text, value in rows:
        family = (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(
            name, text, labels=list(labels)
        )
        family.add_metric(list(labels.values()), value)
        yield family
