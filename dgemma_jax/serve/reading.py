"""From the tokens of an answer to what a client is told of it: the same events whole or while they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dgemma_jax.engine.request import Turn
from dgemma_jax.events import Completion
from dgemma_jax.text import ContentDelta, Event, ReasoningDelta, ResponseStream, Tokenizer
from dgemma_jax.text.response import ArgumentsDelta, CallBegin


class Reader(Protocol):
    """Takes the tokens of one answer, canvas by canvas."""

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        """What these tokens make certain."""

    def finish(self, completion: Completion) -> list[Event]:
        """The rest, once the answer is complete."""


class TextReader:
    """Of a plain prompt's answer: all of it is content, without control tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._decoder, self._told = tokenizer.decoder(skip_special=True), 0

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        return self._content(self._decoder.feed(tokens))

    def finish(self, completion: Completion) -> list[Event]:
        return self._content(completion.text[self._told :])

    def _content(self, text: str) -> list[Event]:
        self._told += len(text)
        return [ContentDelta(text)] if text else []


class ChatReader:
    """Of a conversation's answer, taken apart into content, reasoning and calls. stop: strings that end the content."""

    def __init__(self, tokenizer: Tokenizer, turn: Turn, stop: Sequence[str]):
        self._decoder, self._stop = tokenizer.decoder(), StopStrings(stop)
        self._stream, self._offered = ResponseStream(turn.tools, turn.in_thought), bool(turn.tools)

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        return self._told(self._stream.feed(self._decoder.feed(tokens)))

    def finish(self, completion: Completion) -> list[Event]:
        events = self._told([*self._stream.feed(self._decoder.finish()), *self._stream.finish()])
        rest = self._stop.finish()
        return [*events, ContentDelta(rest)] if rest else events

    def _told(self, events: Sequence[Event]) -> list[Event]:
        told: list[Event] = []
        for event in events if self._offered else map(self._as_text, events):
            if self._stop.found:
                break
            if isinstance(event, ContentDelta):
                event = ContentDelta(self._stop.feed(event.text))
            if not isinstance(event, ContentDelta | ReasoningDelta) or event.text:
                told.append(event)
        return told

    def _as_text(self, event: Event) -> Event:
        """Where no tool is offered, what reads like a call is text."""
        if isinstance(event, ContentDelta | ReasoningDelta):
            return event
        if isinstance(event, CallBegin):
            return ContentDelta(f"call:{event.name}")
        return ContentDelta(event.text if isinstance(event, ArgumentsDelta) else "")


class StopStrings:
    """Text up to the first of some strings, given out as soon as it cannot belong to one. found: there was one."""

    def __init__(self, strings: Sequence[str]):
        self._strings, self._held, self.found = strings, "", False

    def feed(self, text: str) -> str:
        """The text that is sure to stand before any stop string."""
        if self.found:
            return ""
        self._held += text
        hits = [at for string in self._strings if (at := self._held.find(string)) >= 0]
        self.found = bool(hits)
        sure = min(hits) if hits else len(self._held) - self._begun()
        out, self._held = self._held[:sure], "" if hits else self._held[sure:]
        return out

    def finish(self) -> str:
        """What was held back and began none."""
        held, self._held = self._held, ""
        return held

    def _begun(self) -> int:
        """How many characters at the end may begin a stop string."""
        longest = max((len(string) for string in self._strings), default=1) - 1
        ends = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in ends if any(string.startswith(self._held[-n:]) for string in self._strings)), 0)
