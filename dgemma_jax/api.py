"""`dg.load` and the Model it returns: text in, text out."""

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from jax.sharding import Mesh

from dgemma_jax.checkpoint import dtype_name, open_directory, read_checkpoint
from dgemma_jax.config import Config
from dgemma_jax.diffusion.policy import Policy
from dgemma_jax.engine.capacity import check_slots, context, slots_for
from dgemma_jax.engine.job import Event, Job, draft_interval
from dgemma_jax.engine.programs import Programs
from dgemma_jax.engine.request import Request
from dgemma_jax.engine.scheduler import PREFILL_CHUNK, Scheduler
from dgemma_jax.events import Canvas, ChatMessage, Completion, Draft, Failed, Finished, Usage
from dgemma_jax.implementations import choose
from dgemma_jax.infilling import check_own_canvas, infill_canvas
from dgemma_jax.model.transformer import AUTO, Implementations, build
from dgemma_jax.prompts import NO_TOKENIZER, Conversation, Prompt, PromptReader
from dgemma_jax.sampling import UNSET, Resolved, Sampling
from dgemma_jax.sharding import checked, uneven
from dgemma_jax.text import Tokenizer, opens_thought, render_chat
from dgemma_jax.text.turn import Turn, parse_turn

logger = logging.getLogger(__name__)
DEFAULT_POLICY = Policy()
Name = TypeVar("Name")


def load(
    name: str | Path,
    dtype: str | None = None,
    max_model_len: int | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    attention_implementation: str = "auto",
    image_blocks: str | None = None,
    mesh: Mesh | None = None,
) -> "Model":
    """Open a model: a directory in Hugging Face's layout, "tiny" (bundled), or a hub name in the local HF cache.

    dtype: "bfloat16", "float32" or "float16"; None keeps the weights as stored. max_model_len: longest prompt plus
    output in tokens; None is the config's context, lowered to what memory leaves. tokenizer: used instead of the
    checkpoint's. attention_implementation: "auto", "reference", "xla", "pallas" or "triton"; what auto takes depends on
    the device, see `dgemma_jax.kernels.selection`, and is logged. image_blocks: "all", "sliding" or "none", see
    `Config`; None is the config's. mesh: several devices (`dg.make_mesh`), each of which reads its part of the weights.
    Raises ValueError with one line that says what is wrong and what to do, before any
    weights are read where that can be known.
    """
    mesh, opened, dtype = checked(mesh), open_directory(name), dtype_name(dtype)
    if image_blocks is not None:
        opened = opened._replace(config=replace(opened.config, image_blocks=image_blocks))
    itemsize = np.dtype(dtype or opened.weights.dtype or opened.config.dtype).itemsize
    implementations, choice = choose(attention_implementation, opened.config, itemsize, mesh)
    for line in uneven(opened.config, mesh):
        logger.warning(line)
    config, params, tokenizer, defaults = read_checkpoint(opened, dtype, tokenizer, mesh)
    logger.info(choice)
    return Model(config, params, tokenizer, defaults, max_model_len, implementations, mesh)


class Model:
    """A loaded model. config, params (plain nested dict of arrays), graph, tokenizer (None if it has none), defaults.

    params and graph go into the functional layer (`dg.encode`, `dg.denoise`, ...). max_model_len: longest prompt plus
    output, see `load`, which makes models. implementations: which one each op runs. mesh: where params lie, None for
    one device.
    """

    def __init__(
        self,
        config: Config,
        params: dict,
        tokenizer: Tokenizer | None,
        defaults: Resolved,
        max_model_len: int | None = None,
        implementations: Implementations = AUTO,
        mesh: Mesh | None = None,
    ):
        self.config, self.params, self.tokenizer, self.defaults = config, params, tokenizer, defaults
        self.dtype = str(params["final_norm"]["scale"].dtype)  # the table may be quantised
        self.graph, _ = build(config, self.dtype, implementations, mesh)
        self.implementations, self.mesh = implementations, mesh
        self.max_model_len = context(config, self.dtype, max_model_len, mesh)
        self._programs = Programs(self.graph, config, mesh)

    @property
    def required_tokenizer(self) -> Tokenizer:
        """`tokenizer`, or ValueError where the model has none."""
        if self.tokenizer is None:
            raise ValueError(NO_TOKENIZER)
        return self.tokenizer

    def variant(self, max_model_len: int, attention_implementation: str = "auto") -> "Model":
        """The same weights with another max_model_len or attention_implementation, see `load`; "auto" leaves the
        attention as it is.
        """
        other = copy(self)
        other.max_model_len = context(self.config, self.dtype, max_model_len, self.mesh)
        if attention_implementation != "auto":
            itemsize = np.dtype(self.dtype).itemsize
            found, choice = choose(attention_implementation, self.config, itemsize, self.mesh)
            logger.info(choice)
            other.implementations = found
            other.graph, _ = build(self.config, self.dtype, found, self.mesh)
            other._programs = Programs(other.graph, self.config, self.mesh)
        return other

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        seed: int | None = None,
        policy: Policy | None = None,
        images: Any = None,
        slots: int | None = None,
    ) -> list[Completion]:
        """Answer every prompt; the list has the prompts' order, the n answers to one prompt side by side.

        prompts: a string, strings, or lists of token ids. Strings are encoded with control tokens recognised and get
        one <bos> unless they have one; ids are used as they are. sampling: one for all, or one per prompt.
        seed: for requests without a seed of their own; None draws a fresh one per request, in Completion.seed.
        images: of a string, an image or a list of them; of a list of prompts, for each an image, a list, or None. A
        path, the bytes of a file, a PIL image or an array; each belongs to one <|image|> in the text.
        slots: rows denoised together; None takes the smallest power of two that holds the prompts, at most 8, and so
        many for each group of a mesh.
        A row's answer does not depend on the other rows.
        """
        events = self.events(prompts, sampling, seed, policy, images, slots)
        found = {index: event.completion for index, event in events if isinstance(event, Finished)}
        return [found[index] for index in range(len(found))]

    def events(
        self,
        prompts: str | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        seed: int | None = None,
        policy: Policy | None = None,
        images: Any = None,
        slots: int | None = None,
    ) -> Iterator[tuple[int, Canvas | Finished]]:
        """`generate` as it happens: (index of the prompt, event), a Canvas per canvas and a Finished per prompt."""
        requests = self._requests(prompts, sampling, seed, images)
        chosen = slots_for(len(requests), self.mesh) if slots is None else slots
        served = _raising(self.serve(enumerate(requests), chosen, policy))
        return ((index, event) for index, event in served if not isinstance(event, Draft))  # there are none

    def stream(
        self,
        prompt: Prompt | Sequence[Mapping],
        sampling: Sampling | None = None,
        seed: int | None = None,
        policy: Policy | None = None,
        images: Any = None,
    ) -> Iterator[Draft | Canvas | Finished]:
        """One answer as it happens: a Draft after every step, a Canvas after every canvas, Finished at the end.

        prompt: text, token ids, or the messages of a conversation. images: of text and ids, see `generate`.
        """
        request = self.request(prompt, sampling, seed, images=images)
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

        A message's content may be a list of parts: {"type": "text", "text": ...}, {"type": "image", "image": ...} with
        what `generate` takes as an image, and OpenAI's "image_url".
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
        in_thought = opens_thought(render_chat(messages, tools, thinking))
        stop = [] if completion.stop is None else [completion.stop]
        response = parse_turn(completion.raw_text, Turn(tools, in_thought), stop)
        called = response.tool_calls and completion.finish_reason == "stop"
        return ChatMessage(
            content=response.content,
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

        Both sides are pinned, so text and gap must fit one canvas. ValueError for a sampling with a canvas of its own,
        or for n > 1.
        """
        stops = self.defaults.stop_token_ids
        fill = stops[0] if stops else 0
        tokenizer, length = self.required_tokenizer, self.config.canvas_length
        chosen = _sampling(sampling)
        asked = chosen.merged(self.defaults)
        check_own_canvas(asked)
        prompt, canvas, pinned = infill_canvas(tokenizer, text, gap_tokens, length, fill)
        own = {"canvas": canvas, "pinned": pinned, "suppress": (*asked.suppress, *stops)}
        return self.generate([prompt], replace(chosen, **own), seed, policy)[0]

    def chat_prompt(
        self, messages: Sequence[Mapping], tools: Sequence[Mapping] | None = None, thinking: bool = False
    ) -> list[int]:
        """The token ids of a conversation, up to where the model's turn begins; images as their placeholders."""
        return self._read(messages, tools, thinking).ids

    def _read(self, messages: Sequence[Mapping], tools: Sequence[Mapping] | None, thinking: bool) -> Conversation:
        messages = _list(messages, "messages", "a list of messages")
        tools = None if tools is None else _list(tools, "tools", "a list of functions in OpenAI's format")
        return self.reader.conversation(messages, tools, thinking)

    @property
    def reader(self) -> PromptReader:
        """What turns prompts into token ids and images for this model."""
        return PromptReader(self.config, self.tokenizer, self.max_model_len)

    def request(
        self,
        prompt: Prompt | Sequence[Mapping],
        sampling: Sampling | None = None,
        seed: int | None = None,
        tools: Sequence[Mapping] | None = None,
        thinking: bool = False,
        images: Any = None,
    ) -> Request:
        """One checked request, for `serve`: text, token ids, or the messages of a conversation.

        tools, thinking: for messages, see `chat`; images: for others, see `generate`. ValueError for what cannot be
        answered, or for n > 1.
        """
        turn = None
        if isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            if images is not None:
                raise ValueError("images go with a plain prompt; those of a conversation are parts of its messages")
            prompt, images, in_thought = self._read(cast(Sequence[Mapping], prompt), tools, thinking)
            turn = Turn(tools, in_thought)
        elif tools or thinking:
            raise ValueError("tools and thinking go with the messages of a conversation, not with a plain prompt")
        request = self._request(cast(Prompt, prompt), sampling, Sampling(seed=seed).merged(self.defaults).seed, images)
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

        requests: named requests, as many as you like. slots: see `generate`; None is 8 in each group. drafts: steps
        between two Draft events of a request, None for none.
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
        """Slots of this model's own, for whoever drives them. None: see `serve`; fixed, prefill_chunk: `Scheduler`."""
        if not isinstance(policy, Policy | None):
            raise ValueError(f"policy {policy!r} is not a dg.Policy; build one with dg.Policy(stop=...) and the like")
        slots = slots_for(None, self.mesh) if slots is None else check_slots(slots)
        parts = (self.config, self.params, self._programs, self.tokenizer, self.max_model_len)
        return Scheduler(*parts, slots, policy or DEFAULT_POLICY, fixed=fixed, prefill_chunk=prefill_chunk)

    def _requests(
        self,
        prompts: str | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None,
        seed: int | None,
        images: Any = None,
    ) -> list[Request]:
        images = [images] if isinstance(prompts, str) else images
        prompts = [prompts] if isinstance(prompts, str) else _list(prompts, "prompts", "text, or a list of prompts")
        samplings = (
            [sampling] * len(prompts)
            if isinstance(sampling, Sampling | None)
            else _list(sampling, "sampling", "a dg.Sampling, or one per prompt")
        )
        if len(samplings) != len(prompts):
            raise ValueError(f"{len(samplings)} samplings for {len(prompts)} prompts; pass one, or one per prompt")
        images = (
            [None] * len(prompts) if images is None else _list(images, "images", "a list with those of each prompt")
        )
        if len(images) != len(prompts):
            raise ValueError(
                f"images has {len(images)} entries for {len(prompts)} prompts; pass one, or None, for each"
            )
        shared = Sampling(seed=seed).merged(self.defaults).seed
        rows = zip(prompts, samplings, images, strict=True)
        first = [self._request(prompt, own, shared, shown) for prompt, own, shown in rows]
        return [replace(request, copy=copy) for request in first for copy in range(request.sampling.n)]

    def _request(self, prompt: Prompt, sampling: Sampling | None, seed: int | None, images: Any) -> Request:
        several = images if isinstance(images, list | tuple) else [] if images is None else [images]
        reader = self.reader
        ids, placed = reader.encode(prompt, several)
        sampling = _sampling(sampling).merged(self.defaults)
        self._check(sampling)
        room = reader.room(len(ids))
        budget = room if sampling.max_new_tokens is None else min(room, sampling.max_new_tokens)
        own = seed if sampling.seed in (None, UNSET) else sampling.seed
        return Request(ids, sampling, secrets.randbits(32) if own is None else own, budget, images=placed)

    def _check(self, sampling: Resolved) -> None:
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


def _list(value, name: str, expected: str) -> list:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        raise ValueError(f"{name} is {value!r:.60}; expected {expected}")
    return list(value)
