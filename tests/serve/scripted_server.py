"""A chat completion server on 127.0.0.1 that answers as it is told, and may break off."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def chunk(usage: dict | None = None, finish: str | None = None, **delta) -> str:
    choices = [] if usage else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return "data: " + json.dumps({"object": "chat.completion.chunk", "choices": choices, "usage": usage}) + "\n\n"


ROLE, TEXT, END, LAST = chunk(role="assistant", content=""), chunk(content="hi"), chunk(finish="stop"), chunk(USAGE)
DONE = "data: [DONE]\n\n"
ANSWER = (ROLE, ": still denoising\n\n", TEXT, END, LAST, DONE)


class Fake(ThreadingHTTPServer):
    """Answers the n-th chat completion with what reply(n, body) yields: pieces of the stream, or first a status.

    A stream that ends with None breaks off. metrics: what /metrics shows, one text per reading.
    """

    daemon_threads = False  # closing waits for them, so that none outlives its test

    def __init__(self, reply: Callable[[int, dict], Iterator] = lambda index, body: iter(ANSWER), metrics=()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.metrics = reply, list(metrics)
        self.bodies: list[dict] = []
        self.headers: list = []
        self.lock = threading.Lock()
        self.open = self.most_open = 0
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that hangs up is none
            super().handle_error(request, client_address)

    def __exit__(self, *error) -> None:
        self.shutdown()
        super().__exit__(*error)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fake

    def log_message(self, *arguments) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/metrics" and self.server.metrics:
            self.send(200, self.server.metrics.pop(0))
        elif self.path == "/v1/models":
            self.send(200, json.dumps({"object": "list", "data": [{"id": "fake"}]}))
        else:
            self.send(404, "<html>nothing here</html>")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            index = len(self.server.bodies)
            self.server.bodies.append(body)
            self.server.headers.append(self.headers)
            self.server.open += 1
            self.server.most_open = max(self.server.most_open, self.server.open)
        try:
            self.answer(self.server.reply(index, body))
        finally:
            with self.server.lock:
                self.server.open -= 1

    def answer(self, pieces: Iterator) -> None:
        piece = next(pieces)
        if isinstance(piece, int):
            self.send(piece, next(pieces))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while piece is not None:
            data = piece.encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            piece = next(pieces, "")
            if piece == "":
                self.wfile.write(b"0\r\n\r\n")
                return
        self.close_connection = True

    def send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())
