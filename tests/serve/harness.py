"""A server on a free loopback port, and an engine that says what a test wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

import dgemma_jax as dg
from dgemma_jax.engine.handle import Handle
from dgemma_jax.engine.request import Answer, Request
from dgemma_jax.engine.stats import EngineStats
from dgemma_jax.serve.app import create_app

NAME = "scripted"


@contextmanager
def serving(engine, **options) -> Iterator[str]:
    """The address of a running server."""
    app = create_app(engine, NAME, **options)
    quiet = {"log_level": "warning", "access_log": False}
    config = uvicorn.Config(app, port=0, http="h11", timeout_graceful_shutdown=5, ws="none", **quiet)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class ScriptedEngine:
    """Says `script(request)` behind what is pinned, canvas by canvas; padding follows on a stop token.

    delay: seconds per canvas. The requests it was given are kept in `requests`.
    """

    def __init__(self, model: dg.Model, script: Callable[[Request], str], slots: int = 4, delay: float = 0.0):
        self.model, self.script, self.delay = model, script, delay
        self.stats, self.error = EngineStats(slots=slots), None
        self.requests: list[Request] = []
        self.cancelled: list[Request] = []
        self._slots, self._closed = threading.Semaphore(slots), False
        self._flags: dict[Handle, threading.Event] = {}

    def warmup(self) -> float:
        return 0.0

    def submit_request(self, request: Request, drafts: int | None = None) -> Handle:
        if self.error is not None or self._closed:
            raise RuntimeError("the engine is closed")
        flag = threading.Event()
        handle = Handle(lambda _: flag.set())
        self.requests.append(request)
        self._flags[handle] = flag
        threading.Thread(target=self._work, args=(request, drafts, handle, flag), daemon=True).start()
        return handle

    def close(self, cancel: bool = False) -> None:
        self._closed = True
        for flag in [*self._flags.values()] if cancel else []:
            flag.set()

    def fail(self, error: BaseException) -> None:
        """The worker dies."""
        self.error = error
        for handle in self._flags:
            if not handle.done:
                handle.end(RuntimeError(f"the engine has failed ({error!r})"))

    def _work(self, request: Request, drafts: int | None, handle: Handle, flag: threading.Event) -> None:
        with self._slots:
            answer = Answer(request, self.model.tokenizer)
            try:
                for canvas in self._canvases(request):
                    if self.delay:
                        flag.wait(self.delay)
                    if flag.is_set() or self.error is not None:
                        break
                    steps = 2
                    for step in range(1, steps + 1) if drafts else ():
                        handle.put(dg.Draft(canvas, step, [True] * len(canvas), [0.5] * len(canvas)))
                    top = [[(id, -0.25), (7, -2.0)][: request.sampling.top_logprobs or 0] for id in canvas]
                    handle.put(answer.take(canvas, [-0.25] * len(canvas), steps, top))
                    if answer.finish_reason:
                        break
                else:
                    answer.finish_reason = "length"
            except Exception as error:
                handle.end(error)
                return
            if self.error is not None:
                return
            if answer.finish_reason is None:
                answer.finish_reason = "cancelled"
                self.cancelled.append(request)
            handle.put(dg.Finished(answer.completion()))
            handle.end()
            self._flags.pop(handle, None)

    def _canvases(self, request: Request) -> Iterator[list[int]]:
        width = self.model.config.canvas_length
        ids = [*request.sampling.canvas, *self.model.tokenizer.encode(self.script(request))]
        for at in range(0, max(1, len(ids)), width):
            canvas = ids[at : at + width]
            ended = bool(canvas) and canvas[-1] in request.sampling.stop_token_ids
            yield canvas + [0] * (width - len(canvas) if ended else 0)
