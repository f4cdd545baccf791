"""Whole generations, token for token: transformers' ``generate()`` fed with our random stream against ``dg.generate``.

Early stopping, acceptance and proposals depend on comparisons that rounding could turn. The seeds are chosen so that
none of them is close, and the tests check that.
"""

from dataclasses import dataclass, field

import jax
import numpy as np
import pytest

import dgemma_jax as dg

from . import checkpoints, replay

pytestmark = pytest.mark.parity

MARGIN = 1e-5
PROMPT_LENGTHS = (21, 15, 6)
DEFAULTS = {"t_min": 0.4, "t_max": 0.8, "stability_threshold": 1, "confidence_threshold": 0.1, "entropy_bound": 2.0}


@dataclass(frozen=True)
class Case:
    """One call. expect: what the run must show, else it tests nothing: "freeze" (rows stop at different steps)."""

    name: str
    model: str = "calm"
    rows: int = 3
    canvases: int = 3
    steps: int = 16
    seed: int = 0
    options: dict = field(default_factory=dict)
    freezes: bool = True

    @property
    def settings(self) -> dict:
        return DEFAULTS | {"max_denoising_steps": self.steps} | self.options


FREE = Case("stability_1", seed=8)
CASES = [
    Case("one_row_one_canvas", rows=1, canvases=1, seed=1),
    Case("one_row", rows=1, seed=1),
    Case("stability_0", seed=3, options={"stability_threshold": 0}),
    FREE,
    Case("stability_2", steps=24, seed=3, options={"stability_threshold": 2}),
    Case("release_settings", seed=1, options={"entropy_bound": 0.1, "confidence_threshold": 0.005}, freezes=False),
    Case("no_early_stop", canvases=1, steps=8, seed=1, options={"stability_threshold": None}, freezes=False),
    Case("no_temperature", canvases=1, steps=8, seed=1, options={"t_min": None, "t_max": None}, freezes=False),
    Case("wide_one_canvas", model="calm_wide", canvases=1, seed=1),
    Case("wide_three_canvases", model="calm_wide", rows=2, seed=1),
]


def prompts(shape: checkpoints.Shape, rows: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, shape.vocab, length).tolist() for length in PROMPT_LENGTHS[:rows]]


def seeds(case: Case) -> list[int]:
    """A small seed, one that needs both halves of the key, and one between."""
    return [case.seed, 2**40 + case.seed, 10**6 + case.seed][: case.rows]


def ours(pair, case: Case, **changes) -> list[dg.Completion]:
    fields = {"max_new_tokens": case.canvases * pair.shape.canvas, "suppress": (), "stop_token_ids": ()}
    fields |= case.settings | changes
    with jax.default_matmul_precision("highest"):
        return pair.ours.model.generate(
            prompts(pair.shape, case.rows), sampling=[dg.Sampling(seed=seed, **fields) for seed in seeds(case)]
        )


def reference(pair, case: Case, **changes) -> replay.Replay:
    fields = {"max_new_tokens": case.canvases * pair.shape.canvas, "eos_token_id": None} | case.settings | changes
    result = replay.generate(pair.oracle, prompts(pair.shape, case.rows), seeds(case), **fields)
    assert min(result.margin.values()) > MARGIN, f"choose another seed: {result.margin}"
    return result


def steps_of(expected: replay.Replay, row: int) -> list[int]:
    return [int(steps[row]) for steps in expected.steps if steps[row]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_tokens(pair_of, case):
    pair = pair_of(case.model)
    expected = reference(pair, case)
    if case.freezes:
        stopped = {step for steps in expected.steps for step in steps if step < case.steps}
        assert stopped, "no row stopped early"
        assert case.rows == 1 or len(stopped) > 1, "all rows stopped at the same step"
    for row, completion in enumerate(ours(pair, case)):
        assert completion.tokens == tuple(expected.tokens[row]) or completion.tokens == expected.tokens[row].tolist()
        assert list(completion.steps) == steps_of(expected, row)
        assert completion.finish_reason == "length"
        assert completion.stop_id is None
        assert completion.seed == seeds(case)[row]
        passes = np.sum(expected.tokens[row] != 0) / expected.tokens_per_forward[row]
        assert sum(completion.steps) == pytest.approx(passes)


def test_rows_hit_stop_ids_in_different_canvases(pair_of):
    """Row 0 in its first canvas, row 1 in its second, row 2 not at all."""
    pair, case = pair_of("calm"), Case("stop")
    free = reference(pair, case)
    canvas = pair.shape.canvas
    first, second = free.tokens[0, 5], free.tokens[1, canvas + 3]
    stops = [int(first), int(second)]
    hits = [np.flatnonzero(np.isin(row, stops)) for row in free.tokens]
    assert hits[0][0] // canvas == 0 and hits[1][0] // canvas == 1 and hits[2].size == 0

    expected = reference(pair, case, eos_token_id=stops, pad_token_id=0)
    for row, completion in enumerate(ours(pair, case, stop_token_ids=stops)):
        end = hits[row][0] if hits[row].size else 3 * canvas
        assert list(completion.tokens) == free.tokens[row, :end].tolist() == expected.tokens[row, :end].tolist()
        assert list(completion.steps) == steps_of(expected, row)
        assert completion.finish_reason == ("stop" if hits[row].size else "length")
        assert completion.stop_id == (free.tokens[row, end] if hits[row].size else None)
        assert completion.tokens_per_step == pytest.approx(end / sum(completion.steps))


def test_output_is_cut_exactly(pair_of):
    """transformers returns whole canvases; ours ends where it was told to."""
    pair, case = pair_of("calm"), Case("cut", canvases=2)
    length = pair.shape.canvas + 4
    expected = reference(pair, case, max_new_tokens=length)
    assert expected.tokens.shape[1] == 2 * pair.shape.canvas
    for row, completion in enumerate(ours(pair, case, max_new_tokens=length)):
        assert list(completion.tokens) == expected.tokens[row, :length].tolist()
        assert list(completion.steps) == steps_of(expected, row)


def test_suppressed_ids(pair_of):
    """The same mask through transformers' logits processors."""
    pair, case = pair_of("calm"), Case("suppress", canvases=1)
    free = reference(pair, case)
    banned = sorted({int(token) for token in free.tokens[:, ::3].ravel()})

    def mask(input_ids, scores, cur_step):
        scores = scores.clone()
        scores[..., banned] = -np.inf
        return scores

    expected = reference(pair, case, logits_processor=replay.processors(mask))
    assert not np.isin(expected.tokens, banned).any()
    for row, completion in enumerate(ours(pair, case, suppress=banned)):
        assert list(completion.tokens) == expected.tokens[row].tolist()
        assert list(completion.steps) == steps_of(expected, row)
