"""Properties of the response grammar: any cut gives the same result, no input hangs, time is linear."""

import gc
import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma_jax.text import ResponseStream, parse_response
from tests.text.text_helpers import D, pieces, run

ALPHABET = [
    *("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", "<think>", "</think>", "<call>", "<turn|>", "<eos>"),
    *(
        "<|tool_response>",
        D,
        D,
        D,
        "call:",
        "call:f{",
        "call:g(",
        "<|tool_call>call:h{",
        "a:",
        "b:",
        f"a:{D}",
        f"{D}}}",
    ),
    *("}<tool_call|>", "{", "}", "[", "]", "(", ")", ",", ":", '"', "'", "\\", " ", "\n", "x", "thought\n", "thought"),
    *("<", "|", ">", "c", "1", "true", "=", "é"),
]
TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}}]
garbage = st.lists(st.sampled_from(ALPHABET), max_size=40).map("".join)


@settings(max_examples=600, deadline=None)
@given(
    text=garbage, cuts=st.lists(st.integers(0, 200), max_size=12), tools=st.sampled_from([None, TOOLS]), data=st.data()
)
def test_any_cut_gives_the_same_result(text, cuts, tools, data):
    in_thought = data.draw(st.booleans())
    whole = run([text], tools, in_thought)
    assert parse_response(text, tools, in_thought) == whole.response
    cuts = sorted({min(cut, len(text)) for cut in cuts})
    for deltas in (
        [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)],
        list(text),
    ):
        stream = run(deltas, tools, in_thought)
        assert (stream.response, stream.events) == (whole.response, whole.events)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet=st.characters(exclude_characters="<"), max_size=60).filter(lambda text: "call:" not in text)
)
def test_plain_text_is_content(text):
    expected = text.removeprefix("thought\n")
    response = parse_response(text)
    assert (response.content or response.reasoning) == expected


@settings(max_examples=300, deadline=None)
@given(text=garbage)
def test_no_character_is_lost(text):
    """Without calls, what is not a marker or a label comes out, in order within reasoning and content."""
    response = parse_response(text)
    if response.tool_calls:
        return
    for part in (response.reasoning, response.content):
        rest = iter(text)
        assert all(char in rest for char in part)
    lost = [char for char in set(text) - set(response.reasoning + response.content) if not char.isspace()]
    assert set(lost) <= set("<|>/_" + "thoughtchanneleosturnthinktool_response")


def test_all_short_strings():
    """Every string up to length 5 of structure, delimiter and a letter, as arguments: no hang, no exception."""
    symbols = [*"{}[],:\"'a", D]
    for length in range(6):
        for symbols_of in itertools.product(symbols, repeat=length):
            parse_response("call:f{" + "".join(symbols_of) + "}<tool_call|>")


UNITS = {
    "prose": "hello world ",
    "angles": "<",
    "half markers": "<|",
    "bare openers": "call:",
    "openers": "<|tool_call>",
    "calls begun": "<|tool_call>call:f{",
    "strings begun": f"<|tool_call>call:f{{a:{D}x",
    "strings cut": f"<|tool_call>call:f{{a:{D}x<tool_call|>",
    "quotes begun": "call:f{a:'x",
    "delimiters": D,
    "ends": "<turn|>",
    "blanks": " ",
    "channels": "<|channel>",
    "thoughts": "<|channel>thought\nx<channel|>",
    "headers": "<|tool_call>" + "a " * 99,
    "blank headers": "<|tool_call>" + " " * 190 + "{",
}
BODIES = {
    "quotes in a string": f"{D}y",
    "brackets": "[",
    "pairs": "a:1,",
    "commas": ",y",
    "objects": "a:{",
    "ends in a string": "}<tool_call|>",
    "keys in a string": f",b:{D}",
    "digits": "1",
    "escapes": "\\",
}
ADVERSARIES = {
    **{name: unit * (1_000_000 // len(unit)) for name, unit in UNITS.items()},
    **{
        f"{name} in {opener}": opener + unit * (1_000_000 // len(unit))
        for opener in (f"<|tool_call>call:f{{a:{D}", "<|tool_call>call:f{a:x", '<|tool_call>call:f{a:"')
        for name, unit in BODIES.items()
    },
}


def seconds(text: str, size: int) -> float:
    """CPU time of this thread, without the collector: a sweep over what other tests left behind may take seconds."""
    gc.disable()
    try:
        start = time.thread_time()
        stream = ResponseStream()
        for piece in pieces(text, size):
            stream.feed(piece)
        stream.finish()
        return time.thread_time() - start
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ADVERSARIES)
def test_time_is_linear(name):
    """Four times the text takes about four times as long; a quadratic scanner would take sixteen times as long."""
    text = ADVERSARIES[name][:400_000]
    whole, quarter = seconds(text, 1000), seconds(text[:100_000], 1000)
    assert whole < 8 * quarter + 0.1


def test_an_adversarial_megabyte_takes_less_than_two_seconds():
    """Whole in one delta; the machine may be busy, so the better of two runs counts."""
    for name in ("strings begun", "half markers", f"ends in a string in <|tool_call>call:f{{a:{D}"):
        assert min(seconds(ADVERSARIES[name], 1_000_000) for _ in range(2)) < 2, name


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_garbage_takes_linear_time(seed):
    text = "".join(random.Random(seed).choices(ALPHABET, k=20_000))
    quarter = text[: len(text) // 4]
    assert seconds(text, len(text)) < 8 * seconds(quarter, len(text)) + 0.1
