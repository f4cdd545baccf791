"""Many callers, one model: a worker thread owns the device and serves what they submit.

with dg.Engine(model, slots=8) as engine:
    handles = [engine.submit(prompt, dg.Sampling(max_new_tokens=64)) for prompt in prompts]
    texts = [handle.result().text for handle in handles]
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma_jax.compilation import keep_on_disk
from dgemma_jax.config import is_int, is_number
from dgemma_jax.engine.capacity import MEMORY_FRACTION, plan
from dgemma_jax.engine.handle import Handle
from dgemma_jax.engine.prefix_cache import PrefixCache
from dgemma_jax.engine.scheduler import PREFILL_CHUNK, Event, Failed, Job, draft_interval
from dgemma_jax.engine.stats import EngineStats
from dgemma_jax.events import Finished
from dgemma_jax.parallel import check_parallel

if TYPE_CHECKING:
    from dgemma_jax.api import Model, Prompt
    from dgemma_jax.diffusion.policy import Policy
    from dgemma_jax.engine.request import Request
    from dgemma_jax.sampling import Sampling

logger = logging.getLogger(__name__)
FAILED = "the engine has failed ({!r}); make a new one"


class Engine:
    """Serves requests from any number of threads and event loops; a context manager.

    slots: rows denoised together; None: as many as memory holds, a power of two up to 64, on a CPU up to 8.
    policy: of all requests. max_model_len: longest prompt plus output; None is the model's, or, with slots chosen, what
    memory leaves to each. memory_fraction: the part of the device's memory that may be filled, weights included.
    prefill_chunk: most tokens of a prompt that are encoded before the other requests go on. prefix_cache_bytes: device
    memory for encoded prompts, so that a conversation's next turn need not encode the earlier ones again; None is a
    tenth of the slots' cache, 0 is none. attention_implementation: see `dgemma_jax.load`; "auto" is the model's.
    compilation_cache: directory for compiled programs, used from then on by the whole process; None leaves it as it is.
    pipeline_parallel_size: must be 1; a model on several devices is loaded on a mesh. ValueError for what cannot be or
    does not fit.
    """

    def __init__(
        self,
        model: Model,
        slots: int | None = None,
        policy: Policy | None = None,
        *,
        max_model_len: int | None = None,
        memory_fraction: float = MEMORY_FRACTION,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_cache_bytes: int | None = None,
        attention_implementation: str = "auto",
        compilation_cache: str | Path | None = None,
        pipeline_parallel_size: int = 1,
    ):
        check_parallel(pipeline_parallel_size=pipeline_parallel_size)
        if prefix_cache_bytes is not None and not is_int(prefix_cache_bytes):
            raise ValueError(f"prefix_cache_bytes is {prefix_cache_bytes!r}; expected bytes, 0 for none, or None")
        if not is_number(memory_fraction) or not 0 < memory_fraction <= 1:
            raise ValueError(f"memory_fraction is {memory_fraction!r}; expected a number above 0 and at most 1")
        longest = model.max_model_len if max_model_len is None else model.variant(max_model_len).max_model_len
        wanted = (slots, max_model_len, longest, prefix_cache_bytes, memory_fraction)
        planned = plan(model.config, model.dtype, *wanted, mesh=model.mesh)
        if compilation_cache is not None:
            keep_on_disk(compilation_cache)
        self.model = model.variant(planned.max_model_len, attention_implementation)
        self._scheduler = self.model.scheduler(planned.slots, policy, fixed=True, prefill_chunk=prefill_chunk)
        self._scheduler.prefixes = PrefixCache(planned.prefix_cache_bytes)
        self._handles: dict[Job, Handle] = {}
        self._open: set[Handle] = set()  # not yet ended
        self._wanted: list[Callable[[], None]] = []  # what callers ask for, done by the worker
        self._changed = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._worker = threading.Thread(target=self._work, name="dgemma-engine", daemon=True)
        self._worker.start()
        atexit.register(self.close, cancel=True)

    def submit(
        self,
        prompt: Prompt | Sequence[Mapping],
        sampling: Sampling | None = None,
        seed: int | None = None,
        *,
        tools: Sequence[Mapping] | None = None,
        thinking: bool = False,
        images: Any = None,
        drafts: int | None = None,
    ) -> Handle:
        """Queue a prompt (text or token ids) or the messages of a conversation, and return at once.

        tools, thinking: for messages, see `Model.chat`; images: for a prompt, see `Model.generate`. drafts: steps
        between two Draft events, None for none.
        ValueError for what cannot be answered; RuntimeError if the engine is closed or has failed.
        """
        return self.submit_request(self.model.request(prompt, sampling, seed, tools, thinking, images), drafts)

    def submit_request(self, request: Request, drafts: int | None = None) -> Handle:
        """`submit` for a request that `model.request` has checked; drafts: see there."""
        handle, drafts = Handle(self._cancel), draft_interval(drafts)

        def submit() -> None:
            handle.job = self._scheduler.submit(request, drafts)
            self._handles[handle.job] = handle

        with self._changed:
            self._check_open()
            self._open.add(handle)
            self._wanted.append(submit)
            self._changed.notify()
        return handle

    @property
    def stats(self) -> EngineStats:
        """Counters since the start, as of the last round."""
        return self._scheduler.snapshot()

    @property
    def error(self) -> BaseException | None:
        """What ended the worker; None while it is well."""
        return self._error

    def warmup(self) -> float:
        """Compile now what serving needs, instead of at the first request; returns the seconds it took.

        Copies in and out of the prefix cache are compiled when they are first made.
        """
        started, done = time.perf_counter(), Future()
        with self._changed:
            self._check_open()
            self._wanted.append(lambda: done.set_result(self._scheduler.warmup()))
            self._changed.notify()
        while not wait([done], timeout=1).done:
            if self._error is not None:
                raise RuntimeError(FAILED.format(self._error))
        seconds = time.perf_counter() - started
        logger.info("%d programs compiled in %.0f s", done.result(), seconds)
        return seconds

    def close(self, cancel: bool = False) -> None:
        """Take no more requests and wait until the others are answered; cancel: end them with what they have."""
        with self._changed:
            if cancel:
                self._wanted.append(self._cancel_all)
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._worker:
            self._worker.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        self.close(cancel=kind is not None)

    def _check_open(self) -> None:
        if self._error is not None:
            raise RuntimeError(FAILED.format(self._error))
        if self._closing:
            raise RuntimeError("the engine is closed; make a new one")

    def _cancel(self, handle: Handle) -> None:
        def cancel() -> None:
            if handle.job is not None:  # what was submitted before it was cancelled has one
                self._scheduler.cancel(handle.job)

        with self._changed:  # also while closing
            self._wanted.append(cancel)
            self._changed.notify()

    def _cancel_all(self) -> None:
        for job in self._handles:
            self._scheduler.cancel(job)

    def _work(self) -> None:
        """The worker: until closed and idle, do what is wanted, then one round of the scheduler."""
        try:
            while self._next():
                for job, event in self._scheduler.advance():
                    self._tell(job, event)
        except BaseException as error:  # nothing that was donated to the device can be trusted after it
            with self._changed:
                self._error = error
            for handle in self._open:
                handle.end(RuntimeError(FAILED.format(error)))

    def _tell(self, job: Job, event: Event) -> None:
        handle = self._handles[job]
        if not isinstance(event, Failed):
            handle.put(event)
        if isinstance(event, Failed | Finished):
            del self._handles[job]
            self._open.discard(handle)
            handle.end(event.error if isinstance(event, Failed) else None)

    def _next(self) -> bool:
        """Waits for something to do and does what callers want; False once closed and idle."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._scheduler.busy or self._closing)
            wanted, self._wanted = self._wanted, []
        for action in wanted:
            action()
        with self._changed:  # at once: what is accepted before the closing is still served
            return self._scheduler.busy or bool(self._wanted) or not self._closing
