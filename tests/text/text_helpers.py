"""What the tests of the text layer share: small tokenizers, ways to cut a response, and streams run to their end."""

import json
import re
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from dgemma_jax.text import ContentDelta, ReasoningDelta, ResponseStream, Tokenizer
from dgemma_jax.text.template import CONTROL_TOKENS

GOLDEN = Path(__file__).parents[1] / "golden"
D = '<|"|>'


def golden(name: str) -> list:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def _with_control_tokens(backend: tokenizers.Tokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    return Tokenizer(backend)


@cache
def gemma_like() -> Tokenizer:
    """A small vocabulary of the kind of Gemma 4's: blanks as U+2581, unknown characters as byte tokens."""
    letters = [chr(code) for code in range(33, 127)] + ["▁", "\n", "é", "\ufffd", "ca", "al", "ll", "▁t", "th"]
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("c", "a"), ("a", "l"), ("l", "l"), ("▁", "t"), ("t", "h")]
    model = models.BPE(
        {token: id for id, token in enumerate(vocabulary)}, merges, unk_token="<unk>", byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with_control_tokens(backend)


@cache
def byte_level() -> Tokenizer:
    """A small vocabulary of bytes, as GPT-2's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: id for id, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _with_control_tokens(backend)


def pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def feedings(text: str) -> dict[str, list[str]]:
    """The same text whole, by token, by character and by 256 tokens, as the decoder gives it."""
    tokenizer = gemma_like()
    ids = tokenizer.encode(text)
    out = {"whole": [text], "characters": list(text)}
    for name, size in (("tokens", 1), ("canvases", 256)):
        decoder = tokenizer.decoder()
        deltas = [decoder.feed(ids[start : start + size]) for start in range(0, len(ids), size)]
        out[name] = [*deltas, decoder.finish()]
        assert "".join(out[name]) == text
    return out


def run(deltas, tools=None, in_thought=False) -> ResponseStream:
    """A stream fed with `deltas` and finished. Its events are checked against its result, and against each prefix."""
    stream = ResponseStream(tools, in_thought)
    events = []
    for delta in deltas:
        events += stream.feed(delta)
        assert_joins(events, stream.response)
    events += stream.finish()
    assert_joins(events, stream.response)
    stream.events = joined(events)
    return stream


def assert_joins(events, response) -> None:
    """The events spell the response: texts join, each call is begin, arguments, end, with arguments in JSON."""
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == response.reasoning
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == response.content
    calls = [event for event in events if not isinstance(event, ReasoningDelta | ContentDelta)]
    assert [type(event).__name__ for event in calls] == ["CallBegin", "ArgumentsDelta", "CallEnd"] * len(
        response.tool_calls
    )
    for index, call in enumerate(response.tool_calls):
        begin, arguments, end = calls[3 * index : 3 * index + 3]
        assert (begin.index, begin.id, begin.name) == (index, call.id, call.name)
        assert arguments.index == end.index == index
        assert json.loads(arguments.text) == call.arguments


def joined(events) -> list:
    """Events with neighbouring texts of one kind joined, so that streams cut differently compare equal."""
    out = []
    for event in events:
        same = out and type(out[-1]) is type(event) and isinstance(event, ReasoningDelta | ContentDelta)
        out[-1:] = [type(event)(out[-1].text + event.text)] if same else [*out[-1:], event]
    return out


def calls(response) -> list[tuple[str, dict]]:
    return [(call.name, call.arguments) for call in response.tool_calls]


def exact(value) -> str:
    """Tells 5 from 5.0 and 1 from True, which == does not."""
    return re.sub(r"\s", "", json.dumps(value, sort_keys=True))
