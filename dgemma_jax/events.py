"""What comes back from generation: the finished Completion, and the events of a stream in the order they happen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from dgemma_jax.text.response import ToolCall


@dataclass(frozen=True)
class Completion:
    """One finished answer.

    text: decoded without special tokens; raw_text: with them (both empty for a model without tokenizer).
    tokens: the new ids, without the stop id, which is in stop_id (None if no id stopped the text).
    finish_reason: "stop" for a stop id or string, "length" at max_new_tokens or the end of the context, "cancelled".
    steps: denoising steps of each canvas; tokens_per_step: len(tokens) / sum(steps).
    logprobs: log-probability (nats) of each token, None if not asked for. seed: repeats this answer.
    top_logprobs: for each token the (id, log-probability) pairs that were likeliest there, None if not asked for.
    prompt_tokens: length of the prompt; cached_tokens: how many of them were encoded by an earlier request.
    stop: the stop string that ended the answer, None if none did. It is cut off, with what stands behind it; but of a
        conversation it ends the content alone, which `Model.message` takes out of the whole of the last canvas.
    """

    text: str
    raw_text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length", "cancelled"]
    stop_id: int | None
    steps: list[int]
    tokens_per_step: float
    logprobs: list[float] | None
    seed: int
    prompt_tokens: int
    stop: str | None
    cached_tokens: int = 0
    top_logprobs: list[list[tuple[int, float]]] | None = None


@dataclass(frozen=True)
class Draft:
    """The best guess at the whole canvas after denoising step `step`, counted from 1 in each canvas.

    tokens: an id per position, also behind the end of the answer. accepted: positions whose proposal this step kept;
    the others were drawn anew. entropies: of each position, in nats; a pinned position has none.
    """

    tokens: list[int]
    step: int
    accepted: list[bool]
    entropies: list[float]

    @property
    def entropy(self) -> float:
        """The mean of the canvas, which the confidence threshold is compared with."""
        return sum(self.entropies) / len(self.entropies)


@dataclass(frozen=True)
class Canvas:
    """A canvas is done after `steps` steps; `tokens` is what it adds to the answer, cut at a stop or at the length.

    Tokens that may begin a stop string are held back for the next Canvas.
    """

    tokens: list[int]
    steps: int


@dataclass(frozen=True)
class Timings:
    """Seconds of a request: waiting for a slot, encoding its prompt, denoising (and encoding its canvases)."""

    waiting: float
    encoding: float = 0.0
    denoising: float = 0.0


@dataclass(frozen=True)
class Finished:
    """The last event of a stream, with the whole completion, and timings: what its time went to."""

    completion: Completion
    timings: Timings | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Failed:
    """Instead of Finished, of a request that ended in an error of its own while others go on; see `Model.serve`."""

    error: Exception


@dataclass(frozen=True)
class Usage:
    """What an answer took.

    prompt_tokens: of the prompt; cached_tokens: those of them that an earlier request had encoded. completion_tokens:
    generated, the stop id included. canvases, and denoising_steps over all of them.
    """

    prompt_tokens: int
    completion_tokens: int
    canvases: int
    denoising_steps: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class ChatMessage:
    """The model's turn of a conversation, taken apart.

    content: what is for the user. tool_calls: with arguments as plain data. usage: what the turn took. reasoning: what
    stood in the thought channel. finish_reason: "tool_calls" if the turn ends with calls, else that of the completion.
    """

    content: str
    reasoning: str
    tool_calls: list[ToolCall]
    finish_reason: Literal["tool_calls", "stop", "length", "cancelled"]
    usage: Usage

    def as_message(self) -> dict[str, Any]:
        """The turn in OpenAI's message format, to be appended to the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message
