"""A server's life: warming up, ready, draining; how many requests it takes; and what happens when the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from dgemma_jax.serve.errors import APIError
from dgemma_jax.serve.metrics import LogLine, Metrics
from dgemma_jax.serve.streaming import ClientGone

if TYPE_CHECKING:
    from dgemma_jax.engine.engine import Engine

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.2
T = TypeVar("T")
LAST_WORDS_SECONDS = 2.0  # for cancelled requests to tell their clients


class Ticket:
    """An admitted request. `first_canvas` and `finished` take its times."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.first: float | None = None
        self.latency: float | None = None

    def first_canvas(self) -> None:
        """Called at every canvas; the first counts."""
        self.first = self.first or time.monotonic() - self.began

    def finished(self) -> None:
        """The answer is complete."""
        self.latency = time.monotonic() - self.began


class Lifecycle:
    """Lets in at most `slots + max_queue` answers at a time, and knows whether the server is ready.

    metrics: is told of every finished and every rejected request. dead: called once if the engine fails.
    """

    def __init__(self, engine: Engine, metrics: Metrics, max_queue: int, log: LogLine, log_interval: float):
        self.engine, self.metrics, self.room = engine, metrics, engine.stats.slots + max_queue
        self.open = 0
        self.warm = self.draining = False
        self.dead: Callable[[], None] = lambda: None
        self._over = asyncio.Event()
        self._log, self._log_interval = log, log_interval
        self._latency = 1.0  # seconds, of the requests of late

    @property
    def failed(self) -> str | None:
        """What became of the engine, None while it works."""
        error = self.engine.error
        return None if error is None else f"the engine has failed ({type(error).__name__}); restart the server"

    @property
    def ending(self) -> str | None:
        """Why no request is let in, None if they are."""
        draining = "the server is shutting down; send the request to another one" if self.draining else None
        return self.failed or draining

    @property
    def trouble(self) -> str | None:
        """Why the server is not ready, None if it is."""
        return self.ending or (None if self.warm else "the server is warming up; try again soon")

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """An error of an engine that has failed or was closed becomes APIError 503."""
        try:
            yield
        except RuntimeError as error:
            if self.ending is None:
                raise
            raise APIError(503, self.ending) from error

    @contextlib.contextmanager
    def admit(self, answers: int) -> Iterator[Ticket]:
        """Takes the room of so many answers. APIError 503 while the server ends, 429 while there is no room."""
        if self.ending is not None:
            raise APIError(503, self.ending, headers={"Retry-After": "5"})
        if answers > self.room:
            raise APIError(400, f"the request asks for {answers} answers; this server holds {self.room} at a time", "n")
        if self.open + answers > self.room:
            self.metrics.count_rejected()
            wait = math.ceil(min(60.0, self._latency * answers / self.engine.stats.slots))
            message = f"{self.open} answers are under way and {self.room} the most; try again in {wait} s"
            raise APIError(429, message, code="queue_full", headers={"Retry-After": str(wait)})
        self.open += answers
        ticket = Ticket()
        try:
            yield ticket
        finally:
            self.open -= answers
            if ticket.latency is not None:
                self._latency += 0.1 * (ticket.latency - self._latency)
                self.metrics.observe(ticket.latency, ticket.first)

    async def drain(self, limit: float) -> None:
        """Lets no one in and waits, at most `limit` seconds, for those who are; then ends all that is left."""
        self.draining = True
        if not await self._empty(limit) and self.engine.error is None:
            logger.warning("%d answers are not done after %g s and are cancelled", self.open, limit)
        self._over.set()
        await self._empty(LAST_WORDS_SECONDS)

    async def over(self) -> APIError:
        """What every answer that is still open is told, once there is no time left for it."""
        await self._over.wait()
        return APIError(503, self.failed or "the server is shutting down; the answer was cancelled")

    async def gone(self) -> ClientGone:
        """For requests that are not through even when every client has been told that it is over."""
        await self._over.wait()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        return ClientGone()

    async def _empty(self, limit: float) -> bool:
        end = time.monotonic() + limit
        while self.open and self.engine.error is None and time.monotonic() < end:
            await asyncio.sleep(min(POLL_SECONDS, limit))
        return not self.open

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While the server runs: warms the engine up, watches it, and logs what it does."""
        tasks = [asyncio.create_task(task()) for task in (self._warm_up, self._watch, self._log_lines)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _warm_up(self) -> None:
        with contextlib.suppress(RuntimeError):  # the engine has failed or was closed: told elsewhere
            await detached(self.engine.warmup)
            self.warm = True
            logger.info("ready")

    async def _watch(self) -> None:
        while self.engine.error is None:
            await asyncio.sleep(POLL_SECONDS)
        logger.error("the engine has failed: %r", self.engine.error)
        self.dead()

    async def _log_lines(self) -> None:
        while True:
            await asyncio.sleep(self._log_interval)
            if line := self._log.line(self.engine.stats):
                logger.info(line)


def detached(function: Callable[[], T]) -> asyncio.Future[T]:
    """Runs a function in a thread that the end of the process does not wait for: a compilation takes minutes.

    The thread goes on where the future is cancelled.
    """
    done: Future = Future()
    done.set_running_or_notify_cancel()  # it cannot be stopped

    def work() -> None:
        try:
            done.set_result(function())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return asyncio.wrap_future(done)
