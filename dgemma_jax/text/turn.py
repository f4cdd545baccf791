"""A model's turn of a conversation from its tokens to what is told of it, while it comes: one reader for the engine,
which ends an answer at a stop string, and for whoever passes the answer on."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dgemma_jax.text.response import (
    ArgumentsDelta,
    CallBegin,
    ContentDelta,
    Event,
    ReasoningDelta,
    Response,
    ResponseStream,
    ToolCall,
)
from dgemma_jax.text.tokenizer import Tokenizer


class Turn(NamedTuple):
    """What it takes to read a model's turn. in_thought: its prompt ends inside an open thought. calls: what reads like
    a call is one; otherwise it is text, because no tool was offered."""

    tools: Sequence[Mapping] | None
    in_thought: bool
    calls: bool = True


class TurnText:
    """Takes the text of a turn piece by piece. stop: strings that end the content, not thoughts or calls before it;
    `stopped` is the one that did, and nothing behind it is told."""

    def __init__(self, turn: Turn, stop: Sequence[str] = ()):
        self._stream = ResponseStream(turn.tools, turn.in_thought)
        self._calls, self._stop = turn.calls, StopStrings(stop)

    @property
    def stopped(self) -> str | None:
        return self._stop.found

    def call(self, begin: CallBegin) -> ToolCall:
        """The whole of a call that was told."""
        return self._stream.response.tool_calls[begin.index]

    def feed(self, text: str) -> list[Event]:
        """What this text makes certain."""
        return self._told(self._stream.feed(text))

    def finish(self) -> list[Event]:
        """What the end of the turn makes certain."""
        events = self._told(self._stream.finish())
        rest = self._stop.finish()
        return [*events, ContentDelta(rest)] if rest else events

    def _told(self, events: Sequence[Event]) -> list[Event]:
        told: list[Event] = []
        for event in events if self._calls else map(_as_text, events):
            if self.stopped is not None:
                break
            if isinstance(event, ContentDelta):
                event = ContentDelta(self._stop.feed(event.text))
            if not isinstance(event, ContentDelta | ReasoningDelta) or event.text:
                told.append(event)
        return told


class TurnReader:
    """Takes the tokens of a turn, canvas by canvas; otherwise a TurnText."""

    def __init__(self, tokenizer: Tokenizer, turn: Turn, stop: Sequence[str] = ()):
        self._decoder, self._text = tokenizer.decoder(), TurnText(turn, stop)

    @property
    def stopped(self) -> str | None:
        return self._text.stopped

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        """What these tokens make certain."""
        return self._text.feed(self._decoder.feed(tokens))

    def finish(self) -> list[Event]:
        """What the end of the turn makes certain."""
        return [*self._text.feed(self._decoder.finish()), *self._text.finish()]


def parse_turn(text: str, turn: Turn, stop: Sequence[str] = ()) -> Response:
    """A whole turn taken apart as a TurnText would tell it: nothing behind a stop string in its content is part."""
    reader = TurnText(turn, stop)
    events = [*reader.feed(text), *reader.finish()]
    return Response(
        reasoning="".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        content="".join(event.text for event in events if isinstance(event, ContentDelta)),
        tool_calls=[reader.call(event) for event in events if isinstance(event, CallBegin)],
    )


def _as_text(event: Event) -> Event:
    match event:
        case CallBegin(name=name):
            return ContentDelta(f"call:{name}")
        case ArgumentsDelta(text=text):
            return ContentDelta(text)
        case ContentDelta() | ReasoningDelta():
            return event
    return ContentDelta("")


class StopStrings:
    """Text up to one of some strings, given out as soon as it cannot belong to one. found: the string that ended it,
    the first one to be complete, however the text was cut; None as long as there is none."""

    def __init__(self, strings: Sequence[str]):
        self._strings, self._held = strings, ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """The text that is sure to stand before a stop string."""
        if self.found is not None:
            return ""
        self._held += text
        hits = [(at + len(string), at, string) for string in self._strings if (at := self._held.find(string)) >= 0]
        _, sure, self.found = min(hits, default=(0, len(self._held) - self._begun(), None))
        out, self._held = self._held[:sure], "" if hits else self._held[sure:]
        return out

    def finish(self) -> str:
        """What was held back and began none."""
        held, self._held = self._held, ""
        return held

    def _begun(self) -> int:
        """How many characters at the end may begin a stop string."""
        longest = max(map(len, self._strings), default=1) - 1
        ends = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in ends if any(string.startswith(self._held[-n:]) for string in self._strings)), 0)
