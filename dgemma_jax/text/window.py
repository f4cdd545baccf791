"""The window through which a tool call is read while its text comes in pieces."""

import re

from dgemma_jax.text.segments import DELIMITER

OPEN, CLOSE = "<|tool_call>", "<tool_call|>"
MARKERS = (DELIMITER, OPEN, CLOSE, "<turn|>", "<eos>", "<|tool_response>", "<|channel>", "<channel|>")
_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_LONGEST = max(map(len, MARKERS))
_SPACE = re.compile(r"\s*")


class Window:
    """A stretch of text and a place in it, and what was read of the call in earlier stretches.

    The reader gets the unread rest back at the front of the next stretch, so nothing is copied that was read.
    """

    def __init__(self):
        self._past: list[str] = []
        self._length = 0  # of the past
        self._text, self._start, self._pos, self._final = "", 0, 0, False

    def _enter(self, text: str, pos: int, final: bool) -> None:
        self._text, self._start, self._pos, self._final = text, pos, pos, final

    def _leave(self) -> str:
        self._past.append(self._text[self._start : self._pos])
        self._length += len(self._past[-1])
        return self._text

    def _read(self) -> str:
        return "".join([*self._past, self._text[self._start : self._pos]])

    def _here(self) -> int:
        """The number of characters read."""
        return self._length + self._pos - self._start

    def _rewind(self, place: int) -> None:
        """Back to an earlier `_here`."""
        if place < self._length:
            past = "".join(self._past)
            self._text = past[place:] + self._text[self._start :]
            self._past, self._length, self._start = [past[:place]], place, 0
        self._pos = self._start + place - self._length

    def _next(self) -> str:
        """The next character or marker behind blanks; empty where more text must be seen."""
        blanks = _SPACE.match(self._text, self._pos)
        self._pos = blanks.end() if blanks else self._pos
        char = self._text[self._pos : self._pos + 1]
        return self._marker() if char == "<" else char

    def _marker(self) -> str:
        """The marker at a `<`, or the `<` itself, or nothing where more text must be seen."""
        found = _MARKER.match(self._text, self._pos)
        if found:
            return found[0]
        rest = self._text[self._pos : self._pos + _LONGEST]
        cut = not self._final and len(rest) < _LONGEST and any(marker.startswith(rest) for marker in MARKERS)
        return "" if cut else "<"
