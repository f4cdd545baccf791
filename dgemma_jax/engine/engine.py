"""Many callers, one model: a worker thread owns the device and serves what they submit.

with dg.Engine(model, slots=8) as engine:
    handles = [engine.submit(prompt, dg.Sampling(max_new_tokens=64)) for prompt in prompts]
    texts = [handle.result().text for handle in handles]
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dgemma_jax.config import is_int
from dgemma_jax.engine.handle import Handle
from dgemma_jax.engine.prefix_cache import PrefixCache
from dgemma_jax.engine.scheduler import Event, Failed, Job, draft_interval
from dgemma_jax.engine.stats import EngineStats
from dgemma_jax.events import Finished

if TYPE_CHECKING:
    from dgemma_jax.api import Model, Prompt
    from dgemma_jax.diffusion.policy import Policy
    from dgemma_jax.sampling import Sampling


class Engine:
    """Serves requests from any number of threads and event loops; a context manager.

    slots: rows denoised together, see `Model.generate`; None is 8. policy: of all requests. prefix_cache_bytes: device
    memory for encoded prompts, so that a conversation's next turn need not encode the earlier ones again; None is a
    tenth of the slots' cache, 0 is none.
    """

    def __init__(
        self,
        model: Model,
        slots: int | None = None,
        policy: Policy | None = None,
        *,
        prefix_cache_bytes: int | None = None,
    ):
        if prefix_cache_bytes is not None and not is_int(prefix_cache_bytes):
            raise ValueError(f"prefix_cache_bytes is {prefix_cache_bytes!r}; expected bytes, 0 for none, or None")
        self.model = model
        self._scheduler = model.scheduler(slots, policy)
        tenth = self._scheduler.largest_cache // 10
        self._scheduler.prefixes = PrefixCache(tenth if prefix_cache_bytes is None else prefix_cache_bytes)
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
        drafts: int | None = None,
    ) -> Handle:
        """Queue a prompt (text or token ids) or the messages of a conversation, and return at once.

        tools, thinking: for messages, see `Model.chat`. drafts: steps between two Draft events, None for none.
        ValueError for what cannot be answered; RuntimeError if the engine is closed or has failed.
        """
        request, drafts = self.model.request(prompt, sampling, seed, tools, thinking), draft_interval(drafts)
        handle = Handle(self._cancel)

        def submit() -> None:
            handle.job = self._scheduler.submit(request, drafts)
            self._handles[handle.job] = handle

        with self._changed:
            if self._error is not None:
                raise RuntimeError(f"the engine has failed ({self._error!r}); make a new one")
            if self._closing:
                raise RuntimeError("the engine is closed; make a new one")
            self._open.add(handle)
            self._wanted.append(submit)
            self._changed.notify()
        return handle

    @property
    def stats(self) -> EngineStats:
        """Counters since the start, as of the last round."""
        return replace(self._scheduler.stats)

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

    def _cancel(self, handle: Handle) -> None:
        with self._changed:  # also while closing
            self._wanted.append(lambda: self._scheduler.cancel(handle.job))
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
                handle.end(RuntimeError(f"the engine has failed ({error!r}); make a new one"))

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
        return self._scheduler.busy or bool(self._wanted) or not self._closing
