"""Whatever goes wrong, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from reprlib import Repr
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from dgemma_jax.serve.protocol import REFUSED

logger = logging.getLogger(__name__)
_SHORT = Repr()  # for values of any size and depth
_SHORT.maxstring = _SHORT.maxother = 60


class APIError(HTTPException):
    """What a client is told instead of an answer. param: the request's field that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, dict(headers) if headers else None)
        self.param, self.code = param, code

    def body(self) -> str:
        """The JSON text; ASCII, because a message may quote what UTF-8 cannot carry."""
        kind = {429: "rate_limit_error"}.get(self.status_code)
        kind = kind or ("invalid_request_error" if self.status_code < 500 else "server_error")
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error})

    def response(self) -> Response:
        """The whole HTTP response."""
        return Response(self.body(), self.status_code, self.headers, media_type="application/json")


def bad_request(error: ValueError, fields: Mapping[str, Any]) -> APIError:
    """What the library refuses; its line begins with the name of a field where one is to blame."""
    message = str(error).replace("\n", " ")
    name = message.split()[0] if message.strip() else ""
    return APIError(400, message, name if name in fields else None)


def shaped(error: Exception) -> APIError:
    """Any error as one of ours; what nobody expected is logged and told without its text."""
    if isinstance(error, APIError):
        return error
    logger.error("a request failed: %s", type(error).__name__, exc_info=error)
    return APIError(500, f"the server failed at this request ({type(error).__name__}); see its log")


def install(app: FastAPI) -> None:
    """Makes the app answer every error in this shape."""

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if not isinstance(error, APIError):
            error = APIError(error.status_code, _standard(request, error), headers=error.headers)
        return error.response()

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _invalid(error.errors(), error.body).response()

    async def unexpected(_: Request, error: Exception) -> Response:
        return APIError(500, f"the server failed at this request ({type(error).__name__}); see its log").response()

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unexpected)  # the server logs it


def _standard(request: Request, error: HTTPException) -> str:
    """The line for an error of the framework."""
    what = f"{request.method} {request.url.path!r:.100}"
    if error.status_code == 404:
        return f"there is no {what}; /docs lists what there is"
    if error.status_code == 405:
        return f"{what} is not allowed; /docs lists the methods"
    if error.status_code == 400:
        return (
            "the body cannot be read as JSON, or is nested too deeply, or holds too long a number; send a JSON object"
        )
    return str(error.detail)


def _invalid(problems: Sequence[Mapping[str, Any]], body: Any) -> APIError:
    """Of pydantic's problems the one that lies deepest, then farthest: where a field may be of several kinds, that is
    the kind which fits best. With it goes what else its field could have been."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is not valid JSON: {first['ctx']['error']} (character {first['loc'][-1]})")
    if not isinstance(body, Mapping):
        return APIError(400, "the body is no JSON object; send one, with the header Content-Type: application/json")
    if first["type"] == "value_error":  # of several fields together
        return bad_request(first["ctx"]["error"], body)
    paths = [_path(problem, body) for problem in problems]
    path = max(paths, key=lambda path: (len(path), [part for part in path if isinstance(part, int)]))
    first = problems[paths.index(path)]
    if not path:
        return APIError(400, f"the body cannot be used: {first['msg']}")
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    name = str(path[-1])
    param = param if param.isprintable() and param else repr(param)
    if first["type"] == "missing":
        return APIError(400, f"{param!s:.200} is missing; /docs lists the fields", param[:200])
    if first["type"] == "extra_forbidden":
        why = REFUSED[name].why if name in REFUSED else "there is no such field; /docs lists what there is"
        return APIError(400, f"{param!s:.200} cannot be honoured: {why}", param[:200])
    if first["type"] == "union_tag_invalid":  # of a message's part
        kind, known = _SHORT.repr(first["ctx"]["tag"]), first["ctx"]["expected_tags"]
        why = f"expected {known}; the model reads text and images, no audio, no video and no files"
        return APIError(400, f"{param!s:.200}.type is {kind}: {why}", f"{param[:200]}.type")
    expected = dict.fromkeys(problem["msg"] for problem, own in zip(problems, paths, strict=True) if own == path)
    return APIError(400, f"{param!s:.200} is {_SHORT.repr(first['input'])}: {'; or: '.join(expected)}", param[:200])


def _path(problem: Mapping[str, Any], value: Any) -> list[str | int]:
    """The part of pydantic's location that leads through the body: it also names the members of unions."""
    path: list[str | int] = []
    location = problem["loc"][1:]
    for part in location:
        known = isinstance(value, Mapping) and part in value
        if known or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            path.append(part)
            value = value[part]
    if problem["type"] == "missing":
        path.append(location[-1])
    return path or list(location[:1])
