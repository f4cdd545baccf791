"""What a load test found: latency and throughput of its requests, and diffusion figures from the server's counters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from dgemma_jax.serve import metrics

Reading = dict[str, float]  # of /metrics: values by the names of the series
COUNTERS = {  # what each naming must show; the first that does is taken
    "dgemma": (metrics.STEPS, metrics.CANVASES, metrics.POSITIONS, metrics.COMMITTED),
    "vllm": (metrics.VLLM_PASSES, metrics.VLLM_POSITIONS, metrics.VLLM_COMMITTED),
}


@dataclass(frozen=True)
class Outcome:
    """One request: seconds to its end and to its first canvas, tokens, and the error if it has none of the rest."""

    latency: float
    first_canvas: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


class Work(NamedTuple):
    """Denoising steps without commits, finished canvases, positions that passes evaluated, tokens committed."""

    steps: float
    canvases: float
    positions: float
    committed: float

    @classmethod
    def of_passes(cls, passes: float, positions: float, committed: float) -> Work:
        """From vLLM's counters, where each canvas is committed by a pass of its own: the formula of its benchmark."""
        canvases = committed * passes / positions if positions else 0.0
        return cls(passes - canvases, canvases, positions, committed)


def report(outcomes: Sequence[Outcome], duration: float, before: Reading, after: Reading) -> dict[str, Any]:
    """All figures, with the names that `vllm bench serve` gives to them. duration: seconds."""
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    details = {"errors": dict(errors.most_common()), "requests": [asdict(outcome) for outcome in outcomes]}
    return _summary(outcomes, duration) | diffusion(before, after, duration) | details


def _summary(outcomes: Sequence[Outcome], duration: float) -> dict[str, Any]:
    """Throughput and latencies of the requests that were answered."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    tokens = sum(outcome.completion_tokens for outcome in done)
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": sum(outcome.prompt_tokens for outcome in done),
        "total_output_tokens": tokens,
        "request_throughput": len(done) / duration,
        "output_throughput": tokens / duration,
        **_spread("ttft", [outcome.first_canvas for outcome in done if outcome.first_canvas is not None]),
        **_spread("e2el", [outcome.latency for outcome in done]),
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and 99th percentile in milliseconds, None of nothing."""
    figures = {"mean": np.mean, "median": np.median, "p99": lambda values: np.percentile(values, 99)}
    return {f"{kind}_{name}_ms": float(of(seconds)) * 1000 if seconds else None for kind, of in figures.items()}


def diffusion(before: Reading, after: Reading, duration: float) -> dict[str, Any]:
    """The diffusion figures between two readings of /metrics, None where the server does not tell.

    metrics: whose series they come from, "dgemma" or "vllm". Steps and canvases are exact in ours and derived from
    vLLM's; diffusion_canvas_positions include those of commits in vLLM's.
    """
    naming = next((naming for naming, names in COUNTERS.items() if {*names} <= before.keys() & after.keys()), None)
    work = None
    if naming is not None:
        change = [after[name] - before[name] for name in COUNTERS[naming]]
        if min(change) >= 0:  # else the server was started anew in between
            work = Work(*change) if naming == "dgemma" else Work.of_passes(*change)
    return {
        "metrics": naming,
        "diffusion_committed_throughput": work and work.committed / duration,
        "diffusion_steps_per_canvas": work and _ratio(work.steps, work.canvases),
        "diffusion_committed_per_step": work and _ratio(work.committed, work.steps),
        "diffusion_committed_tokens": work and round(work.committed),
        "diffusion_denoising_steps": work and round(work.steps),
        "diffusion_canvas_positions": work and round(work.positions),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def read_counters(text: str) -> Reading:
    """The sums of all series over their labels. ValueError for a text that is not Prometheus'."""
    sums: Reading = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return dict(sums)
