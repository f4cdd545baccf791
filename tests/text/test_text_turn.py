"""A turn read while it comes is the turn as a whole, and ends where its content holds a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dgemma_jax as dg
from dgemma_jax.engine.request import Answer, Request
from dgemma_jax.sampling import BUILT_IN
from dgemma_jax.text import ContentDelta, Tokenizer, parse_response
from dgemma_jax.text.turn import StopStrings, Turn, TurnReader
from dgemma_jax.train import tokenizer as vocabulary

CALL = "<|tool_call>call:f{a:1}<tool_call|>"
letters = st.text("ab", max_size=12)
turns = st.lists(st.sampled_from(["a", "b", "ab ", CALL, "<|channel>thought\n", "<channel|>", "<turn|>"]), max_size=8)
stops = st.lists(st.sampled_from(["b", "ab", "aba", "all", "call:f", 'f{"a": 1}a', "a1"]), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(vocabulary.build())


def first_complete(text: str, strings: list[str]) -> int | None:
    """Where the stop string begins that is complete first, of several the longest."""
    ends = [(at + len(string), at) for string in strings if (at := text.find(string)) >= 0]
    return min(ends)[1] if ends else None


@given(st.lists(letters), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(pieces, strings):
    text = "".join(pieces)
    stop, told = StopStrings(strings), ""
    for piece in pieces:
        told += stop.feed(piece)
        assert text.startswith(told)
    told, at = told + stop.finish(), first_complete(text, strings)
    assert (stop.found is not None) == (at is not None)
    assert told == text[:at]
    assert at is None or text.startswith(stop.found, at)


@given(st.lists(letters))
def test_nothing_is_held_back_without_stop_strings(pieces):
    stop = StopStrings([])
    assert all(stop.feed(piece) == piece for piece in pieces)


@given(turns, stops, st.booleans(), st.integers(1, 9))
def test_the_engine_ends_an_answer_where_its_reader_does(tokenizer, parts, strings, calls, width):
    """Calls where none was offered are text, in which a stop string counts."""
    turn = Turn(None, False, calls)
    sampling = dg.Sampling(stop=strings, stop_token_ids=[tokenizer.token_id("<turn|>")], logprobs=False)
    request = Request((5,), sampling.merged(BUILT_IN), 0, 10_000, turn=turn)
    answer, reader, told = Answer(request, tokenizer), TurnReader(tokenizer, turn, strings), []
    ids = tokenizer.encode("".join([*parts, "<turn|>"]))
    while answer.finish_reason is None:
        told += reader.feed(answer.take(ids[:width], [0.0] * width, 1).tokens)
        ids = ids[width:]
    told += reader.finish()
    content = "".join(event.text for event in told if isinstance(event, ContentDelta))
    assert answer.stop == reader.stopped
    assert not any(string in content for string in strings)
    if calls:
        whole = parse_response(answer.completion().raw_text).content
        assert content == whole[: first_complete(whole, strings)]
