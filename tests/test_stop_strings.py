"""Stop strings of an answer that comes canvas by canvas, against their definition on the whole of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma_jax.engine.request import Answer, Request, Turn
from dgemma_jax.sampling import BUILT_IN, Sampling
from tests.text.text_helpers import byte_level, gemma_like

TOKENIZERS = {"gemma_like": gemma_like, "byte_level": byte_level}
PIECES = ("é€", "😀", "\ufffd", "call", "a", " t", "ab\n")


def answer(tokenizer, ids: list[int], stop: list[str], size: int, turn: Turn | None = None) -> tuple[Answer, list[int]]:
    """The answer after canvases of `size` ids each, and the tokens that were told."""
    sampling = Sampling(stop=stop, logprobs=True).merged(BUILT_IN)
    found, told = Answer(Request((1,), sampling, 0, len(ids), turn=turn), tokenizer), []
    while found.finish_reason is None:
        canvas = ids[len(found.tokens) : len(found.tokens) + size]
        told += found.take(canvas, [float(id) for id in canvas], 1).tokens
    return found, told


def tokens_before(tokenizer, ids: list[int], at: int) -> list[int]:
    """As many as make text that ends at or before place `at` of the whole."""
    raw, kept = tokenizer.decode(ids), len(ids)
    while len(text := tokenizer.decode(ids[:kept])) > at or not raw.startswith(text):
        kept -= 1
    return ids[:kept]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_tokens_and_any_stop(name, data):
    """Characters in several tokens, halves of characters, tokens that are the sign for them: told and kept agree."""
    tokenizer = TOKENIZERS[name]()
    ids = []
    for piece in data.draw(st.lists(st.sampled_from(PIECES) | st.integers(0, tokenizer.vocab_size - 1), min_size=1)):
        ids += [piece] if isinstance(piece, int) else tokenizer.encode(piece, control=False)
    raw = tokenizer.decode(ids)
    start = data.draw(st.integers(0, len(raw)))
    stop = raw[start : start + data.draw(st.integers(1, 4))] or "never"
    found, told = answer(tokenizer, ids, [stop, "nor this"], data.draw(st.integers(1, 7)))
    completion = found.completion()
    assert told == completion.tokens
    assert len(completion.logprobs) == len(completion.tokens)
    if stop in raw:
        assert (completion.finish_reason, completion.stop) == ("stop", stop)
        assert completion.raw_text == raw.split(stop)[0]
        assert completion.tokens == tokens_before(tokenizer, ids, raw.find(stop))
    else:
        assert (completion.finish_reason, completion.stop) == ("length", None)
        assert (completion.raw_text, completion.tokens) == (raw, ids)


@pytest.mark.parametrize("size", range(1, 40))
def test_of_two_stops_the_one_that_is_complete_first_counts(size):
    """As in turns, wherever a canvas ends."""
    tokenizer = byte_level()
    ids = tokenizer.encode("say one two three four", control=False)
    found, _ = answer(tokenizer, ids, ["one two three", "two"], size)
    assert (found.stop, found.completion().raw_text) == ("two", "say one ")


@pytest.mark.parametrize("size", [1, 5, 64])
def test_a_turn_ends_in_its_content_alone(size):
    """The string stands in the thought, too, and in a call that comes before."""
    tokenizer = gemma_like()
    text = (
        '<|channel>thought\nhalt<channel|>well<|tool_call>call:f{a:<|"|>halt<|"|>}<tool_call|>then halt and more of it'
    )
    ids = tokenizer.encode(text)
    found, told = answer(tokenizer, ids, ["halt"], size, Turn(None, False))
    assert found.completion().stop == "halt"
    assert told == found.tokens == ids[: len(found.tokens)]
    assert tokenizer.decode(found.tokens).startswith(text.removesuffix(" and more of it"))


def test_a_long_answer_is_decoded_once(monkeypatch):
    """What a canvas costs must not grow with what is there already."""
    tokenizer = gemma_like()
    ids, decoded = tokenizer.encode("ab calls it that " * 400), []
    decode = type(tokenizer).decode
    monkeypatch.setattr(
        type(tokenizer), "decode", lambda self, ids, **how: decoded.append(len(ids)) or decode(self, ids, **how)
    )
    found, _ = answer(tokenizer, ids, ["that that", "never"], 32)
    assert found.finish_reason == "length"
    assert sum(decoded) < 10 * len(ids)
