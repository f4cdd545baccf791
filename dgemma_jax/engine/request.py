"""One prompt on its way through the engine: what was asked for, and the answer as it grows."""

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
    reader: TurnReader | None = None  # of a turn with stop strings

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
        sure = self._look_for_stop_strings() if self.request.sampling.stop else len(self.tokens)
        new, self.told = self.tokens[self.told : sure], sure
        return Canvas(tokens=new, steps=steps)

    def _look_for_stop_strings(self) -> int:
        """Ends the answer at the first stop string; returns how many tokens are sure to stay."""
        if self.request.turn is not None:
            return self._look_in_content()
        raw, strings = self._decoded(self.tokens), self.request.sampling.stop
        hits = [(at, string) for string in strings if (at := raw.find(string)) >= 0]
        if hits:
            at, self.stop = min(hits)
            self.finish_reason, self.stop_id = "stop", None
            self._cut(raw, at)
        elif self.finish_reason is None:
            begun = max(n for s in strings for n in range(len(s)) if raw.endswith(s[:n]))
            return self._wholly_before(raw, len(raw) - begun)
        return len(self.tokens)

    def _look_in_content(self) -> int:
        """Of a turn of a conversation, whose tokens all stay: its reader finds the end of the content in them."""
        if self.reader is None:
            assert self.tokenizer is not None and self.request.turn is not None
            self.reader = TurnReader(self.tokenizer, self.request.turn, self.request.sampling.stop)
        self.reader.feed(self.tokens[self.told :])
        if self.finish_reason is not None:
            self.reader.finish()
        if self.reader.stopped is not None:
            self.finish_reason, self.stop_id, self.stop = "stop", None, self.reader.stopped
        return len(self.tokens)

    def _cut(self, raw: str, at: int) -> None:
        kept = self._wholly_before(raw, at)
        for found in (self.tokens, self.logprobs, self.top_logprobs):
            del found[kept:]
        self.tail = raw[len(self._decoded(self.tokens)) : at]

    def _wholly_before(self, raw: str, at: int) -> int:
        """How many of the tokens make text that ends at or before place `at` of the whole text."""
        kept = len(self.tokens)
        while len(text := self._decoded(self.tokens[:kept])) > at or not raw.startswith(text):
            kept -= 1
        return kept

    def _decoded(self, tokens: Sequence[int]) -> str:
        assert self.tokenizer is not None  # stop strings are refused without one
        return self.tokenizer.decode(tokens)

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
