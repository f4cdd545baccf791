"""Host side of generation: requests take slots as they become free; one device call at a time moves all of them."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dgemma_jax.cache import init_cache
from dgemma_jax.config import Config, is_int
from dgemma_jax.diffusion.policy import Knobs, Policy
from dgemma_jax.diffusion.random import key_from_seed
from dgemma_jax.engine.prefix_cache import PrefixCache
from dgemma_jax.engine.programs import Programs
from dgemma_jax.engine.request import Answer, Request
from dgemma_jax.engine.stats import EngineStats
from dgemma_jax.events import Canvas, Draft, Finished
from dgemma_jax.memory import free_bytes
from dgemma_jax.sampling import BUILT_IN
from dgemma_jax.text.tokenizer import Tokenizer

SMALLEST_CHUNK, LARGEST_CHUNK = 32, 1024
UNTIL_READY = 2**31 - 1


@dataclass(frozen=True)
class Failed:
    """A request that ended in an error of its own."""

    error: Exception


Event = Draft | Canvas | Finished | Failed


@dataclass(eq=False)
class Job:
    """A request on its way. drafts: steps between two Draft events, None for none.

    slot: where it is, None while it waits and when it is done. encoded: positions of it in the cache. at_work: its
    prompt is encoded. committing: the next pass encodes its finished canvas. steps: of its canvas, as last seen.
    """

    request: Request
    answer: Answer
    drafts: int | None = None
    slot: int | None = None
    encoded: int = 0
    at_work: bool = False
    committing: bool = False
    cancelled: bool = False
    steps: int = 0


class Scheduler:
    """Answers requests with a fixed number of slots; the cache lives as long as the scheduler.

    prefixes: encoded prompts of earlier requests; at first without room for any.

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
    ):
        self.config, self.params, self.programs = config, params, programs
        self.tokenizer, self.max_model_len, self.policy = tokenizer, max_model_len, policy
        self.dtype = str(params["embedder"]["table"].dtype)
        self.waiting: deque[Job] = deque()
        self.jobs: list[Job | None] = [None] * slots
        capacity = self._bucket(config.sliding_window + 4 * config.canvas_length)
        need = self._cache_bytes(capacity)
        if need > free_bytes():
            raise ValueError(f"slots is {slots}; their cache takes {need:,} bytes, {free_bytes():,} are free")
        self.cache = init_cache(config, slots, capacity, self.dtype)
        self.prefixes, self.stats = PrefixCache(0), EngineStats()
        self.slots = programs.idle(jnp.stack([key_from_seed(0)] * slots), Knobs.of([BUILT_IN] * slots), self.dtype)

    @property
    def largest_cache(self) -> int:
        """Bytes that the slots' cache takes when all of them are full."""
        return self._cache_bytes(self.max_model_len)

    def _cache_bytes(self, capacity: int) -> int:
        one = jax.eval_shape(lambda: jax.tree.leaves(init_cache(self.config, 1, capacity, self.dtype)))
        return len(self.jobs) * sum(leaf.size * leaf.dtype.itemsize for leaf in one)

    @property
    def busy(self) -> bool:
        """Whether any request is not yet answered."""
        return bool(self.waiting) or any(self.jobs)

    def submit(self, request: Request, drafts: int | None = None) -> Job:
        """Queue a request; its events come out of `advance`."""
        job = Job(request, Answer(request, self.tokenizer), drafts)
        self.waiting.append(job)
        self.stats.requests += 1
        return job

    def cancel(self, job: Job) -> None:
        """End a request at the next `advance`, with what it has by then; nothing if it is over."""
        job.cancelled = True

    def advance(self) -> list[tuple[Job, Event]]:
        """One round: fill free slots, encode one chunk of a prompt, run passes until there is something to tell."""
        with self.stats.clock("busy_seconds"):
            events = [*self._drop_cancelled()]
            self._fill()
            encoding = self._encode_chunk()
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
            told = (self.slots.ready, state.steps, state.best, state.logprob, state.accepted, state.entropy)
            told = jax.device_get(told)
        return self._harvest(*told)

    def _drop_cancelled(self) -> Iterator[tuple[Job, Event]]:
        for job in [job for job in (*self.waiting, *self.jobs) if job is not None and job.cancelled]:
            if job.slot is None:
                self.waiting.remove(job)
            self._leave(job)
            self.stats.cancelled += 1
            job.answer.finish_reason = "cancelled"
            yield job, Finished(job.answer.completion())

    def _fill(self) -> None:
        """Waiting requests take the free slots, first come, first served."""
        for slot, job in enumerate(self.jobs):
            if job is None and self.waiting:
                job = self.jobs[slot] = self.waiting.popleft()
                job.slot = slot

    def _encode_chunk(self) -> bool:
        """Encode one chunk of the prompt that came first; True if there is more to encode."""
        pending = [job for job in self.jobs if job is not None and not job.at_work]
        if not pending:
            return False
        job = pending[0]
        if not job.encoded:
            self._restore(job)
        chunk = np.asarray(job.request.ids[job.encoded : job.encoded + LARGEST_CHUNK], np.int32)
        self._make_room(job.encoded + len(chunk))
        tokens = np.zeros((1, chunk_bucket(len(chunk))), np.int32)
        tokens[0, : len(chunk)] = chunk
        where = np.int32([job.slot, job.encoded, len(chunk)])
        with self.stats.clock("device_seconds"):
            self.cache = self.programs.prefill(self.params, self.cache, tokens, *where)
        job.encoded += len(chunk)
        if job.encoded == len(job.request.ids):
            self._keep(job)
            self._begin(job)
            self.stats.prompt_tokens += job.encoded
            self.stats.cached_tokens += job.answer.cached_tokens
        return len(pending) > 1 or not job.at_work

    def _restore(self, job: Job) -> None:
        """Begin with the longest prefix of the prompt that was encoded before."""
        found = self.prefixes.find(job.request.ids)
        if found is None:
            return
        self._make_room(found.row.capacity)
        row = self.programs.grow(found.row, self.cache.capacity)
        self.cache = self.programs.put(self.cache, row, np.int32(job.slot))
        job.encoded = job.answer.cached_tokens = found.length

    def _keep(self, job: Job) -> None:
        """Keep the encoded prompt for requests that go on from there."""
        if self.prefixes.capacity and not self.prefixes.holds(job.request.ids):
            row = self.programs.take(self.cache, np.int32(job.slot), self._bucket(job.encoded))
            self.prefixes.add(job.request.ids, row)

    def _begin(self, job: Job) -> None:
        """Hand the request over to the device; its first canvas starts with the next pass."""
        sampling, C = job.request.sampling, self.config.canvas_length
        suppress = np.zeros((1, self.config.vocab_size), bool)
        suppress[0, list(sampling.suppress)] = True
        canvas, pinned = np.full((1, C), -1, np.int32), np.zeros((1, C), bool)
        if sampling.canvas:
            canvas[0, : len(sampling.canvas)] = sampling.canvas
            pinned[0, : len(sampling.pinned)] = sampling.pinned
        key = key_from_seed(job.request.seed, job.request.copy)[None]
        parts = (np.int32(job.slot), key, Knobs.of([sampling]), suppress, canvas, pinned)
        with self.stats.clock("device_seconds"):
            self.slots = self.programs.admit(self.slots, *parts)
        job.at_work = True

    def _until_draft(self) -> int:
        """Passes until the next draft is due."""
        due = [
            job.drafts - job.steps % job.drafts + job.committing
            for job in self.jobs
            if job is not None and job.at_work and job.drafts
        ]
        return min(due, default=UNTIL_READY)

    def _harvest(
        self,
        ready: np.ndarray,
        steps: np.ndarray,
        best: np.ndarray,
        logprob: np.ndarray,
        accepted: np.ndarray,
        entropy: np.ndarray,
    ) -> Iterator[tuple[Job, Event]]:
        """Tell what the passes brought: drafts, finished canvases, and answers that are complete."""
        for job in [job for job in self.jobs if job is not None and job.at_work]:
            slot, seen = job.slot, job.steps
            job.committing, job.steps = False, int(steps[slot])
            if job.drafts and job.steps != seen and job.steps % job.drafts == 0:
                yield job, Draft(best[slot].tolist(), job.steps, accepted[slot].tolist(), float(entropy[slot]))
            if ready[slot]:
                yield from self._take(job, best[slot].tolist(), logprob[slot].tolist())

    def _take(self, job: Job, canvas: list[int], logprobs: list[float]) -> Iterator[tuple[Job, Event]]:
        """Adds a finished canvas to its answer; an error in that, which is the tokenizer's, ends this request alone."""
        try:
            event = job.answer.take(canvas, logprobs, job.steps)
            ended = job.answer.finish_reason is not None and Finished(job.answer.completion())
        except Exception as error:
            self._leave(job)
            self.stats.failed += 1
            yield job, Failed(error)
            return
        self.stats.canvases += 1
        self.stats.denoising_steps += job.steps
        yield job, event
        if ended:
            self._leave(job)
            self.stats.finished += 1
            self.stats.tokens += len(job.answer.tokens)
            yield job, ended
        else:
            self._commit(job)

    def _commit(self, job: Job) -> None:
        """The next pass appends the finished canvas; the last canvas of an answer is never encoded."""
        job.encoded += self.config.canvas_length
        self._make_room(job.encoded)
        job.committing, job.steps = True, 0

    def _leave(self, job: Job) -> None:
        if job.slot is not None:
            self.jobs[job.slot] = None
        job.slot, job.at_work = None, False

    def _make_room(self, length: int) -> None:
        if length > self.cache.capacity:
            self.cache = self.programs.grow(self.cache, self._bucket(length))

    def _bucket(self, length: int) -> int:
        """Cache capacity for `length` positions: the window times a power of two, never past max_model_len."""
        capacity = self.config.sliding_window
        while capacity < length:
            capacity *= 2
        return min(capacity, self.max_model_len)


def draft_interval(value: int | None) -> int | None:
    """Steps between two drafts, None for none. ValueError for anything else."""
    if value is not None and not is_int(value, 1):
        raise ValueError(f"drafts is {value!r}; expected a positive number of steps, or None")
    return value


def chunk_bucket(length: int) -> int:
    """The padded length of a prefill chunk: a power of two, so that few programs serve all prompts."""
    return max(SMALLEST_CHUNK, 1 << (length - 1).bit_length())
