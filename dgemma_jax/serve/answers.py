"""The answers to one request: how each is run, and what its client is told while it comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from dgemma_jax.engine.request import Request
from dgemma_jax.events import Canvas, Completion, Draft, Finished
from dgemma_jax.serve import responses
from dgemma_jax.serve.errors import APIError
from dgemma_jax.serve.images import ImageRules
from dgemma_jax.serve.protocol import ChatRequest, CompletionRequest, NamedChoice
from dgemma_jax.serve.reading import ChatReader, Reader, TextReader
from dgemma_jax.serve.tool_choice import CALL, FirstCall
from dgemma_jax.text import CallBegin, Event, Tokenizer

if TYPE_CHECKING:
    from dgemma_jax.engine.engine import Engine

MOST_REPORTED = 1 << 21  # log-probabilities in a response: a gigabyte while it is written
Run = Callable[[], AsyncGenerator[Draft | Canvas | Finished]]


@dataclass
class Answer:
    """One choice of a response. prompt: which of the request's it answers. run: starts it. called: it told a call."""

    index: int
    prompt: int
    run: Run
    reader: Reader
    called: bool = False
    completion: Completion | None = None

    async def events(self) -> AsyncIterator[tuple[Draft | Canvas | Finished, list[Event]]]:
        """What the engine says, and what that means for the client; the completion is there at the end.

        APIError 503 if the answer was cancelled, which only the end of the server does.
        """
        async with aclosing(self.run()) as events:
            async for event in events:
                told: list[Event] = []
                if isinstance(event, Canvas):
                    told = self.reader.feed(event.tokens)
                elif isinstance(event, Finished):
                    if event.completion.finish_reason == "cancelled":
                        raise APIError(503, "the server is shutting down; the answer was cancelled")
                    self.completion, told = event.completion, self.reader.finish(event.completion)
                self.called = self.called or any(isinstance(one, CallBegin) for one in told)
                yield event, told

    @property
    def done(self) -> Completion:
        """The completion of the finished answer."""
        assert self.completion is not None, "asked for before the end of the events"
        return self.completion

    @property
    def finish_reason(self) -> responses.FinishReason:
        """Of the finished answer."""
        if self.done.finish_reason == "stop":
            return "tool_calls" if self.called else "stop"
        return "length"


def chat_answers(engine: Engine, body: ChatRequest, images: ImageRules) -> list[Answer]:
    """The answers to a conversation, not yet begun. ValueError for what cannot be answered."""
    model, choice, functions = engine.model, body.tool_choice, body.functions()
    names = [tool["function"]["name"] for tool in functions]
    if isinstance(choice, NamedChoice):
        if choice.function.name not in names:
            raise ValueError(
                f"tool_choice names {choice.function.name!r:.80}; expected one of the tools: {names!r:.200}"
            )
        names = [choice.function.name]
    elif choice == "required" and not names:
        raise ValueError("tool_choice is 'required'; expected tools to choose from")
    tools = functions if functions and choice != "none" else None
    sampling = body.sampling()
    tokenizer = model.required_tokenizer
    if choice == "none" and CALL in tokenizer.special_ids:
        sampling = replace(sampling, suppress=(*model.defaults.suppress, tokenizer.special_ids[CALL]))
    messages = images.apply(body.conversation(), model.config)
    request = model.request(messages, sampling, body.seed, tools, body.thinking)
    assert request.turn is not None  # messages make one
    turn = request.turn._replace(calls=tools is not None)
    request = replace(request, turn=turn)
    drafts = 1 if body.stream_drafts else None
    forced = tuple(names) if choice == "required" or isinstance(choice, NamedChoice) else ()

    def run(request: Request) -> Run:
        if forced or (tools and body.parallel_tool_calls is False):
            return FirstCall(engine, request, forced, body.thinking, drafts).events
        return lambda: _free(engine, request, drafts)

    stop = request.sampling.stop
    copies = [replace(request, copy=copy) for copy in range(body.n or 1)]
    _check_report(copies)
    return [Answer(i, 0, run(copy), ChatReader(tokenizer, turn, stop)) for i, copy in enumerate(copies)]


def text_answers(engine: Engine, body: CompletionRequest) -> list[Answer]:
    """The answers to plain prompts, those to one prompt side by side. ValueError for what cannot be answered."""
    sampling, tokenizer = body.sampling(), engine.model.required_tokenizer
    requests = [engine.model.request(prompt, sampling, body.seed) for prompt in body.prompts()]
    copies = [(n, replace(request, copy=copy)) for n, request in enumerate(requests) for copy in range(body.n or 1)]
    _check_report([copy for _, copy in copies])
    return [
        Answer(index, prompt, lambda copy=copy: _free(engine, copy, None), TextReader(tokenizer))
        for index, (prompt, copy) in enumerate(copies)
    ]


def _check_report(requests: Sequence[Request]) -> None:
    """ValueError for log-probabilities that would be too many for one response."""
    if not requests[0].sampling.logprobs:
        return
    tokens, each = sum(request.budget for request in requests), 1 + (requests[0].sampling.top_logprobs or 0)
    if tokens * each > MOST_REPORTED:
        raise ValueError(
            f"max_tokens leaves {tokens:,} tokens with {each} log-probabilities each; expected at most"
            f" {MOST_REPORTED // each:,} tokens, of all answers together, or fewer log-probabilities"
        )


async def _free(engine: Engine, request: Request, drafts: int | None) -> AsyncGenerator[Draft | Canvas | Finished]:
    handle = engine.submit_request(request, drafts)
    try:
        async for event in handle.once():
            yield event
    finally:
        handle.cancel()


def usage(answers: Sequence[Answer], reasoning_tokens: int) -> responses.Usage:
    """Of finished answers; a prompt with several answers counts once."""
    completions = [answer.done for answer in answers]
    prompts = {answer.prompt: answer.done for answer in answers}.values()
    prompt_tokens = sum(completion.prompt_tokens for completion in prompts)
    tokens = sum(len(completion.tokens) + (completion.stop_id is not None) for completion in completions)
    steps = sum(sum(completion.steps) for completion in completions)
    return responses.Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=tokens,
        total_tokens=prompt_tokens + tokens,
        prompt_tokens_details=responses.PromptDetails(cached_tokens=sum(c.cached_tokens for c in prompts)),
        completion_tokens_details=responses.CompletionDetails(reasoning_tokens=min(reasoning_tokens, tokens)),
        diffusion=responses.Diffusion(
            canvases=sum(len(completion.steps) for completion in completions),
            denoising_steps=steps,
            tokens_per_step=tokens / max(1, steps),
        ),
    )


class TokenTexts:
    """The text of single tokens, control tokens by their name."""

    def __init__(self, tokenizer: Tokenizer):
        self.of = lru_cache(maxsize=1 << 16)(lambda id: tokenizer.decode([id]))

    def all(self, ids: Sequence[int]) -> list[str]:
        """Those of a canvas."""
        return [self.of(id) for id in ids]
