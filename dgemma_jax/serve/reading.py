"""From the tokens of an answer to what a client is told of it: the same events whole or while they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dgemma_jax.events import Completion
from dgemma_jax.text import ContentDelta, Event, Tokenizer
from dgemma_jax.text.turn import Turn, TurnReader


class Reader(Protocol):
    """Takes the tokens of one answer, canvas by canvas."""

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        """What these tokens make certain."""
        ...

    def finish(self, completion: Completion) -> list[Event]:
        """The rest, once the answer is complete."""
        ...


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
        self._reader = TurnReader(tokenizer, turn, stop)

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        return self._reader.feed(tokens)

    def finish(self, completion: Completion) -> list[Event]:
        return self._reader.finish()
