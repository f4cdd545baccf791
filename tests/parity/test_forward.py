"""Encoder states, caches and logits against transformers, rows of all lengths at once and at every depth."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgemma_jax.config import Config
from dgemma_jax.model.transformer import Implementations, build

from . import stream
from .ours import Ours, rel
from .pairs import COMMITS, TEMPERATURE, WIDTH, Pair

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4


def assert_close(ours, reference, what: str) -> float:
    error = rel(ours, reference)
    assert error <= TOLERANCE, f"{what}: relative error {error:.2e}"
    return error


def assert_logits(ours, reference, what: str) -> float:
    """Close, and the same most probable token everywhere."""
    error = assert_close(ours, reference, what)
    assert np.array_equal(np.argmax(ours, -1), np.argmax(reference, -1)), f"{what}: argmax differs"
    return error


def assert_answers(ours: Ours, canvas, cache, expected) -> None:
    """Logits without self-conditioning, and with that of our own first pass."""
    plain = ours.logits(canvas, cache)
    conditioned = ours.logits(canvas, cache, ours.soft(plain / TEMPERATURE))
    assert_logits(plain, expected.plain, "logits")
    assert_logits(conditioned, expected.conditioned, "self-conditioned logits")


def assert_cached(ours: Ours, cache, row: int, layers, what: str) -> None:
    """Keys and values of a row, layer by layer."""
    for layer, expected in enumerate(layers):
        for name, found, reference in zip(("keys", "values"), ours.unroll(cache, layer, row), expected, strict=True):
            assert_close(found, reference, f"{name} of layer {layer}, {what}")


@pytest.fixture(scope="module")
def encoded():
    """name -> (cache, hidden) of all prompts in one right-padded batch."""
    made = {}

    def get(pair: Pair):
        if pair.shape.name not in made:
            made[pair.shape.name] = pair.ours.prompt(pair.prompts, WIDTH)
        return made[pair.shape.name]

    return get


def test_encoder_states_of_every_length(pair, encoded):
    """1, W-2 .. W+2 and several windows, each against the same prompt alone."""
    _, hidden = encoded(pair)
    for index, (prompt, expected) in enumerate(zip(pair.prompts, pair.single, strict=True)):
        assert_close(hidden[index, : len(prompt)], expected["hidden"], f"hidden states, {len(prompt)} tokens")


def test_cache_of_every_length(pair, encoded):
    cache, _ = encoded(pair)
    assert cache.lengths.tolist() == [len(prompt) for prompt in pair.prompts]
    for index, expected in enumerate(pair.single):
        assert_cached(pair.ours, cache, index, expected["layers"], f"{len(pair.prompts[index])} tokens")


def test_logits_of_every_length(pair, encoded):
    cache, _ = encoded(pair)
    plain = pair.ours.logits(pair.canvases[0], cache)
    conditioned = pair.ours.logits(pair.canvases[0], cache, pair.ours.soft(plain / TEMPERATURE))
    for index, expected in enumerate(pair.single):
        what = f"{len(pair.prompts[index])} tokens"
        assert_logits(plain[index], expected["answers"].plain[0], f"logits, {what}")
        assert_logits(conditioned[index], expected["answers"].conditioned[0], f"self-conditioned logits, {what}")
        assert rel(conditioned[index], plain[index]) > 0.1  # otherwise the second comparison says nothing


@pytest.mark.parametrize("name", ["reference", "pallas"])
def test_other_implementations(pair_of, name):
    """The definitions of all ops, and the interpreted kernels; everything else here runs what auto takes.

    A prompt, a commit behind it, and the logits behind both; the head has a definition and no kernel.
    """
    pair = pair_of("narrow")
    head = name if name == "reference" else "auto"
    graph, _ = build(pair.ours.config, implementations=Implementations(attention=name, experts=name, head=head))
    ours = Ours(graph, pair.ours.params, pair.ours.config)
    cache, hidden = ours.prompt(pair.prompts, WIDTH)
    for index, (prompt, expected) in enumerate(zip(pair.prompts, pair.single, strict=True)):
        assert_close(hidden[index, : len(prompt)], expected["hidden"], f"hidden states, {len(prompt)} tokens")
        assert_cached(ours, cache, index, expected["layers"], f"{len(prompt)} tokens")
    assert_answers(ours, pair.canvases[0], cache, pair.ragged["answers"][0])
    if name == "reference":
        assert_head(pair, ours, cache)
    cache, hidden = ours.encode(pair.commits[0], np.full(len(pair.prompts), pair.shape.canvas), cache)
    assert_close(hidden, pair.ragged["committed"][0], "states of a commit")
    assert_cached(ours, cache, len(pair.prompts) - 1, pair.deep["layers"][0], "a commit")
    assert_answers(ours, pair.canvases[1], cache, pair.ragged["answers"][1])


def test_one_row_without_padding(pair_of):
    """A batch of one, its width the prompt's length."""
    pair = pair_of("narrow")
    cache, hidden = pair.ours.prompt(pair.prompts[-1:], len(pair.prompts[-1]))
    assert_close(hidden[0], pair.single[-1]["hidden"], "hidden states")
    assert_answers(pair.ours, pair.canvases[0, -1:], cache, pair.single[-1]["answers"])


def test_unequal_rows_against_left_padding(pair, encoded):
    """transformers counts the padding's positions; rotary positions are relative, so only rounding differs."""
    cache, hidden = encoded(pair)
    for index, prompt in enumerate(pair.prompts):
        assert_close(hidden[index, : len(prompt)], pair.ragged["hidden"][index][pair.ragged["mask"][index]], "hidden")
    assert_answers(pair.ours, pair.canvases[0], cache, pair.ragged["answers"][0])


def test_committed_canvases(pair, encoded):
    """Three canvases deep: states of each commit and the logits of the canvas behind it."""
    cache, _ = encoded(pair)
    lengths = np.full(len(pair.prompts), pair.shape.canvas)
    for depth in range(COMMITS):
        cache, hidden = pair.ours.encode(pair.commits[depth], lengths, cache)
        assert_close(hidden, pair.ragged["committed"][depth], f"states of commit {depth}")
        assert_answers(pair.ours, pair.canvases[depth + 1], cache, pair.ragged["answers"][depth + 1])
        assert_cached(pair.ours, cache, len(pair.prompts) - 1, pair.deep["layers"][depth], f"commit {depth}")


@pytest.mark.parametrize(("name", "size"), [("narrow", 5), ("narrow", 8), ("narrow", 27), ("wide", 12)])
def test_chunks(pair_of, encoded, name, size):
    """Chunks shorter than, as long as and longer than the window; rows that have ended stay as they are."""
    pair = pair_of(name)
    whole, _ = encoded(pair)
    cache, hidden = pair.ours.chunks(pair.prompts, size)
    assert cache.lengths.tolist() == whole.lengths.tolist()
    for index, expected in enumerate(pair.single):
        length = len(pair.prompts[index])
        assert_close(hidden[index, :length], expected["hidden"], f"hidden states, {length} tokens")
        for layer in range(len(pair.shape.layers)):
            for ours, reference in zip(
                pair.ours.unroll(cache, layer, index), pair.ours.unroll(whole, layer, index), strict=True
            ):
                assert rel(ours, reference) < 2e-5, f"layer {layer}, {length} tokens"
    assert_answers(pair.ours, pair.canvases[0], cache, pair.ragged["answers"][0])


def test_streaming_head(pair, encoded):
    cache, _ = encoded(pair)
    assert_head(pair, pair.ours, cache)


def assert_head(pair: Pair, ours: Ours, cache) -> None:
    """argmax, entropy, log-probability, proposal and soft embedding of one pass against transformers' logits."""
    expected = pair.ragged["answers"][0]
    rows, canvas, vocab = expected.plain.shape
    temperature = np.linspace(0.4, 0.8, rows).astype(np.float32)
    seeds = [10**9 * index + 7 for index in range(rows)]
    keys = jnp.stack([stream.step_key(seed, 2, 5) for seed in seeds])
    stats = ours.denoise(pair.canvases[0], cache, None, jnp.asarray(temperature), keys)

    raw = expected.plain.astype(np.float64)
    tempered = raw / temperature[:, None, None]
    logs = tempered - np.log(np.exp(tempered).sum(-1, keepdims=True))
    assert np.array_equal(stats.argmax, raw.argmax(-1))
    assert_close(stats.entropy, -(np.exp(logs) * logs).sum(-1), "entropy")
    assert_close(stats.logprob, raw.max(-1) - np.log(np.exp(raw).sum(-1)), "log-probability")
    compared = 0
    for row, seed in enumerate(seeds):
        uniforms = stream.proposal_uniforms(seed, 2, 5, canvas, vocab)
        proposal, margin = stream.propose(np.exp(logs[row]), uniforms)
        sure = margin > 1e-5
        compared += int(sure.sum())
        assert np.array_equal(np.asarray(stats.sample)[row][sure], proposal[sure])
    assert compared >= 0.95 * rows * canvas

    conditioned = ours.logits(pair.canvases[0], cache, stats.soft)
    assert_close(stats.soft, ours.soft(expected.plain / temperature[:, None, None]), "soft embedding")
    assert rel(conditioned, expected.conditioned) > 1e-2  # other temperatures: another conditioning


def test_spellings_of_the_full_layers(pair):
    """``global_*`` fields and transformers' ``per_layer_config`` describe the same model."""
    written, saved = (json.loads((d / "config.json").read_text()) for d in (pair.directory, pair.saved))
    assert "per_layer_config" in saved["text_config"] and "global_head_dim" not in saved["text_config"]
    written["vision_config"] = saved["vision_config"]
    config = Config.from_hf(written)
    assert config == Config.from_hf(saved)
    expected = ["full" if letter == "F" else "sliding" for letter in pair.shape.layers]
    assert [layer.kind for layer in config.layers] == expected


def test_both_files_hold_the_same_weights(pair_of):
    """What transformers saves loads to the same arrays as what it was given, the unused vision tower included."""
    pair = pair_of("wide")
    other = Ours.load(pair.directory)
    assert "vision" in pair.ours.params
    assert jax.tree.structure(other.params) == jax.tree.structure(pair.ours.params)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, other.params, pair.ours.params)))
    std_scale = pair.oracle.model.model.encoder.vision_tower.std_scale.numpy()
    assert np.array_equal(pair.ours.params["vision"]["std_scale"], std_scale)
