"""Plausible wrong readings of the model, one at a time: the comparison with transformers must notice each of them.

A mutant changes our weights or replaces one of our functions; the reference's answers are those of the other tests.
Without a change everything agrees to 1e-4; every mutant must differ by more than 0.1 somewhere. What no comparison of
outputs can see, because a norm follows that removes any factor, has tests of its own at the end.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from dgemma_jax.model.transformer import Implementations, build, merge

from . import mutants_layers  # noqa: F401  (adds its mutants to the list)
from .mutants import MUTANTS, Subject
from .ours import Ours, rel, right_pad

pytestmark = pytest.mark.parity

NOTICED = 0.1
ROWS = [4, 7]  # W + 1 and 3W + 1 tokens: both past the window, unequal


def worst(pair, subject: Subject) -> float:
    """Largest relative difference over states, caches and logits, one commit deep, of the rows in ROWS."""
    ours, canvas = subject.ours, pair.canvases[:, ROWS]
    prompts = [pair.prompts[row] for row in ROWS]
    tokens, lengths = right_pad(prompts, max(map(len, prompts)) + 3, fill=9)
    cache, hidden = ours.encode(tokens, lengths, ours.empty(len(ROWS)))
    errors = []
    for index, row in enumerate(ROWS):
        expected = pair.single[row]
        errors.append(rel(hidden[index, : len(prompts[index])], expected["hidden"]))
    for depth in range(2):
        expected = pair.ragged["answers"][depth]
        plain = ours.logits(canvas[depth], cache)
        conditioned = ours.logits(canvas[depth], cache, ours.soft(plain / subject.temperature))
        errors += [rel(plain, expected.plain[ROWS]), rel(conditioned, expected.conditioned[ROWS])]
        if depth == 0:
            cache, hidden = ours.encode(pair.commits[0][ROWS], np.full(len(ROWS), canvas.shape[-1]), cache)
            errors.append(rel(hidden, pair.ragged["committed"][0][ROWS]))
    return max(errors)


@pytest.fixture
def subject(pair_of, monkeypatch):
    """Our model, run operation by operation with the reference kernels, which the mutants patch."""
    ours = pair_of("narrow").ours
    graph, _ = build(ours.config, implementations=Implementations("reference", "reference", "reference"))
    return Subject(Ours(graph, ours.params, ours.config, compiled=False), monkeypatch)


def test_without_a_mutation_all_agree(pair_of, subject):
    assert worst(pair_of("narrow"), subject) <= 1e-4


@pytest.mark.parametrize("name", MUTANTS)
def test_mutation_is_noticed(pair_of, subject, name):
    MUTANTS[name](subject)
    error = worst(pair_of("narrow"), subject)
    assert error > NOTICED, f"{name}: relative difference {error:.2e}"


def test_router_weights_are_renormalised_then_scaled(pair_of):
    """The chosen probabilities sum to 1 before per_expert_scale, and no longer after it."""
    pair = pair_of("narrow")
    params, shape = pair.ours.params, pair.shape
    x = np.random.default_rng(0).normal(0, 3, (64, shape.hidden)).astype(np.float32)
    router = params["layers"][1]["router"]
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + shape.eps)
    scores = (normed * np.asarray(router["scale"]) / np.sqrt(shape.hidden)) @ np.asarray(router["proj"], np.float64)
    chances = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected_ids = np.argsort(-chances, -1)[:, : shape.top_k]
    kept = np.take_along_axis(chances, expected_ids, -1)
    expected = kept / kept.sum(-1, keepdims=True) * np.asarray(router["per_expert_scale"])[expected_ids]

    weights, ids = merge(pair.ours.graph, params).layers[1].router(jnp.asarray(x))
    assert np.array_equal(ids, expected_ids)
    assert rel(weights, expected) <= 1e-5
    assert np.abs(np.sum(weights, -1) - 1).max() > 0.1


def test_soft_embedding_is_scaled_by_the_root_of_the_width(pair_of):
    """A distribution on a single id gives that id's scaled embedding."""
    pair = pair_of("narrow")
    ids = np.array([[3, 250, pair.shape.vocab - 1]])
    logits = np.where(np.arange(pair.shape.vocab) == ids[..., None], 0.0, -np.inf).astype(np.float32)
    table = np.asarray(pair.ours.params["embedder"]["table"])
    assert rel(pair.ours.soft(logits), table[ids] * np.sqrt(pair.shape.hidden)) <= 1e-6
