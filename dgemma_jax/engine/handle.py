"""What a caller holds of a request: its events as they happen, its result, and the switch to cancel it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from dgemma_jax.events import Canvas, Completion, Draft, Finished

if TYPE_CHECKING:
    from dgemma_jax.engine.job import Job

Event = Draft | Canvas | Finished


class Handle:
    """A request on its way, as `Engine.submit` gives it: iterate over its events (`for` and `async for`, each from the
    first event on, `once` without keeping them), await it, wait for its result, or cancel it.
    """

    def __init__(self, cancel: Callable[[Handle], None]):
        self.job: Job | None = None
        self._request_cancel = cancel
        self._events: list[Event] = []
        self._result: Completion | None = None
        self._ended, self._error = False, None
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], object]] = []

    @property
    def done(self) -> bool:
        """Whether the request is answered, cancelled or failed."""
        return self._ended

    def cancel(self) -> None:
        """End the request soon, in the middle of a canvas too; its result is what it had, with reason "cancelled"."""
        if not self._ended:
            self._request_cancel(self)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the answer. TimeoutError after `timeout` seconds; whatever the request failed with is raised.

        Ctrl-C while waiting cancels the request.
        """
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._ended, timeout):
                    raise TimeoutError(f"no answer within {timeout} seconds; the request goes on")
        except KeyboardInterrupt:
            self.cancel()
            raise
        return self._completion()

    def __iter__(self) -> Iterator[Event]:
        seen = 0
        try:
            while True:
                with self._changed:
                    while not self._ended and len(self._events) == seen:
                        self._changed.wait()
                    events = self._events[seen:]
                if not events:
                    self._raise()
                    return
                for event in events:
                    seen += 1
                    yield event
        except KeyboardInterrupt:
            self.cancel()
            raise

    async def __aiter__(self) -> AsyncIterator[Event]:
        seen = 0
        while True:
            await self._news(seen)
            events = self._events[seen:]
            if not events:
                self._raise()
                return
            seen += len(events)
            for event in events:
                yield event

    async def once(self) -> AsyncIterator[Event]:
        """Its events for the only one who asks for them, not kept: those of a long answer with drafts fill memory."""
        while True:
            await self._news(0)
            with self._changed:
                events, self._events = self._events, []
            if not events:
                self._raise()
                return
            for event in events:
                yield event

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._wait().__await__()

    async def _wait(self) -> Completion:
        while not self._ended:
            await self._news(len(self._events))
        return self._completion()

    async def _news(self, seen: int) -> None:
        """Until there is an event beyond the first `seen`, or the end."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            if self._ended or len(self._events) > seen:
                return
            self._listeners.append(lambda: loop.call_soon_threadsafe(arrived.set))
        await arrived.wait()

    def _completion(self) -> Completion:
        self._raise()
        assert self._result is not None  # the last thing before the end
        return self._result

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # For the engine.

    def put(self, event: Event) -> None:
        """Tell an event."""
        with self._changed:
            self._events.append(event)
            if isinstance(event, Finished):
                self._result = event.completion
            self._tell()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will come; error: what the request failed with."""
        with self._changed:
            self._ended, self._error = True, error
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            with contextlib.suppress(RuntimeError):  # the caller's event loop is closed
                listener()
