"""Host side of generation: requests take slots as they become free; one device call at a time moves all of them."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dgemma_jax.cache import KVCache, init_cache
from dgemma_jax.compilation import compilations
from dgemma_jax.config import Config, is_int
from dgemma_jax.diffusion.policy import Knobs, Policy
from dgemma_jax.diffusion.random import key_from_seed
from dgemma_jax.engine.capacity import cache_bytes
from dgemma_jax.engine.job import Event, Job
from dgemma_jax.engine.prefix_cache import PrefixCache
from dgemma_jax.engine.programs import Programs
from dgemma_jax.engine.request import Answer, Request, Top
from dgemma_jax.engine.soft_tokens import SoftTokens, chunk_end
from dgemma_jax.engine.stats import EngineStats
from dgemma_jax.events import Draft, Failed
from dgemma_jax.images.placement import reads_images
from dgemma_jax.kernels.vocab_head import Likeliest
from dgemma_jax.memory import free_bytes
from dgemma_jax.sampling import BUILT_IN, Resolved
from dgemma_jax.shapes import Array
from dgemma_jax.sharding import shard_of
from dgemma_jax.text.tokenizer import Tokenizer

SMALLEST_CHUNK, PREFILL_CHUNK = 64, 1024  # tokens of a prompt that are encoded at once
# Passes that are made at once. Who comes while a slot is free waits for a few at most, who is cancelled for some more.
FEW_PASSES, MOST_PASSES = 8, 64
TEXT_ONLY = (None, None)  # soft tokens of a chunk's images, and where they are


class Told(NamedTuple):
    """What the host reads of the slots after some passes; see `diffusion.step.CanvasState`. Arrays, a row per slot."""

    running: Array
    steps: Array
    best: Array
    logprob: Array
    likeliest: Likeliest | None
    accepted: Array
    entropy: Array

    def draft(self, slot: int) -> Draft:
        """The canvas as it is."""
        figures: list[Any] = [figure[slot].tolist() for figure in (self.best, self.steps, self.accepted, self.entropy)]
        return Draft(*figures)

    def top(self, slot: int, n: int | None) -> list[Top]:
        """For each position the `n` likeliest ids and their log-probabilities."""
        if not n or self.likeliest is None:
            return []
        ids, logprobs = self.likeliest.ids[slot, :, :n].tolist(), self.likeliest.logprobs[slot, :, :n].tolist()
        return [list(zip(*position, strict=True)) for position in zip(ids, logprobs, strict=True)]


class Scheduler:
    """Answers requests with a fixed number of slots; the cache lives as long as the scheduler.

    prefixes: encoded prompts of earlier requests; at first without room for any. fixed: the cache holds max_model_len
    positions from the start; otherwise it grows with the longest request, and programs are compiled anew for it.
    prefill_chunk: most tokens of prompts to be encoded before the others go on.

    `submit` and `cancel` only note what is wanted; `advance` does it. One thread may call these.
    """

    def __init__(
        self,
        config: Config,
        params: dict,
        programs: Programs,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        slots: int,
        policy: Policy,
        *,
        fixed: bool = False,
        prefill_chunk: int = PREFILL_CHUNK,
    ):
        if not is_int(prefill_chunk, 1):
            raise ValueError(f"prefill_chunk is {prefill_chunk!r}; expected a positive number of tokens")
        self.config, self.params, self.programs = config, params, programs
        self.tokenizer, self.max_model_len, self.policy = tokenizer, max_model_len, policy
        self.dtype = str(params["final_norm"]["scale"].dtype)  # the table may be quantised
        self.waiting: deque[Job] = deque()
        self.jobs: list[Job | None] = [None] * slots
        self.prefill_chunk = prefill_chunk
        capacity = max_model_len if fixed else self._bucket(config.sliding_window + 4 * config.canvas_length)
        mesh = programs.mesh
        need = shard_of("rows", slots, mesh).length * cache_bytes(config, capacity, self.dtype, mesh)
        if need > (free := free_bytes(mesh=mesh)):
            raise ValueError(f"slots is {slots}; their cache takes {need:,} bytes, {free:,} are free: lower it")
        self.cache = init_cache(config, slots, capacity, self.dtype, mesh)
        self.prefixes, self.stats = PrefixCache(0), EngineStats(slots=slots)
        self.soft_tokens = SoftTokens(config, programs, params, self.dtype) if reads_images(config) else None
        self.slots = programs.idle(jnp.stack([key_from_seed(0)] * slots), Knobs.of([BUILT_IN] * slots), self.dtype)

    @property
    def busy(self) -> bool:
        """Whether any request is not yet answered."""
        return bool(self.waiting) or any(self.jobs)

    def snapshot(self) -> EngineStats:
        """The counters as they are now."""
        running = sum(job is not None for job in self.jobs)
        now = {"waiting": len(self.waiting), "running": running, "prefix_hits": self.prefixes.hits}
        return replace(self.stats, **now, compilations=compilations())

    def release(self) -> None:
        """Free the device's memory. Nothing but the counters can be used after it."""
        del self.cache, self.slots
        self.soft_tokens = None
        self.prefixes.clear()

    def submit(self, request: Request, drafts: int | None = None) -> Job:
        """Queue a request; its events come out of `advance`."""
        job = Job(request, Answer(request, self.tokenizer), self.stats.requests, drafts)
        job.mark()
        self.waiting.append(job)
        self.stats.requests += 1
        return job

    def cancel(self, job: Job) -> None:
        """End a request at the next `advance`, with what it has by then; nothing if it is over."""
        job.cancelled = True

    def advance(self) -> list[tuple[Job, Event]]:
        """One round: fill free slots, encode a chunk of prompts, make a few passes; what there is to tell of it."""
        with self.stats.clock("busy_seconds"):
            events = [*self._drop_cancelled()]
            self._fill()
            encoding = self._encode()
            if any(job is not None and job.at_work for job in self.jobs):
                events += self._run(1 if encoding else self._until_draft())
        return events

    def _run(self, allowance: int) -> Iterator[tuple[Job, Event]]:
        """At most `allowance` passes."""
        active = np.array([job is not None and job.at_work for job in self.jobs])
        committing = np.array([job is not None and job.committing for job in self.jobs])
        with self.stats.clock("device_seconds"):
            self.cache, self.slots = self.programs.advance(
                self.policy, self.params, self.cache, self.slots, active, committing, np.int32(allowance)
            )
            state = self.slots.state
            asked = any(job is not None and job.request.sampling.top_logprobs for job in self.jobs)
            told = Told(
                state.running,
                state.steps,
                state.best,
                state.logprob,
                state.likeliest if asked else None,
                state.accepted,
                state.entropy,
            )
            told = jax.device_get(told)
        return self._harvest(told)

    def _drop_cancelled(self) -> Iterator[tuple[Job, Event]]:
        for job in [job for job in (*self.waiting, *self.jobs) if job is not None and job.cancelled]:
            if job.slot is None:
                self.waiting.remove(job)
            job.answer.finish_reason = "cancelled"
            yield self._end(job)

    def _fill(self) -> None:
        """Waiting requests take the free slots, first come, first served."""
        for slot, job in enumerate(self.jobs):
            if job is None and self.waiting:
                job = self.jobs[slot] = self.waiting.popleft()
                job.slot = slot
                job.mark()

    def _encode(self) -> bool:
        """Encode one chunk of prompts, those that came first; True if there is more to encode.

        Several short prompts share it. A prompt is cut where it would be cut alone, whatever the others are.
        """
        room = self.prefill_chunk
        pending = [job for job in self.jobs if job is not None and not job.at_work]
        for job in sorted(pending, key=lambda job: job.number):
            if not job.encoded:
                self._restore(job)
            begin, length = job.encoded, len(job.request.ids)
            if begin < length:
                end = chunk_end(job.request.images, begin, min(begin + self.prefill_chunk, length))
                size = padded_size(end - begin, self.prefill_chunk)
                if size > room and room < self.prefill_chunk:  # an image that is longer than a chunk goes by itself
                    return True
                room -= size
                self._prefill(job, end, size)
            if job.encoded < length:
                return True
            self._begin(job)
        return False

    def _prefill(self, job: Job, end: int, size: int) -> None:
        """Encode the tokens of a prompt up to place `end`, padded to `size`."""
        ids, images, begin = job.request.ids, job.request.images, job.encoded
        self._make_room(end)
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : end - begin] = ids[begin:end]
        where = np.int32(job.row), np.int32(begin), np.int32(end - begin)
        with self.stats.clock("device_seconds"):
            soft = self.soft_tokens.of_chunk(images, begin, end, size) if self.soft_tokens else TEXT_ONLY
            self.cache = self.programs.prefill(self.params, self.cache, tokens, *where, *soft)
        job.encoded = end

    def _forget_images(self) -> None:
        """Keep the soft tokens of prompts that are still to be encoded."""
        if self.soft_tokens:
            self.stats.images = self.soft_tokens.seen
            pending = [job for job in (*self.waiting, *self.jobs) if job is not None and not job.at_work]
            self.soft_tokens.keep(image for job in pending for image in job.request.images)

    def _restore(self, job: Job) -> None:
        """Begin with the longest prefix of the prompt that was encoded before."""
        found = self.prefixes.find(job.request.ids, job.request.images)
        if found is None:
            return
        self._make_room(found.row.capacity)
        with self.stats.clock("device_seconds"):
            self.cache = self.programs.put(self.cache, found.row, np.int32(job.row))
        job.encoded = job.answer.cached_tokens = found.length

    def _keep(self, job: Job) -> None:
        """Keep the encoded prompt for requests that go on from there."""
        capacity = self._bucket(job.encoded)

        def take() -> KVCache:
            with self.stats.clock("device_seconds"):
                return self.programs.take(self.cache, np.int32(job.row), capacity)

        nbytes = cache_bytes(self.config, capacity, self.dtype, self.programs.mesh)
        self.prefixes.add(job.request.ids, nbytes, take, job.request.images)

    def warmup(self) -> int:
        """Compile, before the first request, what serving needs; returns how many programs. The cache must be fixed."""
        nobody, one = np.zeros(len(self.jobs), bool), np.int32(1)
        sizes = chunk_sizes(self.prefill_chunk)
        soft = {size: self.soft_tokens.of_chunk((), 0, 0, size) if self.soft_tokens else TEXT_ONLY for size in sizes}
        chunk = lambda size: np.zeros((1, size), np.int32)  # noqa: E731
        calls = [
            ("advance", self.policy, self.params, self.cache, self.slots, nobody, nobody, one),
            ("admit", self.slots, one, *admission(self.config, BUILT_IN, key_from_seed(0))),
            *(("prefill", self.params, self.cache, chunk(size), one, one, one, *soft[size]) for size in sizes),
            *([self.soft_tokens.call()] if self.soft_tokens else ()),
        ]
        self.programs.compile(calls)
        return len(calls)

    def _begin(self, job: Job) -> None:
        """Hand an encoded request over to the device; its first canvas starts with the next pass."""
        request = job.request
        self._keep(job)
        self.stats.prompt_tokens += job.encoded
        self.stats.cached_tokens += job.answer.cached_tokens
        asked = admission(self.config, request.sampling, key_from_seed(request.seed, request.copy))
        with self.stats.clock("device_seconds"):
            self.slots = self.programs.admit(self.slots, np.int32(job.row), *asked)
        job.at_work = True
        job.mark()
        self._forget_images()

    def _until_draft(self) -> int:
        """Passes until the next draft is due, but no more than one call may make."""
        due = [
            job.drafts - job.steps % job.drafts + job.committing
            for job in self.jobs
            if job is not None and job.at_work and job.drafts
        ]
        return min([FEW_PASSES if None in self.jobs else MOST_PASSES, *due])

    def _harvest(self, told: Told) -> Iterator[tuple[Job, Event]]:
        """Tell what the passes brought: drafts, finished canvases, and answers that are complete."""
        for job in [job for job in self.jobs if job is not None and job.at_work]:
            slot, seen = job.row, job.steps
            self.stats.commits += job.committing
            job.committing, job.steps = False, int(told.steps[slot])
            if job.drafts and job.steps != seen and job.steps % job.drafts == 0:
                yield job, told.draft(slot)
            if not told.running[slot]:
                yield from self._take(job, told)

    def _take(self, job: Job, told: Told) -> Iterator[tuple[Job, Event]]:
        """Adds a finished canvas to its answer; an error in that, which is the tokenizer's, ends this request alone."""
        try:
            canvas, logprobs = told.best[job.row].tolist(), told.logprob[job.row].tolist()
            event = job.answer.take(canvas, logprobs, job.steps, told.top(job.row, job.request.sampling.top_logprobs))
        except Exception as error:
            yield self._end(job, error)
            return
        self.stats.canvases += 1
        self.stats.denoising_steps += job.steps
        self.stats.at_step_limit += job.steps == job.request.sampling.max_denoising_steps
        self.stats.tokens += len(event.tokens)
        yield job, event
        if job.answer.finish_reason is None:
            self._commit(job)
        else:
            yield self._end(job)

    def _end(self, job: Job, error: Exception | None = None) -> tuple[Job, Event]:
        """Frees the slot. The last event is the answer, or the error that kept it from being one."""
        if job.slot is not None:
            self.jobs[job.slot] = None
        job.slot, job.at_work = None, False
        event = job.end() if error is None else Failed(error)
        reason = "failed" if isinstance(event, Failed) else job.answer.finish_reason
        count = reason if reason in ("failed", "cancelled") else "finished"
        setattr(self.stats, count, getattr(self.stats, count) + 1)
        self.stats.empty += count == "finished" and not job.answer.tokens
        return job, event

    def _commit(self, job: Job) -> None:
        """The next pass appends the finished canvas; the last canvas of an answer is never encoded."""
        job.encoded += self.config.canvas_length
        self._make_room(job.encoded)
        job.committing, job.steps = True, 0

    def _make_room(self, length: int) -> None:
        if length > self.cache.capacity:
            self.cache = self.programs.grow(self.cache, self._bucket(length))

    def _bucket(self, length: int) -> int:
        """Cache capacity for `length` positions: the window times a power of two, never past max_model_len."""
        capacity = self.config.sliding_window
        while capacity < length:
            capacity *= 2
        return min(capacity, self.max_model_len)


def padded_size(tokens: int, largest: int) -> int:
    """The padded length of a chunk; beyond `largest`, where an image takes it, `largest` times a power of two."""
    while tokens > largest:
        largest *= 2
    return next(size for size in chunk_sizes(largest) if size >= tokens)


def chunk_sizes(largest: int) -> list[int]:
    """The padded lengths of prefill chunks: few, so that few programs serve all prompts."""
    sizes = [largest]
    while sizes[0] > SMALLEST_CHUNK:
        sizes.insert(0, max(SMALLEST_CHUNK, sizes[0] // 4))
    return sizes


def admission(config: Config, sampling: Resolved, key: Array) -> tuple:
    """What the program `admit` wants of a request: key, knobs, suppressed ids, canvas and pinned places of one row."""
    C = config.canvas_length
    suppress = np.zeros((1, config.vocab_size), bool)
    suppress[0, list(sampling.suppress)] = True
    canvas, pinned = np.full((1, C), -1, np.int32), np.zeros((1, C), bool)
    if sampling.canvas:
        canvas[0, : len(sampling.canvas)] = sampling.canvas
        pinned[0, : len(sampling.pinned)] = sampling.pinned
    return key[None], Knobs.of([sampling]), suppress, canvas, pinned
