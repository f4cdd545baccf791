"""The same requests in 1, 2, 4 and 8 slots: different programs, which may differ by rounding and by nothing else."""

from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dgemma_jax as dg
from dgemma_jax.diffusion.policy import linear_schedule
from dgemma_jax.diffusion.random import proposal_uniforms, step_keys
from dgemma_jax.diffusion.slots import Slots
from dgemma_jax.engine.scheduler import Scheduler
from tests.margins import MARGIN, margins
from tests.parity import stream
from tests.parity.checkpoints import CALM, write

COUNTS = (2, 4, 8)
SHAPE = replace(CALM, layers="SF")
LENGTHS = (3, 8, 21, 41, 1, 9, 16, 30)
KNOBS = ({}, {"entropy_bound": 0.3}, {"t_min": 0.2, "t_max": 0.9}, {"suppress": [5, 6, 7]})
DECISIONS = ("best", "accepted", "canvas", "running")


@dataclass
class Pass:
    """One pass of a program. before: (cache, slots, active, committing); after: (cache, slots). A row per slot."""

    before: Any
    after: Any
    margins: dict[str, np.ndarray] | None = None

    @property
    def commits(self) -> bool:
        """Of a pass of one slot: whether it encodes a finished canvas."""
        return bool(self.before[3][0])

    @property
    def first(self) -> bool:
        """Of a pass of one slot: whether it is the first of its request."""
        slots = self.before[1]
        return not self.commits and int(slots.canvas_index[0]) == int(slots.state.steps[0]) == 0


def fetched(arrays: Any) -> Any:
    """Copies on the host, where nothing is compiled to slice and to stack them; keys, which numpy has not, as jax's."""
    is_key = lambda array: jnp.issubdtype(array.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda array: jnp.copy(array) if is_key(array) else np.array(array), arrays)


def stacked(*rows: Any) -> Any:
    return (jnp if isinstance(rows[0], jax.Array) else np).concatenate(rows)


class Recorder:
    """A model's programs, one pass at a time, with a copy of each."""

    def __init__(self, programs):
        self.programs, self.passes = programs, []

    def __getattr__(self, name):
        return getattr(self.programs, name)

    def advance(self, policy, params, cache, slots, active, committing, allowance):
        before = fetched((cache, slots, active, committing))
        after = self.programs.advance(policy, params, cache, slots, active, committing, np.int32(1))
        self.passes.append(Pass(before, fetched(after)))
        return after


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return dg.load(write(tmp_path_factory.mktemp("calm"), SHAPE), max_model_len=128)


@pytest.fixture(scope="module")
def requests(model):
    rng = np.random.default_rng(3)
    base = {"max_denoising_steps": 12, "entropy_bound": 2.0, "confidence_threshold": 0.1, "stop_token_ids": ()}
    base["max_new_tokens"] = 2 * SHAPE.canvas + 4
    samplings = [dg.Sampling(seed=2**40 + row, **base | KNOBS[row % len(KNOBS)]) for row in range(len(LENGTHS))]
    prompts = [rng.integers(3, SHAPE.vocab, length).tolist() for length in LENGTHS]
    return [model.request(*pair) for pair in zip(prompts, samplings, strict=True)]


def answers(model, requests, slots: int, programs) -> list[dg.Completion]:
    parts = (model.config, model.params, programs, model.tokenizer, model.max_model_len)
    scheduler = Scheduler(*parts, slots, dg.Policy(), fixed=True, prefill_chunk=64)
    jobs = [scheduler.submit(request) for request in requests]
    while scheduler.busy:
        scheduler.advance()
    return [job.answer.completion() for job in jobs]


@pytest.fixture(scope="module")
def alone(model, requests):
    """(passes with their margins, answers) of all requests, one after the other in a single slot."""
    recorder = Recorder(model._programs)
    found = answers(model, requests, 1, recorder)
    logits_of = jax.jit(partial(dg.denoise_logits, model.graph))
    for one in recorder.passes:
        if not one.commits:
            cache, slots, *_ = one.before
            logits = logits_of(model.params, slots.state.canvas, cache, slots.state.soft)
            one.margins = margins_of(slots, np.asarray(logits, np.float64), np.asarray(one.after[1].state.accepted))
    return recorder.passes, found


def margins_of(slots: Slots, logits: np.ndarray, accepted: np.ndarray) -> dict[str, np.ndarray]:
    """Of what a step of a single slot decides: best, accepted and canvas [1,C], running [1]."""
    steps, knobs = slots.state.steps, slots.knobs
    logits = np.where(slots.suppress[:, None], -np.inf, logits) / float(linear_schedule(steps, knobs)[0])
    uniforms = proposal_uniforms(step_keys(slots.keys, slots.canvas_index, steps), *logits.shape[1:])
    chances = np.exp(logits[0] - logits[0].max(-1, keepdims=True))
    _, draws = stream.propose(chances / chances.sum(-1, keepdims=True), np.asarray(uniforms[0]))
    bound, confidence = np.asarray(knobs.entropy_bound), np.asarray(knobs.confidence)
    found = margins(logits, accepted, bound, confidence, draws[None])
    border = np.minimum(found["acceptance"], found["order"])[:, None]
    return {
        "best": found["argmax"],
        "accepted": np.broadcast_to(border, accepted.shape),
        "canvas": np.minimum(border, found["proposal"]),
        "running": np.minimum(found["confidence"], found["argmax"].min(-1)),
    }


def close(ours, theirs) -> bool:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.abs(ours - theirs).max()) <= 1e-4 * float(np.abs(theirs).max())


def check(after: Any, one: Pass) -> tuple[int, int]:
    """What another program made of a pass, of one row: how many decisions there were, and how many were compared."""
    (cache, slots), (wanted_cache, wanted) = after, one.after
    mine, theirs = slots.state, wanted.state
    assert cache.lengths == wanted_cache.lengths
    assert mine.steps == theirs.steps
    for ours, other in zip((*cache.k, *cache.v), (*wanted_cache.k, *wanted_cache.v), strict=True):
        assert close(ours, other)
    for name in ("soft", "entropy", "logprob"):
        assert close(getattr(mine, name), getattr(theirs, name)), name
    total, compared = 0, 0
    for name in DECISIONS:
        same = np.asarray(getattr(mine, name) == getattr(theirs, name))
        sure = np.ones(same.shape, bool) if one.commits else one.margins[name] > MARGIN
        assert np.all(same | ~sure), name
        total, compared = total + sure.size, compared + int(sure.sum())
    return total, compared


@pytest.mark.parametrize("count", COUNTS)
def test_every_pass_from_the_same_state(model, alone, count):
    """Passes of different requests side by side, some of them committing: each as it was in the single slot."""
    passes, _ = alone
    order = np.random.default_rng(count).permutation(len(passes)).tolist()
    order += order[: -len(order) % count]
    found = []
    for first in range(0, len(order), count):
        group = [passes[index] for index in order[first : first + count]]
        state = jax.tree.map(stacked, *(one.before for one in group))
        after = fetched(model._programs.advance(dg.Policy(), model.params, *state, np.int32(1)))
        for row, one in enumerate(group):
            found.append(check(jax.tree.map(itemgetter(slice(row, row + 1)), after), one))
    total, compared = map(sum, zip(*found, strict=True))
    print(f"{count} slots: {compared} of {total} decisions compared")
    assert compared >= 0.95 * total


@pytest.mark.parametrize("count", COUNTS)
def test_whole_answers_up_to_the_first_close_decision(model, requests, alone, count):
    passes, expected = alone
    starts = [index for index, one in enumerate(passes) if one.first]
    assert len(starts) == len(requests)
    canvases, compared = 0, 0
    for mine, theirs, first, last in zip(
        answers(model, requests, count, model._programs), expected, starts, [*starts[1:], len(passes)], strict=True
    ):
        sure = [one.commits or min(m.min() for m in one.margins.values()) > MARGIN for one in passes[first:last]]
        whole = len(theirs.steps)
        if not all(sure):
            whole = int(passes[first + sure.index(False)].before[1].canvas_index[0])
        assert mine.steps[:whole] == theirs.steps[:whole]
        assert mine.tokens[: whole * SHAPE.canvas] == theirs.tokens[: whole * SHAPE.canvas]
        canvases, compared = canvases + len(theirs.steps), compared + whole
    print(f"{count} slots: {compared} of {canvases} canvases compared")
    assert compared >= 0.5 * canvases
