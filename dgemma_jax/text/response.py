"""What the model wrote, taken apart into reasoning, content and tool calls: whole, or while it comes.

One scanner serves both, so any way of cutting the text gives the same result:

    response  = [thought] (text | thought | call)* end
    thought   = ("<|channel>" ["thought\\n"] | "<think>") text ("<channel|>" | "</think>" | call)
    call      = ("<|tool_call>" | "<call>" | "call:" behind no word or quote) ... ["<tool_call|>"]    see call.py
    end       = any of "<turn|>" "<eos>" "<|tool_response>" and blanks

The opener of a thought may be missing at the very start, where `thought\\n` alone tells it, and `in_thought` says that
the prompt has opened it. An attempt that turns out to be no call is text. Blank text that touches a call or a thought
is dropped, and so is the line break that the chat format puts before the end of a thought.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dgemma_jax.text.call import BARE_HEADER, HEADER, CallScanner
from dgemma_jax.text.schema import Budget, function_of, normalise
from dgemma_jax.text.values import typed

_ENDS = ("<turn|>", "<eos>", "<|tool_response>")
_THOUGHT_OPENS, _THOUGHT_CLOSES = ("<|channel>", "<think>"), ("<channel|>", "</think>")
_CALL_OPENS, _CALL_CLOSES = ("<|tool_call>", "<call>"), ("<tool_call|>", "</call>")
_MARKERS = (*_ENDS, *_THOUGHT_OPENS, *_THOUGHT_CLOSES, *_CALL_OPENS, *_CALL_CLOSES)
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))
_LONGEST = max(map(len, _MARKERS))
# Where text may stop being text: at a marker, at the opener of a call (if what follows can be its header), at the
# beginning of one of these that the window cuts short. A bare `call:` must not be part of a word or of a quotation.
_STOP = re.compile(
    rf"<(?:(?P<marker>{'|'.join(re.escape(marker[1:]) for marker in _MARKERS if marker not in _CALL_OPENS)})"
    rf"|(?P<opener>{'|'.join(re.escape(marker[1:]) for marker in _CALL_OPENS)})(?={HEADER}(?:[({{]|\Z))"
    rf"|[|/a-z_]{{0,{_LONGEST - 2}}}\Z)"
    rf"|c(?<![\w`\"'/-]c)(?:(?P<bare>all:)(?![({{])(?={BARE_HEADER}(?:[({{]|\Z))|(?:a(?:ll?)?)?\Z)"
)
_JSON = json.JSONEncoder(ensure_ascii=False).encode
_SURPLUS = re.compile(r"[\s)}\]]{0,16}")
_LABEL = "thought\n"
_CUT_LABELS = ("thought<channel|>", "thought</think>", "thought<turn|>", "thought<eos>")
_LONGEST_LABEL = max(map(len, _CUT_LABELS))


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of text of the thought."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of the function `name`, the call number `index` of the response; id: see `ToolCall`."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of the JSON text of the arguments of call `index`; the pieces join to the whole."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of call `index`."""

    index: int


Event = ReasoningDelta | ContentDelta | CallBegin | ArgumentsDelta | CallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`id` follows from the call's place, name and arguments: the same text always gives the same id."""

    id: str
    name: str
    arguments: dict


@dataclass(frozen=True, slots=True)
class Response:
    """A model's turn: reasoning is the text of its thoughts, content that for the user, tool_calls in their order."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def parse_response(text: str, tools: Sequence[Mapping] | None = None, in_thought: bool = False) -> Response:
    """Takes a whole response apart. Total: whatever the model wrote, text that is no call is content or reasoning.

    `text` is decoded with special tokens kept. `tools` types the bare values of arguments; `in_thought` says that the
    prompt ends inside an open thought (see `opens_thought`).
    """
    stream = ResponseStream(tools, in_thought)
    stream.feed(text)
    stream.finish()
    return stream.response


def opens_thought(prompt: str) -> bool:
    """Whether a rendered prompt ends inside an open thought channel."""
    opened = prompt.rfind("<|channel>")
    boundaries = ("<channel|>", "<|turn>", "<turn|>", "<tool_call|>", "<|tool_response>", "<tool_response|>")
    return opened >= 0 and all(prompt.rfind(marker) < opened for marker in boundaries)


class ResponseStream:
    """Takes a response apart while it comes. Text is given out as soon as its meaning is certain, a call when its end
    is read: then its begin, arguments and end come together. tools, in_thought: see `parse_response`.
    """

    def __init__(self, tools: Sequence[Mapping] | None = None, in_thought: bool = False):
        functions = [function_of(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
        budget = Budget()
        self._schemas = {f["name"]: normalise(f.get("parameters") or {}, budget=budget)[0] for f in functions}
        self._text, self._pos, self._offset = "", 0, 0  # the window, the place in it, the window's place in the stream
        self._final = self._finished = False
        self._thinking = self._run_thinks = in_thought
        self._mode = self._label if in_thought else self._start
        self._held: list[str] = []  # blanks and end markers that may turn out to be the end
        self._held_end = False  # there is an end marker among them
        self._fresh, self._edge = True, "thought" if in_thought else "start"  # no text yet since start, thought or call
        self._break = ""  # the line break dropped at the end of the last thought
        self._scanner: CallScanner | None = None
        self._dead: dict[str, int] = {}
        self._events: list[Event] = []
        self._run: list[str] = []  # the text of the event being made
        self._said: dict[bool, list[str]] = {True: [], False: []}  # by thinking
        self._calls: list[ToolCall] = []

    def feed(self, delta: str) -> list[Event]:
        """The events that `delta` makes certain. ValueError after `finish`."""
        if self._finished:
            raise ValueError("ResponseStream.feed: the stream is finished; use a new one for the next response")
        keep = max(self._pos - 1, 0)  # one character more, for what may stand before a bare `call:`
        self._text = self._text[keep:] + delta
        self._pos, self._offset = self._pos - keep, self._offset + keep
        return self._read()

    def finish(self) -> list[Event]:
        """The events that the end of the text makes certain."""
        if self._finished:
            return []
        self._final = self._finished = True
        events = self._read()
        if self._held_end or (self._fresh and self._edge != "start"):
            self._held = []
        self._say("")
        return events + self._taken()

    @property
    def response(self) -> Response:
        """What has been given out so far; after `finish`, the whole."""
        return Response("".join(self._said[True]), "".join(self._said[False]), list(self._calls))

    def _read(self) -> list[Event]:
        while self._mode():
            pass
        return self._taken()

    # Modes: each reads one thing and returns true, or returns false where it must see more text.

    def _start(self) -> bool:
        """The first characters: a thought without its opener?"""
        label = self._label_ahead()
        if label is None:
            return False
        self._thinking = label == _LABEL or label.endswith(_THOUGHT_CLOSES)
        if self._thinking:
            self._edge = "thought"
        self._mode = self._label if self._thinking else self._prose
        return True

    def _label(self) -> bool:
        """Behind the opener of a thought."""
        label = self._label_ahead()
        if label is None:
            return False
        self._pos += len(_LABEL) if label == _LABEL else len("thought") if label else 0
        self._mode = self._prose
        return True

    def _label_ahead(self) -> str | None:
        """The label here, whole or cut short by a marker or by the end; None where more text must be seen."""
        ahead = self._text[self._pos : self._pos + _LONGEST_LABEL]
        for label in (_LABEL, *_CUT_LABELS):
            if ahead.startswith(label):
                return label
            if label.startswith(ahead) and not self._final:
                return None
        return "thought" if ahead == "thought" else ""

    def _line_break(self) -> bool:
        """Behind `<think>`, which usually has a line to itself."""
        if self._pos == len(self._text) and not self._final:
            return False
        self._pos += self._text.startswith("\n", self._pos)
        self._mode = self._prose
        return True

    def _prose(self) -> bool:
        found = _STOP.search(self._text, self._pos)
        end = found.start() if found else len(self._text)
        self._words(self._text[self._pos : end])
        self._pos = end
        if not found or not (found.lastgroup or self._final):
            return False
        self._pos = found.end()
        if found.lastgroup == "marker":
            self._meet(found[0])
        elif found.lastgroup:
            self._scanner = CallScanner(found[0], self._dead, self._offset + self._pos)
            self._mode = self._call
        else:
            self._words(found[0])
        return True

    def _meet(self, marker: str) -> None:
        behind_call = self._fresh and self._edge == "call"
        if marker in _THOUGHT_OPENS:
            if not self._thinking:
                self._leave_text()
                self._thinking, self._fresh = True, True
            self._mode = self._line_break if marker == "<think>" else self._label
        elif marker in _THOUGHT_CLOSES:
            if self._thinking:
                self._close_thought()
        elif marker in _ENDS:
            if marker != "<|tool_response>" or not behind_call:
                self._held.append(marker)
                self._held_end = True
        elif not behind_call:
            self._words(marker)

    def _call(self) -> bool:
        scanner, end = self._scanner, self._offset + len(self._text)
        assert scanner is not None  # this mode begins with one
        self._text, self._pos = scanner.feed(self._text, self._pos, self._final)
        self._offset = end - len(self._text)
        if scanner.open:
            return False
        over = self._final and self._pos == len(self._text)
        self._mode = self._surplus if scanner.done else self._prose
        if self._thinking and (scanner.done or (scanner.explicit and (scanner.name or over))):
            self._close_thought()
        if scanner.done:
            self._leave_text()
            self._announce(scanner)
        else:
            self._words(_without_end(scanner.raw) if over else scanner.raw)
        return True

    def _surplus(self) -> bool:
        """Behind a call: its closing marker, and brackets too many before that."""
        surplus = _SURPLUS.match(self._text, self._pos)
        end = surplus.end() if surplus else self._pos
        if self._cut(end):
            return False
        found = _MARKER.match(self._text, end)
        if found and found[0] in _CALL_CLOSES:
            self._pos = found.end()
        self._mode = self._prose
        return True

    def _cut(self, pos: int) -> bool:
        """Whether the text at `pos` could become a marker with more text."""
        rest = self._text[pos : pos + _LONGEST]
        return not self._final and len(rest) < _LONGEST and any(marker.startswith(rest) for marker in _MARKERS)

    # What was read

    def _words(self, text: str) -> None:
        """Text of the current part; blanks at its end wait for what follows."""
        body = text.rstrip()
        if body:
            self._say(body)
            self._fresh = False
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def _say(self, text: str) -> None:
        """Gives out what is held, then `text`."""
        text = "".join([*self._held, text])
        self._held, self._held_end = [], False
        if not text:
            return
        if self._thinking:
            text, self._break = self._break + text, ""
        if self._run and self._run_thinks != self._thinking:
            self._end_run()
        self._run_thinks = self._thinking
        self._run.append(text)
        self._said[self._thinking].append(text)

    def _end_run(self) -> None:
        if self._run:
            self._events.append((ReasoningDelta if self._run_thinks else ContentDelta)("".join(self._run)))
        self._run = []

    def _taken(self) -> list[Event]:
        self._end_run()
        events, self._events = self._events, []
        return events

    def _leave_text(self) -> None:
        """A thought or a call ends a stretch of content."""
        if self._fresh:
            self._held, self._held_end = [], False
        self._say("")

    def _close_thought(self) -> None:
        blank = "".join(self._held)
        self._held = [] if self._fresh else [blank.removesuffix("\n")]
        self._say("")
        if not self._fresh and blank.endswith("\n"):
            self._break = "\n"
        self._thinking, self._fresh, self._edge = False, True, "thought"

    def _announce(self, scanner: CallScanner) -> None:
        index, name = len(self._calls), scanner.name
        arguments = typed(scanner.arguments, self._schemas.get(name, {}))
        text = _JSON(arguments)
        digest = hashlib.blake2s(f"{index} {name} {text}".encode(errors="replace"), digest_size=8).hexdigest()
        self._calls.append(ToolCall(f"call_{digest}", name, arguments))
        self._end_run()
        self._events += [CallBegin(index, self._calls[-1].id, name), ArgumentsDelta(index, text), CallEnd(index)]
        self._fresh, self._edge = True, "call"


def _without_end(text: str) -> str:
    """`text` without the end markers at its end."""
    while (shorter := text.rstrip()).endswith(_ENDS):
        text = next(shorter.removesuffix(marker) for marker in _ENDS if shorter.endswith(marker)).rstrip()
    return text
