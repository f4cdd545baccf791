"""The thread that owns a scheduler, and what other threads ask of it."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from dgemma_jax.engine.handle import Handle
from dgemma_jax.events import Failed, Finished

if TYPE_CHECKING:
    from dgemma_jax.engine.job import Event, Job
    from dgemma_jax.engine.request import Request
    from dgemma_jax.engine.scheduler import Scheduler

FAILED = "the engine has failed ({!r}); make a new one"
Result = TypeVar("Result")
_running: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """Serves requests until it is closed. error: what ended it before that, None while it is well.

    It may outlive the engine that it belongs to, to answer what is open; then it frees the device's memory and ends.
    """

    def __init__(self, scheduler: Scheduler):
        self.error: BaseException | None = None
        self._scheduler = scheduler
        self._handles: dict[Job, Handle] = {}
        self._open: set[Handle] = set()  # not yet ended
        self._wanted: list[Callable[[], None]] = []  # what callers ask for, done by the thread
        self._changed = threading.Condition()
        self._closing = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="dgemma-engine", daemon=True)
        self._thread.start()
        _running.add(self)

    def submit(self, request: Request, drafts: int | None) -> Handle:
        """Queue a request. RuntimeError if the worker is closed or has failed."""
        handle = Handle(self._cancel)

        def submit() -> None:
            handle.job = self._scheduler.submit(request, drafts)
            self._handles[handle.job] = handle

        with self._changed:
            self._check_open()
            self._open.add(handle)
            self._wanted.append(submit)
            self._changed.notify()
        return handle

    def call(self, function: Callable[[], Result]) -> Result:
        """What `function` returns when the thread calls it between two rounds. RuntimeError as for `submit`."""
        done: Future[Result] = Future()
        with self._changed:
            self._check_open()
            self._wanted.append(lambda: done.set_result(function()))
            self._changed.notify()
        while True:
            try:
                return done.result(timeout=1)
            except TimeoutError:
                if self.error is not None:
                    raise RuntimeError(FAILED.format(self.error)) from self.error

    def close(self, cancel: bool = False, wait: bool = True) -> None:
        """Take no more requests; cancel: end the open ones with what they have. wait: until they are all answered."""
        with self._changed:
            if cancel:
                self._wanted.append(self._cancel_all)
            self._closing = True
            self._changed.notify()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def _check_open(self) -> None:
        if os.getpid() != self._process:  # a fork has no other thread
            raise RuntimeError("the engine belongs to the process that this one was forked from; make a new one")
        if self.error is not None:
            raise RuntimeError(FAILED.format(self.error))
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
        """Until closed and idle: do what is wanted, then one round of the scheduler."""
        try:
            while self._next():
                for job, event in self._scheduler.advance():
                    self._tell(job, event)
        except BaseException as error:  # nothing that was donated to the device can be trusted after it
            with self._changed:
                self.error = error
            for handle in self._open:
                handle.end(RuntimeError(FAILED.format(error)))
        self._scheduler.release()

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


@atexit.register
def _close_all() -> None:
    """No thread may be inside a program of the device while the interpreter is taken down."""
    for worker in list(_running):
        worker.close(cancel=True)
