"""One prompt on its way through the engine: what was asked for, and the answer as it grows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dgemma_jax.events import Canvas, Completion
from dgemma_jax.sampling import Sampling
from dgemma_jax.text.response import ResponseStream
from dgemma_jax.text.tokenizer import Tokenizer

Top = list[tuple[int, float]]  # the likeliest ids at a place and their log-probabilities


class Turn(NamedTuple):
    """What it takes to read a model's turn of a conversation. in_thought: its prompt ends inside an open thought."""

    tools: Sequence[Mapping] | None
    in_thought: bool


@dataclass(frozen=True)
class Request:
    """A checked prompt with nothing left open: ids, a Sampling without unset fields, its seed, and its token budget.

    copy: which of the n answers to the prompt this one is. turn: of a conversation, whose stop strings end the content
    and not the thoughts or calls before it; None: they end the text as it comes.
    """

    ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    budget: int
    copy: int = 0
    turn: Turn | None = None


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
        sure = self._look_for_stop_strings()
        new, self.told = self.tokens[self.told : sure], sure
        return Canvas(tokens=new, steps=steps)

    def _look_for_stop_strings(self) -> int:
        """Ends the answer at the first stop string; returns how many tokens are sure to stay."""
        strings = self.request.sampling.stop
        if not strings:
            return len(self.tokens)
        raw, turn = self.tokenizer.decode(self.tokens), self.request.turn
        searched = raw if turn is None else self._content(raw)
        hits = [(at, string) for string in strings if (at := searched.find(string)) >= 0]
        if hits:
            at, self.stop = min(hits)
            self.finish_reason, self.stop_id = "stop", None
            if turn is None:
                self._cut(raw, at)
        elif self.finish_reason is None and turn is None:
            begun = max(n for s in strings for n in range(len(s)) if raw.endswith(s[:n]))
            return self._wholly_before(raw, len(raw) - begun)
        return len(self.tokens)

    def _content(self, raw: str) -> str:
        """The content so far. What may still turn out to be a call is none of it before the answer ends."""
        stream = ResponseStream(in_thought=self.request.turn.in_thought)
        stream.feed(raw)
        if self.finish_reason is not None:
            stream.finish()
        return stream.response.content

    def _cut(self, raw: str, at: int) -> None:
        kept = self._wholly_before(raw, at)
        for found in (self.tokens, self.logprobs, self.top_logprobs):
            del found[kept:]
        self.tail = raw[len(self.tokenizer.decode(self.tokens)) : at]

    def _wholly_before(self, raw: str, at: int) -> int:
        """How many of the tokens make text that ends at or before place `at` of the whole text."""
        kept = len(self.tokens)
        while len(text := self.tokenizer.decode(self.tokens[:kept])) > at or not raw.startswith(text):
            kept -= 1
        return kept

    def completion(self) -> Completion:
        """The finished answer."""
        text, raw = self._texts()
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
