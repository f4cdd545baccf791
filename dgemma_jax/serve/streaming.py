"""Server-sent events to one client, and what ends an answer early: the client leaves, or time runs out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dgemma_jax.serve.errors import APIError, shaped

HEARTBEAT_SECONDS = 5.0
LINGER_SECONDS = 30.0  # beyond the limit of a request
MOST_WAITING = 256  # events, beyond which some are left out
T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """The results of all; the first error is raised, and what still runs then is cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def attended(work: Awaitable[T], *ends: Awaitable[Exception]) -> T:
    """The result of `work`, which is cancelled as soon as one of `ends` has a result: that is raised."""
    main, others = asyncio.ensure_future(work), [asyncio.ensure_future(end) for end in ends]
    tasks = [main, *others]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not main.done():
            raise next(task for task in others if task.done()).result()
        return main.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def left(receive: Receive) -> ClientGone:
    """Once the client has left. receive: of a request whose body is read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    return ClientGone()


class Limit:
    """So many seconds from now for a request, all its parts together."""

    def __init__(self, seconds: float):
        self.seconds, self._end = seconds, asyncio.get_running_loop().time() + seconds

    def linger(self) -> asyncio.Timeout:
        """The time to the end and then some, for a client to read what is there."""
        return asyncio.timeout_at(self._end + LINGER_SECONDS)

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """APIError 504 if the block goes on beyond the end."""
        try:
            async with asyncio.timeout_at(self._end):
                yield
        except TimeoutError:
            message = f"no answer within {self.seconds:g} s, this server's limit; ask for fewer tokens"
            raise APIError(504, message, code="timeout") from None


class EventStream(Response):
    """A response of server-sent events.

    write: given the stream, puts all events of an answer into it. limit, end: what may end that early, an end is for
    `attended`. done: called, perhaps twice, when no more events will come; a client that reads slowly holds up neither
    the engine nor this.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        write: Callable[[EventStream], Coroutine[Any, Any, None]],
        limit: Limit,
        end: Callable[[], Coroutine[Any, Any, Exception]],
        done: Callable[[], object],
        headers: Mapping[str, str] | None = None,
    ):
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"} | dict(headers or {}))
        self._write, self._limit, self._end, self._done = write, limit, end, done
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()

    def put(self, data: BaseModel | Mapping[str, Any], name: str | None = None) -> None:
        """Adds one event."""
        text = data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data, separators=(",", ":"))
        self._texts.put_nowait(f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n")

    def offer(self, data: BaseModel | Mapping[str, Any], name: str) -> None:
        """Adds an event that a client can do without, unless that reads so slowly that many wait."""
        if self._texts.qsize() < MOST_WAITING:
            self.put(data, name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._limit.linger():
                await attended(together(self._produce(), self._deliver(send)), left(receive))
        except (ClientGone, TimeoutError):
            pass
        finally:
            self._done()

    async def _produce(self) -> None:
        try:
            async with self._limit.kept():
                await attended(self._write(self), self._end())
        except Exception as error:
            self._texts.put_nowait(f"data: {shaped(error).body()}\n\n")
        finally:
            self._done()
        self._texts.put_nowait("data: [DONE]\n\n")
        self._texts.put_nowait(None)

    async def _deliver(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while (text := await self._next()) is not None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> str | None:
        try:
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                return await self._texts.get()
        except TimeoutError:
            return ": waiting\n\n"
