"""The series at /metrics and the log line: exact, in both namings, from the engine's counters alone."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dgemma_jax.engine.stats import EngineStats
from dgemma_jax.serve.metrics import CONTENT_TYPE, LogLine, Metrics, Passes, vllm_line

COUNTS = [field.name for field in fields(EngineStats) if field.type == "int"]
READ_AS_IS = {
    "dgemma_denoising_steps_total": "denoising_steps",
    "dgemma_canvases_total": "canvases",
    "dgemma_canvases_at_step_limit_total": "at_step_limit",
    "dgemma_committed_tokens_total": "tokens",
    "dgemma_empty_answers_total": "empty",
    "dgemma_commits_total": "commits",
    "dgemma_prompt_tokens_total": "prompt_tokens",
    "dgemma_cached_prompt_tokens_total": "cached_tokens",
    "dgemma_prefix_cache_hits_total": "prefix_hits",
    "dgemma_compilations_total": "compilations",
    "dgemma_requests_waiting": "waiting",
    "dgemma_slots_in_use": "running",
    "dgemma_slots": "slots",
}
READ_BY_VLLM = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}
some_stats = st.builds(EngineStats, **{name: st.integers(0, 10**9) for name in COUNTS})


def series(metrics: Metrics, stats: EngineStats) -> dict[str, float]:
    """The values by name; the outcome of requests is part of the name."""
    families = text_string_to_metric_families(metrics.exposition(stats).decode())
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    found = {" ".join(filter(None, (sample.name, sample.labels.get("outcome")))): sample.value for sample in samples}
    assert len(found) == len(samples)  # no name twice
    return found


@settings(max_examples=25, deadline=None)
@given(some_stats, st.integers(1, 256))
def test_the_series_are_the_engines_counters(stats, canvas_length):
    found = series(Metrics(True, "tiny", canvas_length), stats)
    for name, field in (READ_AS_IS | READ_BY_VLLM).items():
        assert found[name] == getattr(stats, field), name
    assert found["dgemma_canvas_positions_total"] == stats.denoising_steps * canvas_length
    for outcome in ("finished", "cancelled", "failed"):
        assert found[f"dgemma_requests_total {outcome}"] == getattr(stats, outcome)


@settings(max_examples=25, deadline=None)
@given(some_stats, st.integers(1, 256))
def test_vllms_formulas_give_the_exact_steps(stats, canvas_length):
    found = series(Metrics(True, "tiny", canvas_length), stats)
    passes, positions, committed = (
        found[f"vllm:diffusion_num_{name}_total"]
        for name in ("denoising_steps", "canvas_positions", "committed_tokens")
    )
    assert positions == passes * canvas_length
    assert committed == stats.canvases * canvas_length
    assert passes - committed / canvas_length == stats.denoising_steps


def test_a_commit_is_no_step():
    metrics, stats = Metrics(False, "tiny", 32), EngineStats(denoising_steps=12, canvases=5, commits=3)
    before, after = series(metrics, stats), series(metrics, replace(stats, commits=4))
    assert {name for name in after if after[name] != before[name]} == {"dgemma_commits_total"}


def test_vllms_names_are_there_when_wanted_and_labelled():
    stats = EngineStats()
    assert "vllm:" not in Metrics(False, "tiny", 32).exposition(stats).decode()
    text = Metrics(True, 'a "model"\n', 32).exposition(stats).decode()
    labels = [sample.labels for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {found["model_name"] for found in labels} == {'a "model"\n'}
    assert 'vllm:num_requests_running{engine="0",' in text
    assert CONTENT_TYPE.startswith("text/plain")


@pytest.mark.parametrize("vllm_names", [False, True])
def test_latencies_and_rejections_are_counted_once(vllm_names):
    metrics = Metrics(vllm_names, "tiny", 32)
    metrics.observe(2.0, 0.5)
    metrics.observe(1.0, None)  # cancelled before its first canvas
    metrics.count_rejected()
    for _ in range(2):  # reading changes nothing
        found = series(metrics, EngineStats())
        assert found["dgemma_requests_total rejected"] == 1
        names = [("dgemma_request_latency_seconds", "dgemma_time_to_first_canvas_seconds")]
        names += [("vllm:e2e_request_latency_seconds", "vllm:time_to_first_token_seconds")] * vllm_names
        for latency, first in names:
            assert (found[f"{latency}_count"], found[f"{latency}_sum"]) == (2, 3.0)
            assert (found[f"{first}_count"], found[f"{first}_sum"]) == (1, 0.5)


def test_a_bucket_holds_what_took_no_longer():
    metrics = Metrics(False, "tiny", 32)
    metrics.observe(0.25, 0.3)
    text = metrics.exposition(EngineStats()).decode()
    assert 'dgemma_request_latency_seconds_bucket{le="0.25",model_name="tiny"} 1.0' in text
    assert 'dgemma_time_to_first_canvas_seconds_bucket{le="0.25",model_name="tiny"} 0.0' in text
    assert 'dgemma_time_to_first_canvas_seconds_bucket{le="0.5",model_name="tiny"} 1.0' in text


START = EngineStats(tokens=7, canvases=1, denoising_steps=3, commits=1)
LATER = EngineStats(tokens=207, canvases=11, denoising_steps=28, commits=5, running=2, waiting=6)


def test_our_line_tells_what_happened_since_the_last_without_commits():
    log = LogLine(False, 32, START, iter([10.0, 14.0, 15.0, 16.0]).__next__)
    assert log.line(LATER) == (
        "50.00 committed tokens/s, 2.50 denoising steps per canvas, 8.00 tokens per step "
        "(tokens: 200, canvases: 10, steps: 25, commits: 4), running: 2, waiting: 6"
    )
    assert log.line(LATER) is None
    assert log.line(replace(LATER, canvases=12, denoising_steps=30, tokens=217)).startswith(
        "10.00 committed tokens/s, 2.00 "
    )


def test_vllms_line_counts_commits_as_passes():
    log = LogLine(True, 32, START, iter([10.0, 14.0, 15.0]).__next__)
    assert log.line(LATER) == (
        "DiffusionDecoding metrics: Committed token throughput: 80.00 tokens/s, "
        "Mean denoising steps per canvas: 3.50, Mean tokens committed per denoising step: 9.14, "
        "Committed: 320 tokens, Denoising steps: 35, Canvas positions evaluated: 1120"
    )
    assert log.line(LATER) is None


def test_vllms_line_for_two_drafts_of_four_of_which_two_and_one_are_accepted():
    line = vllm_line(Passes(passes=2, positions=8, committed=3), seconds=1.0)
    assert "Mean denoising steps per canvas: 2.67," in line  # 8 / 3
    assert "Mean tokens committed per denoising step: 1.50," in line  # 3 / 2


def test_a_line_without_a_finished_canvas_has_no_figure_per_canvas():
    assert "Mean denoising steps per canvas: nan," in vllm_line(Passes(2, 8, 0), 1.0)
