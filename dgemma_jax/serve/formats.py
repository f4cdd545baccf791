"""What an answer looks like on the wire: as a whole and in chunks, of a chat and of a plain completion."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from dgemma_jax.serve import responses
from dgemma_jax.serve.answers import Answer, TokenTexts, usage
from dgemma_jax.text import CallBegin, ContentDelta, Event, ReasoningDelta, Tokenizer
from dgemma_jax.text.response import ArgumentsDelta

LOWEST_LOGPROB = -9999.0  # minus infinity, which JSON does not have


class Format(ABC):
    """One response. model: the name it is served under."""

    prefix = ""

    def __init__(self, tokenizer: Tokenizer, texts: TokenTexts, model: str):
        self.tokenizer, self.texts = tokenizer, texts
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._reasoning: list[str] = []

    def hear(self, events: Sequence[Event]) -> None:
        """Notes what counts as reasoning."""
        self._reasoning += [event.text for event in events if isinstance(event, ReasoningDelta)]

    def usage(self, answers: Sequence[Answer]) -> responses.Usage:
        """Of all answers, once they are finished."""
        return usage(answers, len(self.tokenizer.encode("".join(self._reasoning), control=False)))

    @abstractmethod
    def chunks(self, answer: Answer, events: Sequence[Event]) -> list[BaseModel]:
        """What is new of an answer, for a stream."""

    @abstractmethod
    def last(self, answer: Answer) -> list[BaseModel]:
        """What ends an answer in a stream; its log-probabilities come here, because they are only then."""

    @abstractmethod
    def last_of_all(self, total: responses.Usage) -> BaseModel:
        """The chunk with the usage."""

    @abstractmethod
    def whole(self, answers: Sequence[Answer], events: Sequence[Sequence[Event]]) -> BaseModel:
        """The response in one piece."""


class ChatFormat(Format):
    prefix = "chatcmpl"

    def __init__(self, tokenizer: Tokenizer, texts: TokenTexts, model: str):
        super().__init__(tokenizer, texts, model)
        self._spoke: set[int] = set()

    def chunks(self, answer: Answer, events: Sequence[Event]) -> list[BaseModel]:
        deltas = [delta for event in events if (delta := _delta(event)) is not None]
        if deltas and answer.index not in self._spoke:
            self._spoke.add(answer.index)  # the first chunk of an answer gives the role
            deltas.insert(0, responses.ChatDelta(role="assistant", content=""))
        return [self._chunk(answer, delta) for delta in deltas]

    def last(self, answer: Answer) -> list[BaseModel]:
        first = [] if answer.index in self._spoke else [responses.ChatDelta(role="assistant", content="")]
        end = {"logprobs": self._logprobs(answer), "finish_reason": answer.finish_reason}
        return [*(self._chunk(answer, delta) for delta in first), self._chunk(answer, responses.ChatDelta(), **end)]

    def last_of_all(self, total: responses.Usage) -> BaseModel:
        return responses.ChatChunk(**self.head, choices=[], usage=total)

    def whole(self, answers: Sequence[Answer], events: Sequence[Sequence[Event]]) -> BaseModel:
        choices = [
            responses.ChatChoice(
                index=answer.index,
                message=_message(told),
                logprobs=self._logprobs(answer),
                finish_reason=answer.finish_reason,
            )
            for answer, told in zip(answers, events, strict=True)
        ]
        return responses.ChatCompletion(**self.head, choices=choices, usage=self.usage(answers))

    def _chunk(self, answer: Answer, delta: responses.ChatDelta, **end: Any) -> BaseModel:
        choice = responses.ChatChunkChoice(index=answer.index, delta=delta, **end)
        return responses.ChatChunk(**self.head, choices=[choice])

    def _logprobs(self, answer: Answer) -> responses.ChatLogprobs | None:
        done = answer.done
        if done.logprobs is None:
            return None
        tops = done.top_logprobs or [[]] * len(done.tokens)
        return responses.ChatLogprobs(
            content=[
                responses.TokenLogprob(
                    **self._token(id, value), top_logprobs=[responses.TopLogprob(**self._token(*pair)) for pair in top]
                )
                for id, value, top in zip(done.tokens, done.logprobs, tops, strict=True)
            ]
        )

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        text = self.texts.of(id)
        spelled = None if "\ufffd" in text else list(text.encode())  # a byte of a character has no text of its own
        return {"token": text, "logprob": max(LOWEST_LOGPROB, logprob), "bytes": spelled}


class TextFormat(Format):
    prefix = "cmpl"

    def chunks(self, answer: Answer, events: Sequence[Event]) -> list[BaseModel]:
        text = _content(events)
        return [self._completion([responses.TextChoice(index=answer.index, text=text)])] if text else []

    def last(self, answer: Answer) -> list[BaseModel]:
        end = {"logprobs": self._logprobs(answer), "finish_reason": answer.finish_reason}
        return [self._completion([responses.TextChoice(index=answer.index, text="", **end)])]

    def last_of_all(self, total: responses.Usage) -> BaseModel:
        return self._completion([], total)

    def whole(self, answers: Sequence[Answer], events: Sequence[Sequence[Event]]) -> BaseModel:
        choices = [
            responses.TextChoice(
                index=answer.index,
                text=_content(told),
                logprobs=self._logprobs(answer),
                finish_reason=answer.finish_reason,
            )
            for answer, told in zip(answers, events, strict=True)
        ]
        return self._completion(choices, self.usage(answers))

    def _completion(self, choices: list[responses.TextChoice], total: responses.Usage | None = None) -> BaseModel:
        return responses.TextCompletion(**self.head, choices=choices, usage=total)

    def _logprobs(self, answer: Answer) -> responses.TextLogprobs | None:
        done = answer.done
        if done.logprobs is None:
            return None
        texts, offsets, at = self.texts.all(done.tokens), [], 0
        for text in texts:
            offsets.append(at)
            at += len(text)
        tops = [
            {self.texts.of(id): max(LOWEST_LOGPROB, value) for id, value in top}
            for top in done.top_logprobs or [[]] * len(texts)
        ]
        values = [max(LOWEST_LOGPROB, value) for value in done.logprobs]
        return responses.TextLogprobs(tokens=texts, token_logprobs=values, top_logprobs=tops, text_offset=offsets)


def _delta(event: Event) -> responses.ChatDelta | None:
    match event:
        case ContentDelta(text):
            return responses.ChatDelta(content=text)
        case ReasoningDelta(text):
            return responses.ChatDelta(reasoning_content=text, reasoning=text)
        case CallBegin(index, id, name):
            function = responses.Function(name=name, arguments="")
            call = responses.CallDelta(index=index, id=id, type="function", function=function)
            return responses.ChatDelta(tool_calls=[call])
        case ArgumentsDelta(index, text):
            return responses.ChatDelta(
                tool_calls=[responses.CallDelta(index=index, function=responses.Function(arguments=text))]
            )
    return None


def _content(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


def _message(events: Sequence[Event]) -> responses.ChatMessage:
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta)) or None
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ArgumentsDelta):
            arguments[event.index] = arguments.get(event.index, "") + event.text
    calls = [
        responses.Call(id=event.id, function=responses.Function(name=event.name, arguments=arguments[event.index]))
        for event in events
        if isinstance(event, CallBegin)
    ]
    return responses.ChatMessage(
        content=_content(events), reasoning_content=reasoning, reasoning=reasoning, tool_calls=calls or None
    )
