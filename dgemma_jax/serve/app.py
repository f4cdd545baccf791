"""The HTTP application: its routes over one engine."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import dgemma_jax
from dgemma_jax.events import Canvas, Draft
from dgemma_jax.serve import errors, metrics, responses
from dgemma_jax.serve.answers import Answer, TokenTexts, chat_answers, text_answers
from dgemma_jax.serve.errors import APIError
from dgemma_jax.serve.formats import ChatFormat, Format, TextFormat
from dgemma_jax.serve.images import ImageRules
from dgemma_jax.serve.lifecycle import Lifecycle, Ticket, detached
from dgemma_jax.serve.protocol import REFUSED, ChatRequest, CompletionRequest, Ignored
from dgemma_jax.serve.streaming import ClientGone, EventStream, Limit, attended, left, together
from dgemma_jax.text import Event

if TYPE_CHECKING:
    from dgemma_jax.engine.engine import Engine

STATIC = Path(__file__).parent / "static"
DEFAULT_RULES = ImageRules()
IGNORED_HEADER = "X-Ignored-Fields"
T = TypeVar("T")
# The page runs its own scripts and talks to its own server, whatever a model makes it show.
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
DESCRIPTION = f"""OpenAI's interface over DiffusionGemma, with the knobs of diffusion as fields of their own.

Fields that are accepted without effect, and then named in the header {IGNORED_HEADER}:
{", ".join(Ignored.model_fields)}, and those of messages and options that are so described below.

Fields that are refused, like all that are not listed below, unless they hold a value that asks for nothing:

{"".join(f"* {name}: {refusal.why}{chr(10)}" for name, refusal in REFUSED.items())}"""
EVENT = {  # of a stream, for the OpenAPI document
    "type": "object",
    "required": ["data"],
    "properties": {
        "event": {"enum": ["message", "draft", "canvas"], "description": "draft and canvas with stream_drafts only"},
        "data": {"type": "string", "description": "a chunk, a draft, a canvas or an error in JSON; at last [DONE]"},
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {kind: {"model": responses.ErrorResponse} for kind in ("4XX", "5XX")}


def create_app(
    engine: Engine,
    model_name: str,
    *,
    api_key: str | None = None,
    max_queue: int = 64,
    request_timeout: float = 600.0,
    max_body_bytes: int = 16 << 20,
    vllm_metric_names: bool = False,
    log_interval: float = 10.0,
    images: ImageRules = DEFAULT_RULES,
) -> FastAPI:
    """The server of one engine; `app.state.lifecycle` is its Lifecycle.

    model_name: what clients call the model. api_key: demanded on every /v1 route and /metrics, None for none.
    max_queue: answers that may wait for a slot. request_timeout, log_interval: seconds. images: which are read.
    """
    counted = metrics.Metrics(vllm_metric_names, model_name, engine.model.config.canvas_length)
    log = metrics.LogLine(vllm_metric_names, engine.model.config.canvas_length, engine.stats)
    lifecycle = Lifecycle(engine, counted, max_queue, log, log_interval)

    @asynccontextmanager
    async def lifespan(_: FastAPI):
        async with lifecycle.running():
            yield

    app = FastAPI(
        title="dgemma",
        version=dgemma_jax.__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
        responses=ERRORS,
    )
    app.state.lifecycle = lifecycle
    errors.install(app)
    limits = {"max_body_bytes": max_body_bytes, "limit": request_timeout}
    app.add_middleware(Gatekeeper, lifecycle=lifecycle, api_key=api_key, **limits)
    _add_completions(app, _Service(engine, model_name, lifecycle, request_timeout), images)
    _add_models(app, engine, model_name)
    _add_probes(app, lifecycle)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return app


def _add_completions(app: FastAPI, service: _Service, images: ImageRules) -> None:
    streamed: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"itemSchema": EVENT}}}}

    @app.post("/v1/chat/completions", response_model=responses.ChatCompletion, responses=streamed)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """The next turn of a conversation."""
        return await service.respond(request, body, partial(chat_answers, images=images), ChatFormat)

    @app.post("/v1/completions", response_model=responses.TextCompletion, responses=streamed)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """What follows on plain prompts."""
        return await service.respond(request, body, text_answers, TextFormat)


def _add_models(app: FastAPI, engine: Engine, model_name: str) -> None:
    card = responses.ModelCard(id=model_name, created=int(time()), max_model_len=engine.model.max_model_len)

    @app.get("/v1/models")
    async def models() -> responses.ModelList:
        """The one model that is served."""
        return responses.ModelList(data=[card])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> responses.ModelCard:
        """A model by its name."""
        check_model(name, model_name)
        return card


def _add_probes(app: FastAPI, lifecycle: Lifecycle) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process runs."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests are answered at once: 503 while warming up, shutting down, or when the engine has failed."""
        trouble = lifecycle.trouble
        return JSONResponse({"status": trouble or "ready"}, 503 if trouble else 200)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def exposition() -> Response:
        """Counters for Prometheus."""
        text = lifecycle.metrics.exposition(lifecycle.engine.stats)
        return Response(text, headers={"Content-Type": metrics.CONTENT_TYPE})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers=PAGE_HEADERS)


def check_model(asked: str | None, served: str) -> None:
    """APIError 404 for a model that is not served here."""
    if asked not in (None, served):
        message = f"the model {asked!r:.100} is not served here; this one is: {served}"
        raise APIError(404, message, "model", "model_not_found")


class _Service:
    """Answers requests, streamed or whole."""

    def __init__(self, engine: Engine, model_name: str, lifecycle: Lifecycle, limit: float):
        self.engine, self.model_name, self.lifecycle, self.limit = engine, model_name, lifecycle, limit
        self.texts = TokenTexts(engine.model.required_tokenizer)

    async def respond(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        prepare: Callable[[Engine, Any], list[Answer]],
        format: type[Format],
    ) -> Response:
        """The response to a request that is well-formed."""
        check_model(body.model, self.model_name)
        limit = Limit(self.limit)
        count = (body.n or 1) * (len(body.prompts()) if isinstance(body, CompletionRequest) else 1)
        with ExitStack() as stack:
            ticket = stack.enter_context(self.lifecycle.admit(count))
            try:
                async with limit.kept():
                    answers, ignored = await self._attended(request, self._prepared(prepare, body, stack))
                    headers = {IGNORED_HEADER: ", ".join(ignored)} if ignored else {}
                    shown = format(self.engine.model.required_tokenizer, self.texts, self.model_name)
                    if not body.stream:
                        return await self._attended(request, self._whole(answers, shown, ticket, headers))
            except ClientGone:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:
                raise errors.shaped(error) from error
            write = partial(self._stream, body=body, answers=answers, shown=shown, ticket=ticket)
            return EventStream(write, limit, self.lifecycle.over, stack.pop_all().close, headers)

    async def _attended(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """The result of work, unless the client leaves before, or the server ends."""
        return await attended(work, left(request.receive), self.lifecycle.over())

    async def _prepared(
        self, prepare: Callable[[Engine, Any], list[Answer]], body: Any, room: ExitStack
    ) -> tuple[list[Answer], list[str]]:
        """The answers, not yet begun, and the fields that have no effect.

        In a thread, because rendering and encoding a long prompt takes its time. It cannot be stopped: where nobody
        waits for it any more, it keeps its room until it is through.
        """
        work = detached(lambda: (prepare(self.engine, body), body.ignored()))
        try:
            return await asyncio.shield(work)
        except ValueError as error:
            raise errors.bad_request(error, type(body).model_fields) from error
        finally:
            if not work.done():
                kept = room.pop_all()
                # Its error, if it has one, is asked for so that asyncio does not report it as forgotten.
                work.add_done_callback(lambda work: (kept.close(), work.cancelled() or work.exception()))

    async def _whole(
        self, answers: Sequence[Answer], shown: Format, ticket: Ticket, headers: Mapping[str, str]
    ) -> Response:
        told: list[list[Event]] = [[] for _ in answers]

        async def collect(answer: Answer) -> None:
            async for event, new in answer.events():
                if isinstance(event, Canvas):
                    ticket.first_canvas()
                shown.hear(new)
                told[answer.index] += new

        with self.lifecycle.explaining():
            await together(*map(collect, answers))
        ticket.finished()
        return Response(shown.whole(answers, told).model_dump_json(), headers=headers, media_type="application/json")

    async def _stream(
        self,
        out: EventStream,
        body: ChatRequest | CompletionRequest,
        answers: Sequence[Answer],
        shown: Format,
        ticket: Ticket,
    ) -> None:
        drafts = isinstance(body, ChatRequest) and bool(body.stream_drafts)
        with self.lifecycle.explaining():
            await together(*(self._stream_one(out, answer, shown, ticket, drafts) for answer in answers))
        if body.usage_at_end:
            out.put(shown.last_of_all(shown.usage(answers)))
        ticket.finished()

    async def _stream_one(self, out: EventStream, answer: Answer, shown: Format, ticket: Ticket, drafts: bool) -> None:
        canvas = 0
        async for event, new in answer.events():
            if drafts and isinstance(event, Draft):
                out.offer(self._draft(answer, canvas, event), "draft")
            if isinstance(event, Canvas):
                ticket.first_canvas()
                if drafts:
                    texts = self.texts.all(event.tokens)
                    out.put({"choice": answer.index, "canvas": canvas, "steps": event.steps, "tokens": texts}, "canvas")
                canvas += 1
            shown.hear(new)
            for chunk in shown.chunks(answer, new):
                out.put(chunk)
        for chunk in shown.last(answer):
            out.put(chunk)

    def _draft(self, answer: Answer, canvas: int, draft: Draft) -> dict[str, Any]:
        return {
            "choice": answer.index,
            "canvas": canvas,
            "step": draft.step,
            "tokens": self.texts.all(draft.tokens),
            "accepted": draft.accepted,
            "entropy": draft.entropies,
            "mean_entropy": draft.entropy,
        }


class Gatekeeper:
    """Turns away requests without the key, and bodies that are too long or take too long to come, before anything of
    them is kept. limit: seconds for a whole body. Clients that neither send nor read do not hold up the server's end.
    """

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, api_key: str | None, max_body_bytes: int, limit: float):
        self.app, self.lifecycle, self.max_body_bytes, self.limit = app, lifecycle, max_body_bytes, limit
        self.key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            self._check_length(headers.get(b"content-length", b"0"))
        except APIError as error:
            await error.response()(scope, receive, send)
            return
        with suppress(ClientGone):
            await attended(self.app(scope, self._bounded(receive), send), self.lifecycle.gone())

    def _check_key(self, path: str, given: bytes) -> None:
        guarded = path.startswith("/v1") or path == "/metrics"
        if self.key is None or not guarded:
            return
        scheme, _, key = given.partition(b" ")
        if not hmac.compare_digest(key, self.key) or scheme.lower() != b"bearer":
            message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            raise APIError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _check_length(self, given: bytes) -> None:
        if given.isdigit() and int(given) > self.max_body_bytes:
            raise self._too_long()

    def _bounded(self, receive: Receive) -> Receive:
        seen, end = 0, asyncio.get_running_loop().time() + self.limit

        async def bounded() -> Message:
            nonlocal seen, end
            try:
                async with asyncio.timeout_at(end):
                    message = await (receive() if end is None else attended(receive(), self.lifecycle.over()))
            except TimeoutError:
                raise self._closing(408, f"the body did not come within {self.limit:g} s; send it at once") from None
            if not message.get("more_body"):
                end = None  # what comes behind the body is the client's leaving
            seen += len(message.get("body", b""))
            if seen > self.max_body_bytes:
                raise self._too_long()
            return message

        return bounded

    def _too_long(self) -> APIError:
        what = f"the body is longer than {self.max_body_bytes:,} bytes, this server's limit; send less"
        return self._closing(413, what)

    @staticmethod
    def _closing(status: int, message: str) -> APIError:
        return APIError(status, message, headers={"Connection": "close"})
