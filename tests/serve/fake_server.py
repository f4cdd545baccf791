"""A server that speaks the protocol of `dgemma serve` from a script, for the page's test. It needs no model."""

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import dgemma_jax

STATIC = Path(dgemma_jax.__file__).parent / "serve" / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
WIDTH = 32
KEY = "sesame"
MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"
STORY = (
    "Block diffusion writes a whole block of text at once. It starts from random tokens, looks at all of them in both"
    " directions, keeps what it is sure of and draws the rest again. After a few steps nothing changes any more: the"
    " block is committed, and the next one begins behind it."
)
THOUGHT = "The list has four items.\nReading them from the end gives 4, 93, 7, 12."
WEATHER = '{"city":"Oslo"}'


def pieces(text: str) -> list[str]:
    """Text cut into something like tokens: words with the blank before them, marks and line ends by themselves."""
    words = text.replace("\n", " \n").replace(",", " ,").replace(".", " .").replace(":", " :").split(" ")
    return [word if word in "\n,.:" or index == 0 else " " + word for index, word in enumerate(words)]


@dataclass
class Answer:
    """What the model says to a prompt: canvases of tokens, and the deltas that each canvas brings."""

    canvases: list[list[str]]
    deltas: list[list[dict]]
    finish: str = "stop"
    broken: str = ""  # "cut": the stream ends early; "error": an error event instead of the second canvas
    steps: int = 6


def spoken(text: str, **more) -> Answer:
    """A plain answer, one delta per canvas."""
    tokens = pieces(text)
    canvases = [tokens[i : i + WIDTH] for i in range(0, len(tokens), WIDTH)]
    deltas = [[{"content": part}] for part in _split(text, len(canvases))]
    return Answer(canvases, deltas, **more)


def answer_to(request: dict) -> Answer:
    """The script."""
    last = request["messages"][-1]
    text = last["content"]
    if isinstance(text, list):
        return spoken(f"{len(text) - 1} images")
    if last["role"] == "tool":
        return spoken(f"The weather in Oslo: {text}.")
    if "weather" in text and request.get("tools"):
        call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
        more = {"index": 0, "function": {"arguments": WEATHER}}
        tokens = ["<|tool_call>", "call", ":", "get", "_weather", "{", "city", ":", '<|"|>', "Oslo", '<|"|>', "}"]
        deltas = [{"tool_calls": [call]}, {"tool_calls": [more]}]
        return Answer([[*tokens, "<tool_call|>"]], [deltas], "tool_calls")
    if request["chat_template_kwargs"]["enable_thinking"]:
        tokens = ["<|channel>", "thought", "\n", *pieces(THOUGHT), "\n", "<channel|>", *pieces("4 93 7 12")]
        parts = [{"reasoning_content": part, "reasoning": part} for part in _split(THOUGHT, 2)]
        return Answer([tokens], [[*parts, {"content": "4 93 7 12"}]])
    if "markup" in text:
        return spoken(MARKUP)
    if "breaks" in text:
        return spoken(STORY, broken="cut")
    if "fails" in text:
        return spoken(STORY, broken="error")
    if "for ever" in text:
        return spoken(" ".join([STORY] * 40), finish="length", steps=40)
    if "story" in text:
        return spoken(STORY, finish="length" if "cut" in text else "stop")
    return spoken("4 93 7 12")


def drafts(tokens: list[str], steps: int, canvas: int) -> Iterator[dict]:
    """Something like a denoising: each position turns from a wrong token, of which the step is unsure, to the right."""
    rng = random.Random(canvas)
    filled = [*tokens, "<turn|>"][:WIDTH]
    filled += ["<eos>"] * (WIDTH - len(filled))
    settled = [rng.randint(1, steps) for _ in filled]
    wrong = sorted(set(pieces(STORY)))
    for step in range(1, steps + 1):
        accepted = [step >= at for at in settled]
        entropy = [rng.uniform(0, 0.02) if ok else rng.uniform(0.2, 4 / step) for ok in accepted]
        right = [ok or rng.random() < 0.3 for ok in accepted]
        shown = [token if found else rng.choice(wrong) for token, found in zip(filled, right, strict=True)]
        yield {
            "choice": 0,
            "canvas": canvas,
            "step": step,
            "tokens": shown,
            "accepted": accepted,
            "entropy": entropy,
            "mean_entropy": sum(entropy) / WIDTH,
        }


@dataclass
class FakeServer:
    """Serves the page and the script on a free loopback port; what was asked is kept in `requests`."""

    pause: float = 0.02  # seconds per denoising step
    key: str | None = None
    requests: list[dict] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)  # a client left in the middle

    def __enter__(self) -> "FakeServer":
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": self}))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def do_GET(self):
        path = urlsplit(self.path).path
        if path == "/v1/models":
            if self._allowed():
                self._json(200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]})
            return
        file = STATIC / ("index.html" if path == "/" else path.removeprefix("/static/"))
        if file.is_file() and file.parent == STATIC:
            self._head(200, TYPES[file.suffix], {"Content-Security-Policy": POLICY})
            self.wfile.write(file.read_bytes())
        else:
            self._error(404, f"{path} is not here")

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            return
        self.fake.requests.append(request)
        text = json.dumps(request["messages"][-1]["content"])
        if "refuse" in text:
            self._error(400, "entropy_bound: expected a number above 0")
        elif "busy" in text:
            self._error(429, "64 requests are waiting", {"Retry-After": "7"})
        else:
            self._stream(answer_to(request))

    def _stream(self, answer: Answer) -> None:
        self._head(200, "text/event-stream")
        try:
            for event in self._events(answer):
                self.wfile.write(event.encode())
        except (BrokenPipeError, ConnectionResetError):
            self.fake.hung_up.set()

    def _events(self, answer: Answer) -> Iterator[str]:
        yield _chunk({"role": "assistant", "content": ""})
        yield ": still reading\n\n"
        for index, (tokens, deltas) in enumerate(zip(answer.canvases, answer.deltas, strict=True)):
            for draft in drafts(tokens, answer.steps, index):
                time.sleep(self.fake.pause)
                yield f"event: draft\ndata: {json.dumps(draft)}\n\n"
            done = {"choice": 0, "canvas": index, "steps": answer.steps, "tokens": tokens}
            yield f"event: canvas\r\ndata: {json.dumps(done)}\r\n\r\n"  # either kind of line end is allowed
            if answer.broken == "cut":
                return
            for delta in deltas:
                yield _chunk(delta)
            if answer.broken == "error":
                yield _data({"error": {"message": "the device is gone", "type": "server_error", "code": None}})
                return
        yield _chunk({}, answer.finish)
        yield _data({"choices": [], "usage": _usage(answer)})
        yield "data: [DONE]\n\n"

    def _allowed(self) -> bool:
        if self.fake.key is None or self.headers["Authorization"] == f"Bearer {self.fake.key}":
            return True
        self._error(401, "no valid API key")
        return False

    def _error(self, status: int, message: str, headers: dict | None = None) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        self._json(status, {"error": error}, headers)

    def _json(self, status: int, value: dict, headers: dict | None = None) -> None:
        self._head(status, "application/json", headers)
        self.wfile.write(json.dumps(value).encode())

    def _head(self, status: int, kind: str, headers: dict | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Cache-Control": "no-store", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_) -> None:
        pass


def _chunk(delta: dict, finish: str | None = None) -> str:
    return _data(
        {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    )


def _data(value: dict) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _usage(answer: Answer) -> dict:
    tokens, steps = sum(map(len, answer.canvases)), answer.steps * len(answer.canvases)
    diffusion = {"canvases": len(answer.canvases), "denoising_steps": steps, "tokens_per_step": tokens / steps}
    return {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens, "diffusion": diffusion}


def _split(text: str, parts: int) -> list[str]:
    size = -(-len(text) // parts)
    return [text[i * size : (i + 1) * size] for i in range(parts)]
