"""One prompt on its way through the engine: what was asked for, and the answer as it grows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dgemma_jax.events import Canvas, Completion
from dgemma_jax.sampling import Sampling
from dgemma_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """A checked prompt with nothing left open: ids, a Sampling without unset fields, its seed, and its token budget.

    copy: which of the n answers to the prompt this one is.
    """

    ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    budget: int
    copy: int = 0


@dataclass
class Answer:
    """The tokens of a request so far; `take` cuts each canvas where the answer ends."""

    request: Request
    tokenizer: Tokenizer | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "cancelled"] | None = None
    stop_id: int | None = None
    tail: str = ""  # text before a stop string that belongs to no whole token

    def take(self, canvas: Sequence[int], logprobs: Sequence[float], steps: int) -> Canvas:
        """Add a finished canvas, up to the first stop id, stop string or the budget, whichever comes first."""
        before = len(self.tokens)
        self.steps.append(steps)
        stops = self.request.sampling.stop_token_ids
        room = self.request.budget - before
        end = next((i for i, id in enumerate(canvas[:room]) if id in stops), None)
        if end is not None:
            self.finish_reason, self.stop_id = "stop", canvas[end]
        elif len(canvas) >= room:
            self.finish_reason = "length"
        kept = room if end is None else end
        self.tokens += canvas[:kept]
        self.logprobs += logprobs[:kept]
        self._cut_at_stop_string()
        return Canvas(tokens=self.tokens[before:], steps=steps)

    def _cut_at_stop_string(self) -> None:
        """End the answer where the first stop string begins; the tokens end with the last one wholly before it."""
        strings = self.request.sampling.stop
        if not strings:
            return
        raw = self.tokenizer.decode(self.tokens)
        hits = [at for at in map(raw.find, strings) if at >= 0]
        if not hits:
            return
        kept = len(self.tokens)
        while len(text := self.tokenizer.decode(self.tokens[:kept])) > min(hits) or not raw.startswith(text):
            kept -= 1
        self.tokens, self.logprobs, self.tail = self.tokens[:kept], self.logprobs[:kept], raw[len(text) : min(hits)]
        self.finish_reason, self.stop_id = "stop", None

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
        )

    def _texts(self) -> tuple[str, str]:
        if self.tokenizer is None:
            return "", ""
        text = self.tokenizer.decode(self.tokens, skip_special=True)
        return text + self.tail, self.tokenizer.decode(self.tokens) + self.tail
