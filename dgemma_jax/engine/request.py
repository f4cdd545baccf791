"""One prompt on its way through the engine: what was asked for, and the answer as it grows."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dgemma_jax.events import Canvas, Completion
from dgemma_jax.images.placement import Placed
from dgemma_jax.sampling import Resolved
from dgemma_jax.text.tokenizer import Tokenizer
from dgemma_jax.text.turn import Turn, TurnReader

Top = list[tuple[int, float]]  # the likeliest ids at a place and their log-probabilities


@dataclass(frozen=True)
class Request:
    """A checked prompt with nothing left open: ids, a Sampling without unset fields, its seed, and its token budget.

    copy: which of the n answers to the prompt this one is. turn: of a conversation, whose stop strings end the content
    and not the thoughts or calls before it; None: they end the text as it comes. images: in the order of their places.
    """

    ids: tuple[int, ...]
    sampling: Resolved
    seed: int
    budget: int
    copy: int = 0
    turn: Turn | None = None
    images: tuple[Placed, ...] = ()


class Text:
    """The text of an answer as it grows. What is there is not decoded again, so a long answer holds nobody up."""

    def __init__(self, tokenizer: Tokenizer):
        self.raw = ""
        self._tokenizer, self._decoder = tokenizer, tokenizer.decoder()
        self._open: list[int] = []  # ids whose text is not certain yet
        self._whole = 0  # ids before those
        self._ends, self._counts = [0], [0]  # places in raw between two ids, and how many ids lie before each

    def feed(self, ids: Sequence[int], last: bool) -> None:
        """Add the ids of a canvas. last: no other follows."""
        for id in ids:
            self._open.append(id)
            self._add(self._decoder.feed([id]))
        if last:
            self._add(self._decoder.finish())

    def _add(self, piece: str) -> None:
        """The text of the open ids that it makes certain; a place inside a character is none between two ids."""
        done = len(self._open) - self._decoder.held
        for n in range(1, done + 1):
            begun = piece if n == done else self._tokenizer.decode(self._open[:n])
            if piece.startswith(begun):
                self._ends.append(len(self.raw) + len(begun))
                self._counts.append(self._whole + n)
        self.raw += piece
        self._whole += done
        del self._open[:done]

    def before(self, at: int) -> tuple[int, int]:
        """How many ids make text that ends at or before place `at` of raw, and where it ends."""
        index = bisect_right(self._ends, at) - 1
        return self._counts[index], self._ends[index]


@dataclass
class Answer:
    """The tokens of a request so far; `take` cuts each canvas where the answer ends."""

    request: Request
    tokenizer: Tokenizer | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Top] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "cancelled"] | None = None
    stop_id: int | None = None
    stop: str | None = None
    cached_tokens: int = 0  # of the prompt, that were not encoded again
    told: int = 0  # tokens that are sure to stay, and were told
    tail: str = ""  # text before a stop string that belongs to no whole token
    text: Text | None = None  # with stop strings, but of a turn:
    reader: TurnReader | None = None

    def __post_init__(self) -> None:
        strings, turn = self.request.sampling.stop, self.request.turn
        if strings:
            assert self.tokenizer is not None  # they are refused without one
            self.text = Text(self.tokenizer) if turn is None else None
            self.reader = TurnReader(self.tokenizer, turn, strings) if turn is not None else None

    def take(
        self, canvas: Sequence[int], logprobs: Sequence[float], steps: int, top_logprobs: Sequence[Top] = ()
    ) -> Canvas:
        """Add a finished canvas, up to the first stop id, stop string or the budget, whichever comes first.

        Tells the tokens that are new, but for those at the end that may turn out to begin a stop string.
        """
        self.steps.append(steps)
        stops = self.request.sampling.stop_token_ids
        room = self.request.budget - len(self.tokens)
        end = next((i for i, id in enumerate(canvas[:room]) if id in stops), None)
        if end is not None:
            self.finish_reason, self.stop_id = "stop", canvas[end]
        elif len(canvas) >= room:
            self.finish_reason = "length"
        kept = room if end is None else end
        self.tokens += canvas[:kept]
        self.logprobs += logprobs[:kept]
        self.top_logprobs += top_logprobs[:kept]
        sure = self._look_for_stop_strings(canvas[:kept])
        new, self.told = self.tokens[self.told : sure], sure
        return Canvas(tokens=new, steps=steps)

    def _look_for_stop_strings(self, new: Sequence[int]) -> int:
        """Ends the answer at the first stop string; returns how many tokens are sure to stay."""
        last = self.finish_reason is not None
        if self.reader is not None:
            self._look_in_content(self.reader, new, last)
        if self.text is None:
            return len(self.tokens)
        self.text.feed(new, last)
        raw, strings = self.text.raw, self.request.sampling.stop
        hits = [(at + len(string), at, string) for string in strings if (at := raw.find(string)) >= 0]
        if hits:  # what is complete first, wherever canvases end
            _, at, self.stop = min(hits)
            self.finish_reason, self.stop_id = "stop", None
            self._cut(self.text, at)
        elif not last:
            begun = max(n for s in strings for n in range(min(len(s), len(raw) + 1)) if raw.endswith(s[:n]))
            return self.text.before(len(raw) - begun)[0]
        return len(self.tokens)

    def _look_in_content(self, reader: TurnReader, new: Sequence[int], last: bool) -> None:
        """Of a turn of a conversation, whose tokens all stay: its reader finds the end of the content in them."""
        reader.feed(new)
        if last:
            reader.finish()
        if reader.stopped is not None:
            self.finish_reason, self.stop_id, self.stop = "stop", None, reader.stopped

    def _cut(self, text: Text, at: int) -> None:
        kept, end = text.before(at)
        for found in (self.tokens, self.logprobs, self.top_logprobs):
            del found[kept:]
        self.tail = text.raw[end:at]

    def completion(self) -> Completion:
        """The finished answer."""
        text, raw = self._texts()
        assert self.finish_reason is not None
        return Completion(
            text=text,
            raw_text=raw,
            tokens=list(self.tokens),
            finish_reason=self.finish_reason,
            stop_id=self.stop_id,
            steps=list(self.steps),
            tokens_per_step=len(self.tokens) / max(1, sum(self.steps)),
            logprobs=list(self.logprobs) if self.request.sampling.logprobs else None,
            seed=self.request.seed,
            prompt_tokens=len(self.request.ids),
            stop=self.stop,
            cached_tokens=self.cached_tokens,
            top_logprobs=list(self.top_logprobs) if self.request.sampling.top_logprobs else None,
        )

    def _texts(self) -> tuple[str, str]:
        if self.tokenizer is None:
            return "", ""
        text = self.tokenizer.decode(self.tokens, skip_special=True)
        return text + self.tail, self.tokenizer.decode(self.tokens) + self.tail
