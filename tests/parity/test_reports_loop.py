"""Faults that users of other implementations reported, as tests: stopping, freezing, seeds and batches."""

import contextlib
import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dgemma_jax as dg
from dgemma_jax.diffusion import random
from dgemma_jax.diffusion import step as step_module
from dgemma_jax.diffusion.policy import Knobs, Policy, stable_and_confident
from dgemma_jax.diffusion.slots import idle, unfinished
from dgemma_jax.kernels.vocab_head import HeadStats
from dgemma_jax.sampling import BUILT_IN

from . import checkpoints, stream

LENGTHS = (5, 30, 41, 12)
SETTINGS = {"max_denoising_steps": 8, "entropy_bound": 2.0, "confidence_threshold": 0.1, "suppress": ()}
A, B = [1, 2, 3, 4], [1, 2, 3, 5]


@pytest.fixture
def model(loaded):
    return loaded("calm")[1].model


@pytest.fixture
def prompts():
    rng = np.random.default_rng(9)
    return [rng.integers(3, checkpoints.CALM.vocab, length).tolist() for length in LENGTHS]


def answers(model, prompts, seeds, slots=4, **changes) -> list[tuple]:
    """(tokens, steps) of every prompt, in the program of four rows unless said otherwise."""
    fields = {"max_new_tokens": checkpoints.CALM.canvas} | SETTINGS | changes
    samplings = [dg.Sampling(seed=seed, **fields) for seed in seeds]
    with jax.default_matmul_precision("highest"):  # the programs of the other tests
        completions = model.generate(prompts, sampling=samplings, slots=slots)
    return [(tuple(completion.tokens), tuple(completion.steps)) for completion in completions]


class Script:
    """Denoising steps on prescribed argmax canvases and entropies: stands in for the network."""

    def __init__(self, ours, monkeypatch):
        self.ours = ours
        monkeypatch.setattr(step_module, "denoise", self.denoise)

    def denoise(self, graph, params, canvas, cache, soft, temperature, keys, **_):
        argmax, entropy = self.canvases[self.made], self.entropies[self.made]
        self.made += 1
        shape = argmax.shape
        spread = jnp.broadcast_to(entropy[:, None], shape)
        return HeadStats(argmax, argmax + 100, spread, jnp.zeros(shape), jnp.full((*shape, 3), float(self.made)))

    def run(self, canvases: list, entropies: list, samplings: list[dg.Sampling]) -> list[step_module.CanvasState]:
        """The state after each step. canvases [step][row][C]; entropies [step][row], the same at every position."""
        self.canvases, self.entropies, self.made = jnp.array(canvases), jnp.array(entropies), 0
        rows, length = self.canvases.shape[1:]
        keys = jnp.stack([stream.step_key(row, 0, 0) for row in range(rows)])
        zeros = jnp.zeros(rows, jnp.int32)
        start = step_module.start(self.ours.config, keys, zeros, jnp.ones(rows, bool), "float32")
        flags, numbers = jnp.zeros((rows, length), bool), jnp.zeros((rows, length))
        state = replace(
            start, canvas=jnp.zeros((rows, length), jnp.int32), best=jnp.full((rows, length), -1, jnp.int32),
            logprob=numbers, pinned=flags, accepted=flags, entropy=numbers, soft=jnp.zeros((rows, length, 3)),
            likeliest=jax.tree.map(lambda x: jnp.zeros((rows, length, x.shape[2]), x.dtype), start.likeliest),
        )  # fmt: skip
        states, suppress = [], jnp.zeros((rows, 1000), bool)
        for _ in range(len(self.canvases)):
            knobs = Knobs.of(samplings)
            ours, cache = self.ours, self.ours.empty(rows)
            state = step_module.step(ours.graph, ours.params, cache, state, keys, zeros, knobs, suppress, Policy())
            states.append(state)
        return states


@pytest.fixture
def script(loaded, monkeypatch):
    return Script(loaded("narrow")[1], monkeypatch)


def sampling(**changes) -> dg.Sampling:
    base = {"max_denoising_steps": 48, "entropy_bound": 0.1, "t_min": 0.4, "t_max": 0.8}
    base |= {"stability_threshold": 1, "confidence_threshold": 0.005, "temperature": None}
    return dg.Sampling(**(base | changes)).merged(BUILT_IN)


@pytest.mark.parametrize(("stability", "last"), [(0, 1), (1, 3), (2, 4), (3, None), (None, None)])
def test_stability_counts_further_equal_canvases(script, stability, last):
    """A, B, B, B, sure from the first: threshold k needs k + 1 equal canvases, and never stops at step 1 for k > 0."""
    states = script.run([[A], [B], [B], [B]], [[0.001]] * 4, [sampling(stability_threshold=stability)])
    running = [bool(state.running[0]) for state in states]
    assert running == [last is None or step < last for step in range(1, 5)]


def test_last_step_ends_the_canvas(script):
    states = script.run([[A], [B], [A]], [[1.0]] * 3, [sampling(max_denoising_steps=2)])
    assert [bool(state.running[0]) for state in states] == [True, False, False]
    assert states[-1].best.tolist() == [B]


def test_confidence_is_strict():
    """A mean entropy equal to the threshold is not below it."""
    knobs = Knobs.of([sampling(confidence_threshold=0.25)] * 2)
    entropy = jnp.array([[0.25] * 4, [0.25, 0.25, 0.25, 0.125]])
    assert stable_and_confident(jnp.array([1, 1]), entropy, knobs).tolist() == [False, True]


def test_finished_rows_freeze(script):
    """Row 0 is done after three steps while row 1 goes on: nothing of row 0 changes any more, not even its count."""
    canvases = [[A, A], [B, B], [B, A], [A, B], [A, B]]
    states = script.run(canvases, [[0.001, 0.001]] * 5, [sampling(), sampling()])
    assert [state.running.tolist() for state in states] == [[True, True]] * 2 + [[False, True]] * 2 + [[False, False]]
    for state in states[3:]:
        for name in ("canvas", "best", "soft", "streak", "steps"):
            assert np.array_equal(getattr(state, name)[0], getattr(states[2], name)[0]), name
    assert states[-1].steps.tolist() == [3, 5]


def test_no_pass_is_made_once_all_rows_are_finished(script):
    states = script.run([[A], [A]], [[0.001]] * 2, [sampling()])
    slots = idle(script.ours.config, stream.step_key(0, 0, 0)[None], Knobs.of([sampling()]), "float32")
    running, ended = (replace(slots, state=state, active=jnp.ones(1, bool)) for state in states)
    assert bool(unfinished(running, jnp.int32(9)))
    assert not bool(unfinished(running, jnp.int32(0)))
    assert not bool(unfinished(ended, jnp.int32(9)))
    assert not bool(unfinished(slots, jnp.int32(9))), "rows at rest do not hold the loop"


def test_accepted_positions_keep_the_sample_and_others_are_renoised(script):
    """Neither the argmax nor the old token survives in the canvas."""
    keep_all, keep_two = script.run([[A], [A]], [[0.0], [0.06]], [sampling(stability_threshold=None)])
    assert keep_all.canvas.tolist() == [[token + 100 for token in A]]
    keys = random.step_keys(stream.step_key(0, 0, 0)[None], jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32))
    noise = random.renoise_ids(keys, 4, 1000)[0].tolist()
    assert keep_two.canvas.tolist() == [[101, 102, *noise[2:]]]


def test_acceptance_is_the_sum_of_what_was_accepted_before():
    """In ascending order, up to and including the position that crosses the bound; the surest one always."""
    entropy = jnp.array([[0.5, 0.04, 0.05, 0.02], [3.0, 2.0, 4.0, 5.0], [0.0, 0.0, 0.0, 0.0]])
    expected = [[False, True, True, True], [False, True, False, False], [True] * 4]
    assert dg.accept(entropy, jnp.array([0.1, 0.1, 0.1])).tolist() == expected
    assert dg.accept(entropy[:1], jnp.array([0.12])).tolist() == [[True] * 4]


@pytest.mark.parametrize("flags", ["as they are", "turned"])
def test_stream_equals_its_definition(flags):
    """Our draws against the second implementation, seeds above 32 bits included, whatever jax's defaults are."""
    seeds, canvas, step = [7, 2**63 - 1], [1, 2], [4, 9]
    length, vocab = 6, 5000
    with contextlib.ExitStack() as stack:
        if flags == "turned":
            stack.enter_context(jax.threefry_partitionable(False))
            stack.enter_context(jax.default_prng_impl("rbg"))
        keys = jnp.stack([random.key_from_seed(seed) for seed in seeds])
        now = random.step_keys(keys, jnp.array(canvas), jnp.array(step))
        uniforms = random.proposal_uniforms(now, length, vocab)
        noise = random.renoise_ids(now, length, vocab)
        first = random.start_canvas(random.step_keys(keys, jnp.array(canvas), jnp.zeros(2, jnp.int32)), length, vocab)
    for row, where in enumerate(zip(seeds, canvas, step, strict=True)):
        assert np.array_equal(uniforms[row], stream.proposal_uniforms(*where, length, vocab))
        assert np.array_equal(noise[row], stream.renoise_ids(*where, length, vocab))
        assert np.array_equal(first[row], stream.start_canvas(*where[:2], length, vocab))


def test_same_seed_same_answer(model, prompts):
    """Twice, with another request between, in another place, and beside other rows; another seed differs."""
    seeds = [3, 2**40, 5, 6]
    first = answers(model, prompts, seeds)
    other = answers(model, prompts[::-1], [11, 12, 13, 14])
    assert answers(model, prompts, seeds) == first
    assert answers(model, prompts[::-1], seeds[::-1]) == first[::-1]
    assert all(one != two for one, two in zip(other[::-1], first, strict=True))


def test_every_row_equals_its_own_run(model, prompts):
    seeds = [3, 4, 5, 6]
    together = answers(model, prompts, seeds)
    alone = [answers(model, [prompt], [seed])[0] for prompt, seed in zip(prompts, seeds, strict=True)]
    assert together == alone
    assert len(set(together)) == len(prompts)


def test_more_prompts_than_slots(model, prompts):
    """Six requests through four rows: the same answers, in the order of the prompts."""
    many, seeds = [*prompts, *prompts[:2]], [3, 4, 5, 6, 3, 4]
    result = answers(model, many, seeds)
    assert result[:4] == answers(model, prompts, seeds[:4])
    assert result[4:] == result[:2]


def test_temperature_zero_with_a_seed_repeats(model, prompts):
    """The proposal is the argmax; the noise still comes from the seed."""
    run = functools.partial(answers, model, prompts, temperature=0)
    first = run([1, 2, 3, 4])
    assert run([1, 2, 3, 4]) == first
    assert run([5, 6, 7, 8]) != first


def test_settings_of_an_earlier_call_do_not_stick(model, prompts):
    seeds = [1, 2, 3, 4]
    tight = answers(model, prompts, seeds, entropy_bound=0.1)
    assert answers(model, prompts, seeds, entropy_bound=5.0) != tight
    assert answers(model, prompts, seeds, entropy_bound=0.1) == tight


def test_one_step_commits_the_argmax(model, loaded, prompts):
    """Not the sampled canvas: with one step and flat logits the two are far apart."""
    ours, config = loaded("calm")[1], model.config
    (tokens, steps), *_ = answers(model, prompts, [21, 22, 23, 24], max_denoising_steps=1)
    cache, _ = ours.prompt(prompts, 64)
    seeds = [21, 22, 23, 24]
    canvas = np.stack([stream.start_canvas(seed, 0, config.canvas_length, config.vocab_size) for seed in seeds])
    assert steps == (1,)
    assert list(tokens) == np.argmax(ours.logits(canvas, cache)[0], -1).tolist()


def test_defaults_are_the_references(model):
    """A generation_config.json that leaves everything open: entropy bound 0.1, 48 steps, 0.8 to 0.4, 1 and 0.005."""
    found = model.defaults
    assert (found.max_denoising_steps, found.entropy_bound, found.t_min, found.t_max) == (48, 0.1, 0.4, 0.8)
    assert (found.stability_threshold, found.confidence_threshold, found.stop_token_ids) == (1, 0.005, (1,))
    assert found.temperature is None
