"""`dg.load` and the Model it returns: text in, text out."""

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from dgemma_jax.checkpoint import dtype_name, open_directory, read_checkpoint
from dgemma_jax.config import Config, is_int
from dgemma_jax.diffusion.policy import Policy
from dgemma_jax.engine.capacity import check_slots, context
from dgemma_jax.engine.programs import Programs
from dgemma_jax.engine.request import Request, Turn
from dgemma_jax.engine.scheduler import PREFILL_CHUNK, Event, Job, Scheduler, draft_interval
from dgemma_jax.events import Canvas, ChatMessage, Completion, Draft, Failed, Finished, Usage
from dgemma_jax.infilling import infill_canvas
from dgemma_jax.kernels import selection
from dgemma_jax.model.transformer import AUTO, Implementations, build
from dgemma_jax.sampling import UNSET, Sampling
from dgemma_jax.text import Tokenizer, encode_chat, opens_thought, parse_response, render_chat

logger = logging.getLogger(__name__)
LARGEST_SLOTS = 8  # chosen by itself
DEFAULT_POLICY = Policy()
NO_TOKENIZER = "this model has no tokenizer.json: pass token ids, or load with tokenizer=PATH"
Prompt = str | Sequence[int]
Name = TypeVar("Name")


def load(
    name: str | Path,
    dtype: str | None = None,
    max_model_len: int | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    attention_implementation: str = "auto",
) -> "Model":
    """Open a model: a directory in Hugging Face's layout, "tiny" (bundled), or a hub name in the local HF cache.

    dtype: "bfloat16", "float32" or "float16"; None keeps the weights as stored. max_model_len: longest prompt plus
    output in tokens; None is the config's context, lowered to what memory leaves. tokenizer: used instead of the
    checkpoint's. attention_implementation: "auto", "reference", "xla", "pallas" or "triton"; what auto takes depends on
    the device, see `dgemma_jax.kernels.selection`, and is logged. Raises ValueError with one line that says what is
    wrong and what to do, before weights are read where that can be known.
    """
    opened, dtype = open_directory(name), dtype_name(dtype)
    itemsize = np.dtype(dtype or opened.weights.dtype or opened.config.dtype).itemsize
    implementations, choice = _implementations(attention_implementation, opened.config, itemsize)
    config, params, tokenizer, defaults = read_checkpoint(opened, dtype, tokenizer)
    logger.info(choice)
    return Model(config, params, tokenizer, defaults, max_model_len, implementations)


def _implementations(attention: str, config: Config, itemsize: int) -> tuple[Implementations, str]:
    """What runs on this process' device, and that in words. itemsize: bytes of a number."""
    heads = {layer.kind: layer.head_dim for layer in config.layers}
    device = selection.this_device()
    found = Implementations(
        attention=selection.attention(attention, device, heads, itemsize), experts=selection.experts(device)
    )
    return found, f"{selection.describe(found.attention, device, heads, itemsize)}; experts: {found.experts}"


class Model:
    """A loaded model. config, params (plain nested dict of arrays), graph, tokenizer (None if it has none), defaults.

    params and graph go into the functional layer (`dg.encode`, `dg.denoise`, ...).
    """

    def __init__(
        self,
        config: Config,
        params: dict,
        tokenizer: Tokenizer | None,
        defaults: Sampling,
        max_model_len: int | None = None,
        implementations: Implementations = AUTO,
    ):
        self.config, self.params, self.tokenizer, self.defaults = config, params, tokenizer, defaults
        self.dtype = str(params["embedder"]["table"].dtype)
        self.graph, _ = build(config, self.dtype, implementations)
        self.implementations = implementations
        self.max_model_len = context(config, self.dtype, max_model_len)
        self._programs = Programs(self.graph, config)

    def variant(self, max_model_len: int, attention_implementation: str = "auto") -> "Model":
        """The same weights with another context or attention, see `load`; "auto" leaves the attention as it is."""
        other = copy(self)
        other.max_model_len = context(self.config, self.dtype, max_model_len)
        if attention_implementation != "auto":
            found, choice = _implementations(attention_implementation, self.config, np.dtype(self.dtype).itemsize)
            logger.info(choice)
            other.implementations = found
            other.graph, _ = build(self.config, self.dtype, found)
            other._programs = Programs(other.graph, self.config)
        return other

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        seed: int | None = None,
        policy: Policy | None = None,
        slots: int | None = None,
    ) -> list[Completion]:
        """Answer every prompt; the list has the prompts' order, the n answers to one prompt side by side.

        prompts: a string, strings, or lists of token ids. Strings are encoded with control tokens recognised and get
        one <bos> unless they have one; ids are used as they are. sampling: one for all, or one per prompt.
        seed: for requests without a seed of their own; None draws a fresh one per request, in Completion.seed.
        slots: rows denoised together; None takes the smallest power of two that holds the prompts, at most 8.
        A row's answer does not depend on the other rows.
        """
        found = {i: e.completion for i, e in self.events(prompts, sampling, seed, policy, slots) if type(e) is Finished}
        return [found[index] for index in range(len(found))]

    def events(
        self,
        prompts: str | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        seed: int | None = None,
        policy: Policy | None = None,
        slots: int | None = None,
    ) -> Iterator[tuple[int, Canvas | Finished]]:
        """`generate` as it happens: (index of the prompt, event), a Canvas per canvas and a Finished per prompt."""
        requests = self._requests(prompts, sampling, seed)
        return _raising(self.serve(enumerate(requests), _slots(slots, len(requests)), policy))

    def stream(
        self,
        prompt: Prompt | Sequence[Mapping],
        sampling: Sampling | None = None,
        seed: int | None = None,
        policy: Policy | None = None,
    ) -> Iterator[Draft | Canvas | Finished]:
        """One answer as it happens: a Draft after every step, a Canvas after every canvas, Finished at the end.

        prompt: text, token ids, or the messages of a conversation.
        """
        request = self.request(prompt, sampling, seed)
        return (event for _, event in _raising(self.serve([(None, request)], 1, policy, drafts=1)))

    def chat(
        self,
        messages: Sequence[Mapping],
        tools: Sequence[Mapping] | None = None,
        thinking: bool = False,
        sampling: Sampling | None = None,
        seed: int | None = None,
        policy: Policy | None = None,
    ) -> ChatMessage:
        """The model's next turn of a conversation in OpenAI's message format.

        tools: functions the model may call, in OpenAI's format. thinking: let it write a thought before the answer.
        Append `answer.as_message()`, then the tools' results, and call again. Control tokens typed in a message stay
        ordinary text.
        """
        request = self.request(messages, sampling, seed, tools, thinking)
        events = _raising(self.serve([(None, request)], 1, policy))
        completion = next(event.completion for _, event in events if isinstance(event, Finished))
        return self.message(completion, messages, tools, thinking)

    def message(
        self,
        completion: Completion,
        messages: Sequence[Mapping],
        tools: Sequence[Mapping] | None = None,
        thinking: bool = False,
    ) -> ChatMessage:
        """A completion of a conversation's prompt taken apart into content, reasoning and tool calls."""
        response = parse_response(completion.raw_text, *_turn(messages, tools, thinking))
        called = response.tool_calls and completion.finish_reason == "stop"
        return ChatMessage(
            content=response.content.split(completion.stop)[0] if completion.stop else response.content,
            reasoning=response.reasoning,
            tool_calls=response.tool_calls,
            finish_reason="tool_calls" if called else completion.finish_reason,
            usage=Usage(
                prompt_tokens=completion.prompt_tokens,
                completion_tokens=len(completion.tokens) + (completion.stop_id is not None),
                canvases=len(completion.steps),
                denoising_steps=sum(completion.steps),
                cached_tokens=completion.cached_tokens,
            ),
        )

    def infill(
        self,
        text: str,
        gap_tokens: int,
        sampling: Sampling | None = None,
        seed: int | None = None,
        policy: Policy | None = None,
    ) -> Completion:
        """Fill the one <gap> of a text with `gap_tokens` tokens; the completion's text is the whole text.

        Both sides are pinned, so text and gap must fit one canvas.
        """
        if self.tokenizer is None:
            raise ValueError(NO_TOKENIZER)
        stops = self.defaults.stop_token_ids
        fill = stops[0] if stops else 0
        prompt, canvas, pinned = infill_canvas(self.tokenizer, text, gap_tokens, self.config.canvas_length, fill)
        own = {"canvas": canvas, "pinned": pinned, "suppress": (*self.defaults.suppress, *stops)}
        return self.generate([prompt], replace(_sampling(sampling), **own), seed, policy)[0]

    def chat_prompt(
        self, messages: Sequence[Mapping], tools: Sequence[Mapping] | None = None, thinking: bool = False
    ) -> list[int]:
        """The token ids of a conversation, up to where the model's turn begins."""
        if self.tokenizer is None:
            raise ValueError(NO_TOKENIZER)
        for index, message in enumerate(_list(messages, "messages", "a list of messages")):
            parts = message.get("content") if isinstance(message, Mapping) else None
            for part in parts if isinstance(parts, list | tuple) else ():
                if isinstance(part, Mapping) and part.get("type") != "text":
                    raise ValueError(f"messages[{index}] holds a part of type {part.get('type')!r}; only text is read")
        tools = None if tools is None else _list(tools, "tools", "a list of functions in OpenAI's format")
        return encode_chat(messages, self.tokenizer, tools, thinking)

    def request(
        self,
        prompt: Prompt | Sequence[Mapping],
        sampling: Sampling | None = None,
        seed: int | None = None,
        tools: Sequence[Mapping] | None = None,
        thinking: bool = False,
    ) -> Request:
        """One checked request, for `serve`: text, token ids, or the messages of a conversation.

        tools, thinking: for messages, see `chat`. ValueError for what cannot be answered, or for n > 1.
        """
        turn = None
        if isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            messages, prompt = prompt, self.chat_prompt(prompt, tools, thinking)
            turn = _turn(messages, tools, thinking)
        elif tools or thinking:
            raise ValueError("tools and thinking go with the messages of a conversation, not with a plain prompt")
        request = self._request(prompt, sampling, Sampling(seed=seed).seed)
        if request.sampling.n > 1:
            raise ValueError(f"n is {request.sampling.n}; one answer is given here: use generate for several")
        return replace(request, turn=turn)

    def serve(
        self,
        requests: Iterable[tuple[Name, Request]],
        slots: int | None = None,
        policy: Policy | None = None,
        drafts: int | None = None,
    ) -> Iterator[tuple[Name, Event]]:
        """(name, event) as things happen, at last a Finished or a Failed of each; it is asked for once a slot is near.

        requests: named requests, as many as you like. slots: see `generate`; None is 8. drafts: steps between two
        Draft events of a request, None for none.
        """
        return _served(self.scheduler(slots, policy), iter(requests), draft_interval(drafts))

    def scheduler(
        self,
        slots: int | None = None,
        policy: Policy | None = None,
        *,
        fixed: bool = False,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> Scheduler:
        """Slots of this model's own, for whoever drives them; None is 8. fixed, prefill_chunk: see `Scheduler`."""
        if not isinstance(policy, Policy | None):
            raise ValueError(f"policy {policy!r} is not a dg.Policy; build one with dg.Policy(stop=...) and the like")
        slots = LARGEST_SLOTS if slots is None else _slots(slots, 1)
        parts = (self.config, self.params, self._programs, self.tokenizer, self.max_model_len)
        return Scheduler(*parts, slots, policy or DEFAULT_POLICY, fixed=fixed, prefill_chunk=prefill_chunk)

    def _requests(
        self, prompts: str | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None, seed: int | None
    ) -> list[Request]:
        prompts = [prompts] if isinstance(prompts, str) else _list(prompts, "prompts", "text, or a list of prompts")
        samplings = (
            [sampling] * len(prompts)
            if isinstance(sampling, Sampling | None)
            else _list(sampling, "sampling", "a dg.Sampling, or one per prompt")
        )
        if len(samplings) != len(prompts):
            raise ValueError(f"{len(samplings)} samplings for {len(prompts)} prompts; pass one, or one per prompt")
        shared = Sampling(seed=seed).seed
        first = [self._request(prompt, own, shared) for prompt, own in zip(prompts, samplings, strict=True)]
        return [replace(request, copy=copy) for request in first for copy in range(request.sampling.n)]

    def _request(self, prompt: Prompt, sampling: Sampling | None, seed: int | None) -> Request:
        ids = self._encode(prompt)
        sampling = _sampling(sampling).merged(self.defaults)
        self._check(sampling)
        room = self.max_model_len - len(ids)
        if room < 1:
            raise ValueError(
                f"prompt of {len(ids)} tokens leaves no room in a context of {self.max_model_len}; shorten it"
                " or load with a larger max_model_len"
            )
        budget = room if sampling.max_new_tokens is None else min(room, sampling.max_new_tokens)
        own = seed if sampling.seed in (None, UNSET) else sampling.seed
        return Request(ids, sampling, secrets.randbits(32) if own is None else own, budget)

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            ids = self._encode_text(prompt)
        elif isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes):
            ids = prompt
        else:
            raise ValueError(
                f"prompt {prompt!r:.60} is neither text nor a list of token ids; one prompt of ids is [[1, 2]]"
            )
        if len(ids) == 0:
            raise ValueError(f"prompt {prompt!r} is empty; expected text or at least one token id")
        vocab = self.config.vocab_size
        bad = next((id for id in ids if not is_int(id) or id >= vocab), None)
        if bad is not None:
            raise ValueError(f"prompt holds token id {bad!r:.60}; expected integers in 0 .. {vocab - 1}")
        return tuple(int(id) for id in ids)

    def _encode_text(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(NO_TOKENIZER)
        ids, bos = self.tokenizer.encode(prompt), self.config.bos_token_id
        return ids if not ids or bos is None or ids[0] == bos else [bos, *ids]

    def _check(self, sampling: Sampling) -> None:
        """What a Sampling asks for must exist in this model."""
        vocab = self.config.vocab_size
        for name in ("suppress", "stop_token_ids", "canvas"):
            bad = next((id for id in getattr(sampling, name) if id >= vocab), None)
            if bad is not None:
                raise ValueError(f"{name} holds token id {bad}; expected ids in 0 .. {vocab - 1}")
        if len(sampling.canvas) > self.config.canvas_length:
            raise ValueError(
                f"canvas has {len(sampling.canvas)} ids; expected at most {self.config.canvas_length}, a canvas' length"
            )
        if len(set(sampling.suppress)) == vocab:
            raise ValueError(f"suppress holds all {vocab} ids; expected at least one id to be left")
        if sampling.stop and self.tokenizer is None:
            raise ValueError(
                f"stop {sampling.stop[0]!r} needs a tokenizer; use stop_token_ids or load with tokenizer=PATH"
            )


def _served(
    scheduler: Scheduler, requests: Iterator[tuple[Name, Request]], drafts: int | None
) -> Iterator[tuple[Name, Event]]:
    names: dict[Job, Name] = {}
    while True:
        while len(scheduler.waiting) < len(scheduler.jobs) and (pair := next(requests, None)) is not None:
            names[scheduler.submit(pair[1], drafts)] = pair[0]
        if not scheduler.busy:
            return
        for job, event in scheduler.advance():
            yield names.pop(job) if isinstance(event, Finished | Failed) else names[job], event


def _raising(events: Iterator[tuple[Name, Event]]) -> Iterator[tuple[Name, Draft | Canvas | Finished]]:
    for name, event in events:
        if isinstance(event, Failed):
            raise event.error
        yield name, event


def _sampling(value: Sampling | None) -> Sampling:
    if not isinstance(value, Sampling | None):
        raise ValueError(f"sampling is {value!r:.60}; expected a dg.Sampling, or one per prompt")
    return value or Sampling()


def _turn(messages: Sequence[Mapping], tools: Sequence[Mapping] | None, thinking: bool) -> Turn:
    return Turn(tools, opens_thought(render_chat(messages, tools, thinking)))


def _list(value, name: str, expected: str) -> list:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        raise ValueError(f"{name} is {value!r:.60}; expected {expected}")
    return list(value)


def _slots(slots: int | None, prompts: int) -> int:
    if slots is None:
        return min(LARGEST_SLOTS, 1 << max(0, prompts - 1).bit_length())
    return check_slots(slots)
