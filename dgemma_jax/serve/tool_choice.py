"""Calls that must come: the opening of a call is pinned on the canvas, so that the model can only go on from it.

With thinking off it stands at the beginning of the answer. With thinking on, canvases run free until one closes the
thought; then that canvas runs again with everything up to there and the opening behind it pinned. A thought that is not
closed within half of the longest answer is cut and closed there. The answer ends behind its first call.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dgemma_jax.engine.request import Request
from dgemma_jax.events import Canvas, Completion, Draft, Finished
from dgemma_jax.sampling import MOST_LOGPROBS
from dgemma_jax.text import CallEnd, ResponseStream, Tokenizer, parse_response
from dgemma_jax.text.segments import Segments
from dgemma_jax.text.turn import Turn

if TYPE_CHECKING:
    from dgemma_jax.engine.engine import Engine

CALL, CALL_CLOSE, THOUGHT_CLOSE = "<|tool_call>", "<tool_call|>", "<channel|>"
_NAME = re.compile(r"\s*([\w.-]+)\s*[{(]")


class FirstCall:
    """The events of an answer that ends behind its first call.

    names: the functions of which one must be called; none: the model is free to call or not. thinking: it may think
    before. drafts: steps between two Draft events. ValueError if the answer has no room for the opening of a call.
    """

    def __init__(self, engine: Engine, request: Request, names: Sequence[str], thinking: bool, drafts: int | None):
        self.engine, self.request, self.drafts = engine, request, drafts
        self.names, self.thinking = names, thinking and bool(names)
        assert request.turn is not None  # only conversations have tools
        self.turn, self.tokenizer = request.turn, engine.model.required_tokenizer
        self.tokens: list[int] = []  # told
        self.complete = False  # they end with a call
        self.passes: list[_Pass] = []
        most = max((len(self._opening(name)) for name in names), default=0) + 1 + 2 * self.thinking
        if request.budget < most:
            raise ValueError(f"max_tokens leaves {request.budget} tokens; expected at least {most}, to open a call")
        self.thought_budget = min(request.budget // 2, request.budget - most + 1)

    async def events(self) -> AsyncGenerator[Draft | Canvas | Finished]:
        """Drafts and canvases of every pass, then Finished. A canvas that is run again tells only what stays of it."""
        try:
            if self.thinking:
                async for event in self._think():
                    yield event
            name = self.names[0] if len(self.names) == 1 else None
            async for event in self._call(name):
                yield event
            yield Finished(await self._completion())
        finally:
            for one in self.passes:
                one.handle.cancel()

    async def _think(self) -> AsyncIterator[Draft | Canvas]:
        """Runs free until the thought is closed, or a call begins in it, or its budget is used up."""
        ends = (self.tokenizer.token_id(THOUGHT_CLOSE), self.tokenizer.token_id(CALL))
        thought = self._begin([], budget=self.thought_budget)
        async for event in thought.events():
            if isinstance(event, Canvas):
                at = next((i for i, id in enumerate(thought.tokens) if id in ends), None)
                kept = thought.tokens if at is None else thought.tokens[: at + (thought.tokens[at] == ends[0])]
                event = self._tell(kept, event.steps)
                if at is not None:
                    thought.handle.cancel()  # the call needs a slot
                    yield event
                    break
            yield event

    async def _call(self, name: str | None) -> AsyncIterator[Draft | Canvas]:
        """Runs with the opening pinned until the call is complete; once more if it is none of the declared names."""
        kept = [*self.tokens, *self._closing()]
        known = [*kept, *(self._opening(name) if self.names else ())]
        call, end = self._begin(known), CallFinder(self.tokenizer, self.turn)
        async for event in call.events():
            if isinstance(event, Canvas):
                if self.names and name is None:
                    name = self._named(call.tokens[len(known) :])
                    if name is None:
                        yield Canvas([], event.steps)
                        break
                at = end.find(call.tokens)
                event = self._tell(call.tokens[:at], event.steps)
                if at is not None:
                    self.complete = True
                    yield event
                    return
            yield event
        if self.names and name is None:
            async for event in self._call_best(call, known):
                yield event
        elif self.names and (await call.result()).finish_reason == "stop":
            closed = [*call.tokens, self.tokenizer.token_id(CALL_CLOSE)]  # the turn ended inside the call
            text = self.tokenizer.decode(closed)
            self.complete = bool(parse_response(text, self.turn.tools, self.turn.in_thought).tool_calls)
            yield self._tell(closed if self.complete else call.tokens, 0)

    async def _call_best(self, call: _Pass, known: Sequence[int]) -> AsyncIterator[Draft | Canvas]:
        """The canvas again, with the declared name pinned that scores best in its place."""
        top = ((await call.result()).top_logprobs or [])[len(known) - call.begin :]
        async for event in self._call(max(self.names, key=lambda name: self._score(name, top))):
            yield event

    def _score(self, name: str, top: Sequence[Sequence[tuple[int, float]]]) -> float:
        """Mean log-probability of a name's tokens; one that is not among a place's likeliest counts as the last."""
        ids = self.tokenizer.encode(f"{name}{{", control=False)
        found = [dict(place).get(id, place[-1][1]) for id, place in zip(ids, top, strict=False)]
        return sum(found) / max(1, len(found))

    def _named(self, tokens: Sequence[int]) -> str | None:
        """The declared name that stands behind the opening, None if there is none."""
        found = _NAME.match(self.tokenizer.decode(tokens))
        return found[1] if found and found[1] in self.names else None

    def _closing(self) -> list[int]:
        close = self.tokenizer.token_id(THOUGHT_CLOSE) if self.thinking else -1
        return [close] if self.thinking and self.tokens[-1:] != [close] else []

    def _opening(self, name: str | None) -> list[int]:
        opening = Segments().control(CALL).text("call:" if name is None else f"call:{name}{{")
        return opening.encode(self.tokenizer)

    def _begin(self, known: Sequence[int], budget: int | None = None) -> _Pass:
        self.passes.append(_Pass(self, known, len(self.passes), self.request.budget if budget is None else budget))
        return self.passes[-1]

    def _tell(self, tokens: Sequence[int], steps: int) -> Canvas:
        new = list(tokens[len(self.tokens) :])
        self.tokens += new
        return Canvas(new, steps)

    async def _completion(self) -> Completion:
        """What the passes make together."""
        last = await self.passes[-1].result()
        logprobs, top = [], []
        for one in self.passes:
            completion = await one.result()
            pinned = (
                one.known - one.begin
            )  # what was kept has the figures of the pass that drew it, what was forced none
            logprobs = _placed(logprobs[: one.kept], one.known, (completion.logprobs or [])[pinned:], 0.0)
            top = _placed(top[: one.kept], one.known, (completion.top_logprobs or [])[pinned:], [])
        count, sampling = len(self.tokens), self.request.sampling
        steps = [steps for one in self.passes for steps in one.steps]
        return replace(
            last,
            text=self.tokenizer.decode(self.tokens, skip_special=True),
            raw_text=self.tokenizer.decode(self.tokens),
            tokens=list(self.tokens),
            **({"finish_reason": "stop", "stop_id": None, "stop": None} if self.complete else {}),
            steps=steps,
            tokens_per_step=count / max(1, sum(steps)),
            seed=self.request.seed,
            prompt_tokens=len(self.request.ids),
            cached_tokens=(await self.passes[0].result()).cached_tokens,
            logprobs=_placed(logprobs, count, [], 0.0) if sampling.logprobs else None,
            top_logprobs=[place[: sampling.top_logprobs] for place in _placed(top, count, [], [])]
            if sampling.top_logprobs
            else None,
        )


class _Pass:
    """One request to the engine. known: tokens of the answer that are fixed; full canvases of them go to the prompt,
    the rest is pinned on the first canvas.

    begin: the place in the answer where its canvases begin. kept, known: where what earlier passes drew ends, and where
    what is pinned ends. tokens: of the answer so far.
    """

    def __init__(self, answer: FirstCall, known: Sequence[int], number: int, budget: int):
        request, width = answer.request, answer.engine.model.config.canvas_length
        self.kept, self.known, self.begin = len(answer.tokens), len(known), len(known) // width * width
        self.tokens, self.steps = list(known[: self.begin]), []
        pinned = known[self.begin :]
        sampling = replace(request.sampling, canvas=pinned, pinned=[True] * len(pinned))
        if answer.names:  # such an answer has no content that a string could end
            most = MOST_LOGPROBS if len(answer.names) > 1 else sampling.top_logprobs
            sampling = replace(sampling, stop=(), top_logprobs=most)
        own = replace(
            request,
            ids=(*request.ids, *self.tokens),
            sampling=sampling,
            seed=request.seed if number == 0 else _seed(request.seed, number),
            budget=budget - self.begin,
        )
        self.handle = answer.engine.submit_request(own, answer.drafts)

    async def events(self) -> AsyncIterator[Draft | Canvas]:
        """All but the end."""
        async for event in self.handle.once():
            if isinstance(event, Canvas):
                self.tokens += event.tokens
                self.steps.append(event.steps)
            if not isinstance(event, Finished):
                yield event

    async def result(self) -> Completion:
        """What came out; a request that still runs is cancelled."""
        self.handle.cancel()
        return await self.handle


class CallFinder:
    """Finds the token that completes the first call of an answer."""

    def __init__(self, tokenizer: Tokenizer, turn: Turn):
        self._decoder, self._read = tokenizer.decoder(), 0
        self._stream = ResponseStream(turn.tools, turn.in_thought)

    def find(self, tokens: Sequence[int]) -> int | None:
        """How many of the answer's tokens reach the end of the first call; None if it is still to come.

        tokens: those of the last time, and more.
        """
        while self._read < len(tokens):
            text = self._decoder.feed([tokens[self._read]])
            self._read += 1
            if any(isinstance(event, CallEnd) for event in self._stream.feed(text)):
                return self._read
        return None


def _placed(values: list, begin: int, more: Sequence | None, missing: object) -> list:
    """The first `begin` values, `missing` where there are none, then `more`."""
    return [*values[:begin], *[missing] * (begin - len(values)), *(more or ())]


def _seed(seed: int, number: int) -> int:
    """Of a later pass: other draws than the first one's, and the same each time."""
    return int.from_bytes(hashlib.blake2s(f"{seed} {number}".encode(), digest_size=4).digest(), "big")
