"""Whole generations, token for token: transformers' ``generate()`` fed with our random stream against ``dg.generate``.

Early stopping, acceptance and proposals depend on comparisons that rounding could turn. The models are such that an
error does not grow from step to step (logits stay within 1e-6 of each other), and the seeds such that no comparison is
close; the tests check the latter.
"""

from dataclasses import dataclass, field

import jax
import numpy as np
import pytest
from transformers import TopKLogitsWarper, TopPLogitsWarper

import dgemma_jax as dg

from . import checkpoints, replay

pytestmark = pytest.mark.parity

MARGIN = 1e-5
PROMPT_LENGTHS = (21, 15, 6)
DEFAULTS = {"t_min": 0.4, "t_max": 0.8, "stability_threshold": 1, "confidence_threshold": 0.1, "entropy_bound": 2.0}


@dataclass(frozen=True)
class Case:
    """One call. freezes: rows must stop early, and at different steps, else the case tests nothing."""

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


FREE = Case("stability_1", seed=2)
CASES = [
    Case("one_row_one_canvas", rows=1, canvases=1, seed=1),
    Case("one_row", rows=1, seed=2),
    Case("stability_0", seed=2, options={"stability_threshold": 0}),
    FREE,
    Case("stability_2", steps=24, seed=5, options={"stability_threshold": 2}),
    Case("release_settings", seed=2, options={"entropy_bound": 0.1, "confidence_threshold": 0.005}, freezes=False),
    Case("no_early_stop", canvases=1, steps=8, seed=1, options={"stability_threshold": None}, freezes=False),
    Case("no_temperature", canvases=1, steps=8, seed=1, options={"t_min": None, "t_max": None}, freezes=False),
    Case("wide_one_canvas", model="calm_wide", rows=2, canvases=1, seed=2),
    Case("wide_three_canvases", model="calm_wide", rows=2, seed=3),
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


@pytest.fixture(scope="module")
def free(pair_of):
    """The reference's run of FREE, which several tests compare parts of."""
    return reference(pair_of(FREE.model), FREE)


def steps_of(expected: replay.Replay, row: int) -> list[int]:
    return [int(steps[row]) for steps in expected.steps if steps[row]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_tokens(pair_of, free, case):
    pair = pair_of(case.model)
    expected = free if case is FREE else reference(pair, case)
    if case.freezes:
        stopped = {step for steps in expected.steps for step in steps if step < case.steps}
        assert stopped, "no row stopped early"
        assert case.rows == 1 or len(stopped) > 1, "all rows stopped at the same step"
    for row, completion in enumerate(ours(pair, case)):
        assert list(completion.tokens) == expected.tokens[row].tolist()
        assert list(completion.steps) == steps_of(expected, row)
        assert completion.finish_reason == "length"
        assert completion.stop_id is None
        assert completion.seed == seeds(case)[row]
        passes = np.sum(expected.tokens[row] != 0) / expected.tokens_per_forward[row]
        assert sum(completion.steps) == pytest.approx(passes)
        assert completion.tokens_per_step == pytest.approx(expected.tokens.shape[1] / passes)


def test_rows_hit_stop_ids_in_different_canvases(pair_of, free):
    """Row 0 in its first canvas, row 1 in its second, row 2 not at all."""
    pair, canvas = pair_of(FREE.model), checkpoints.CALM.canvas
    stops = stop_ids(free.tokens, canvas)
    hits = [np.flatnonzero(np.isin(row, stops)) for row in free.tokens]
    expected = reference(pair, FREE, eos_token_id=stops, pad_token_id=0)
    assert [int(hit[0]) // canvas if hit.size else None for hit in hits] == [0, 1, None]
    for row, completion in enumerate(ours(pair, FREE, stop_token_ids=stops)):
        end = int(hits[row][0]) if hits[row].size else 3 * canvas
        assert list(completion.tokens) == expected.tokens[row, :end].tolist()
        assert list(completion.steps) == steps_of(expected, row)
        assert completion.finish_reason == ("stop" if hits[row].size else "length")
        assert completion.stop_id == (expected.tokens[row, end] if hits[row].size else None)
        assert completion.tokens_per_step == pytest.approx(end / sum(completion.steps))


def stop_ids(tokens: np.ndarray, canvas: int) -> list[int]:
    """An id that only row 0 has, in its first canvas, and one that row 1 has first in its second canvas, not row 2."""
    first = next(t for t in tokens[0, 3:canvas] if t not in tokens[1:])
    second = next(t for t in tokens[1, canvas : 2 * canvas] if t not in tokens[1, :canvas] and t not in tokens[2])
    return [int(first), int(second)]


def test_output_is_cut_exactly(pair_of, free):
    """transformers returns whole canvases, the same ones; ours ends where it was told to."""
    length = checkpoints.CALM.canvas + 4
    for row, completion in enumerate(ours(pair_of(FREE.model), FREE, max_new_tokens=length)):
        assert list(completion.tokens) == free.tokens[row, :length].tolist()
        assert list(completion.steps) == steps_of(free, row)[:2]
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("chosen", [{"top_k": 7}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.8}], ids=str)
def test_top_k_and_top_p(pair_of, chosen):
    """transformers' own warpers, before its temperature."""
    pair, case = pair_of(FREE.model), Case("cut", canvases=1, seed=FREE.seed)
    borders = []

    def cut(input_ids, scores, cur_step):
        flat = scores.reshape(-1, scores.shape[-1])
        for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper)):
            if name in chosen:
                borders.append(border(flat.double(), **{name: chosen[name]}))
                flat = warper(chosen[name])(None, flat)
        return flat.reshape(scores.shape)

    expected = reference(pair, case, logits_processor=replay.processors(cut))
    assert min(borders) > MARGIN, f"choose another seed: {min(borders)}"
    for row, completion in enumerate(ours(pair, case, **chosen)):
        assert list(completion.tokens) == expected.tokens[row].tolist()
        assert list(completion.steps) == steps_of(expected, row)


def border(logits, top_k=None, top_p=None) -> float:
    """How close a logit, or the mass above it, lies to where the cut is made: the smallest over all positions."""
    descending = logits.sort(descending=True).values
    if top_k is not None:
        return float((descending[:, top_k - 1] - descending[:, top_k]).min() / descending.abs().max())
    mass = descending.softmax(-1).cumsum(-1)
    return float((mass - top_p).abs().min())


def test_suppressed_ids(pair_of, free):
    """The same mask through transformers' logits processors."""
    pair, case = pair_of(FREE.model), Case("suppress", canvases=1, seed=FREE.seed)
    banned = sorted({int(token) for token in free.tokens[:, : checkpoints.CALM.canvas : 3].ravel()})

    def mask(input_ids, scores, cur_step):
        scores = scores.clone()
        scores[..., banned] = -np.inf
        return scores

    expected = reference(pair, case, logits_processor=replay.processors(mask))
    assert not np.isin(expected.tokens, banned).any()
    for row, completion in enumerate(ours(pair, case, suppress=banned)):
        assert list(completion.tokens) == expected.tokens[row].tolist()
        assert list(completion.steps) == steps_of(expected, row)
