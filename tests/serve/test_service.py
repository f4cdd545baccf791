"""The server under strain: full queues, clients that leave or read slowly, time limits, an engine that dies."""

import asyncio
import json
import logging
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from dgemma_jax.engine.stats import EngineStats
from dgemma_jax.serve import app as app_module
from dgemma_jax.serve import streaming
from dgemma_jax.serve.answers import chat_answers
from dgemma_jax.serve.app import create_app
from tests.serve.harness import NAME, ScriptedEngine, serving

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
FINE = "fine<turn|>"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {{}}\r\n\r\n"


def scripted(tiny, text=FINE, **options):
    return ScriptedEngine(tiny, lambda request: text, **options)


def error_of(response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and "\n" not in error["message"]
    return error


def eventually(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def address_of(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def test_a_full_queue_turns_requests_away(tiny):
    gate = threading.Event()
    engine = ScriptedEngine(tiny, lambda request: gate.wait(60) and FINE, slots=2)
    with serving(engine, max_queue=3) as url, httpx2.Client(base_url=url, timeout=60) as http:
        with ThreadPoolExecutor(12) as pool:
            pending = [pool.submit(http.post, CHAT, json=HELLO) for _ in range(12)]
            eventually(lambda: sum(one.done() for one in pending) == 7)
            gate.set()
        answers = [one.result() for one in pending]
        assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 7
        for answer in answers:
            if answer.status_code == 429:
                assert error_of(answer)["code"] == "queue_full"
                assert 1 <= int(answer.headers["retry-after"]) <= 60
            else:
                assert answer.json()["choices"][0]["message"]["content"] == "fine"
        rejected = re.search(r'dgemma_requests_total\{.*outcome="rejected"\} ([\d.]+)', http.get("/metrics").text)
        assert float(rejected[1]) == 7
        assert http.post(CHAT, json=HELLO).status_code == 200, "the room is free again"
        assert error_of(http.post(CHAT, json=HELLO | {"n": 6}))["param"] == "n"


@pytest.mark.parametrize("leaves", [False, True])
def test_a_prompt_that_takes_long_to_prepare(tiny, monkeypatch, leaves):
    """Time runs out, or the client leaves, in the middle: the thread goes on, and as long as that its room is taken."""
    gate, engine = threading.Event(), scripted(tiny, slots=1)
    monkeypatch.setattr(app_module, "chat_answers", lambda *a, **k: gate.wait(60) and chat_answers(*a, **k))
    how = {"max_queue": 0, "request_timeout": 60 if leaves else 0.3}
    with serving(engine, **how) as url, httpx2.Client(base_url=url, timeout=60) as http:
        if leaves:
            with pytest.raises(httpx2.ReadTimeout):
                http.post(CHAT, json=HELLO, timeout=0.3)
        else:
            assert error_of(http.post(CHAT, json=HELLO | {"stream": True}))["code"] == "timeout"
        assert http.post(CHAT, json=HELLO).status_code == 429
        gate.set()
        eventually(lambda: http.post(CHAT, json=HELLO).status_code == 200)
        assert len(engine.requests) == 1


def test_a_body_that_does_not_come(tiny):
    with serving(scripted(tiny), request_timeout=0.3) as url, socket.socket() as slow:
        slow.connect(address_of(url))
        slow.settimeout(20)
        slow.sendall(HEAD.format(100).encode() + b'{"messages": ')
        received = b""
        while part := slow.recv(1 << 16):
            received += part
    assert received.startswith(b"HTTP/1.1 408 ") and b"the body did not come within 0.3 s" in received


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(tiny, stream):
    engine = scripted(tiny, delay=30.0)
    with serving(engine) as url, httpx2.Client(base_url=url) as http:
        with pytest.raises(httpx2.ReadTimeout):
            if stream:
                with http.stream("POST", CHAT, json=HELLO | {"stream": True}, timeout=1) as response:
                    response.read()
            else:
                http.post(CHAT, json=HELLO, timeout=1)
        eventually(lambda: len(engine.cancelled) == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_time_runs_out(tiny, stream):
    engine = scripted(tiny, delay=30.0)
    with serving(engine, request_timeout=0.3) as url, httpx2.Client(base_url=url, timeout=60) as http:
        answer = http.post(CHAT, json=HELLO | {"stream": stream, "n": 2})
        if stream:
            first, last, rest = answer.text.split("\n\n")
            assert json.loads(first.removeprefix("data: "))["error"]["code"] == "timeout"
            assert (last, rest) == ("data: [DONE]", "")
        else:
            assert answer.status_code == 504 and error_of(answer)["code"] == "timeout"
        eventually(lambda: len(engine.cancelled) == 2)


def test_heartbeats_while_there_is_nothing_to_tell(tiny, monkeypatch):
    monkeypatch.setattr(streaming, "HEARTBEAT_SECONDS", 0.1)
    with serving(scripted(tiny, delay=1.0)) as url, httpx2.Client(base_url=url, timeout=60) as http:
        blocks = http.post(CHAT, json=HELLO | {"stream": True}).text.split("\n\n")
    assert blocks[0] == ": waiting" and blocks.count(": waiting") >= 3
    assert [block for block in blocks if '"fine"' in block]


def test_a_slow_reader_holds_up_nobody(tiny, monkeypatch):
    monkeypatch.setattr(streaming, "MOST_WAITING", 50)
    long = "bcdfghjk" * 400 + "<turn|>"  # a token a letter
    engine = ScriptedEngine(tiny, lambda request: long if request is engine.requests[0] else FINE, slots=1)
    body = json.dumps(HELLO | {"stream": True, "stream_drafts": True})
    with serving(engine, max_queue=0) as url, httpx2.Client(base_url=url, timeout=60) as http, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(address_of(url))
        slow.sendall(f"{HEAD.format(len(body))}{body}".encode())
        eventually(lambda: engine.requests)
        eventually(lambda: http.post(CHAT, json=HELLO).status_code == 200)  # in the only place that there is
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += (part := slow.recv(1 << 16))
            assert part
    assert received.count(b"event: canvas") == 101 and b"data: [DONE]" in received
    assert received.count(b"event: draft") < 202, "what it did not read in time is left out"


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies(tiny, stream):
    engine = scripted(tiny, delay=30.0)
    with serving(engine) as url, httpx2.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(1) as pool:
        eventually(lambda: http.get("/ready").status_code == 200)
        pending = pool.submit(http.post, CHAT, json=HELLO | {"stream": stream})
        eventually(lambda: engine.requests)
        engine.fail(MemoryError("device"))
        answer = pending.result()
        if stream:
            assert "the engine has failed (MemoryError)" in answer.text and answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.status_code == 503 and "has failed" in error_of(answer)["message"]
        assert http.get("/ready").status_code == 503
        assert "MemoryError" in http.get("/ready").json()["status"]
        assert http.post(CHAT, json=HELLO).status_code == 503
        assert http.get("/health").status_code == 200


def test_a_request_that_fails_fails_alone(tiny):
    def script(request):
        raise LookupError("no such word")

    engine = ScriptedEngine(tiny, script)
    with serving(engine) as url, httpx2.Client(base_url=url, timeout=60) as http:
        answer = http.post(CHAT, json=HELLO)
        assert answer.status_code == 500 and "LookupError" in error_of(answer)["message"]
        assert '"error"' in http.post(CHAT, json=HELLO | {"stream": True}).text
        engine.script = lambda request: FINE
        assert http.post(CHAT, json=HELLO).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_draining(tiny, stream):
    """Those who are in are answered, or told so when the time is over; those who come are sent away."""
    gate = threading.Event()

    async def main(limit: float):
        engine = ScriptedEngine(tiny, lambda request: gate.wait(60) and FINE)  # as if amid a compilation
        app = create_app(engine, NAME)
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
            pending = asyncio.ensure_future(http.post(CHAT, json=HELLO | {"stream": stream}))
            while not engine.requests:
                await asyncio.sleep(0.01)
            draining = asyncio.ensure_future(app.state.lifecycle.drain(limit))
            await asyncio.sleep(0)
            turned_away = await http.post(CHAT, json=HELLO)
            ready = await http.get("/ready")
            if limit > 1:
                gate.set()
            await draining
            return await pending, turned_away, ready

    answer, turned_away, ready = asyncio.run(main(limit=0.1))
    assert (turned_away.status_code, ready.status_code) == (503, 503)
    assert "shutting down" in error_of(turned_away)["message"] and "retry-after" in turned_away.headers
    if stream:
        assert "shutting down; the answer was cancelled" in answer.text and answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.status_code == 503 and "shutting down" in error_of(answer)["message"]
    answer, *_ = asyncio.run(main(limit=60))
    assert answer.status_code == 200 and '"fine"' in answer.text


def test_ready_only_when_warm(tiny):
    engine, warm = scripted(tiny), threading.Event()
    engine.warmup = lambda: warm.wait(60)
    with serving(engine) as url, httpx2.Client(base_url=url, timeout=60) as http:
        assert http.get("/ready").status_code == 503 and http.get("/health").status_code == 200
        warm.set()
        eventually(lambda: http.get("/ready").status_code == 200)


def test_the_key_is_demanded(tiny):
    with serving(scripted(tiny), api_key="sesame") as url, httpx2.Client(base_url=url, timeout=60) as http:
        right = {"Authorization": "Bearer sesame"}
        for path in ("/v1/models", "/v1/nope", "/metrics"):
            for headers in ({}, {"Authorization": "Bearer sesam"}, {"Authorization": "sesame"}):
                answer = http.get(path, headers=headers)
                assert answer.status_code == 401 and error_of(answer)["code"] == "invalid_api_key"
            assert http.get(path, headers=right).status_code == (404 if path == "/v1/nope" else 200)
        assert http.post(CHAT, json=HELLO).status_code == 401
        assert http.post(CHAT, json=HELLO, headers=right).status_code == 200
        for path in ("/health", "/ready", "/", "/docs", "/openapi.json"):
            assert http.get(path).status_code in (200, 503)


def test_bodies_that_are_too_long(tiny):
    with serving(scripted(tiny), max_body_bytes=1000) as url, httpx2.Client(base_url=url, timeout=60) as http:
        body = json.dumps(HELLO | {"user": "x" * 1000}).encode()
        headers = {"Content-Type": "application/json"}
        for content in (body, iter([body[:600], body[600:]])):  # with its length said before, and in chunks
            answer = http.post(CHAT, content=content, headers=headers)
            assert answer.status_code == 413 and "1,000 bytes" in error_of(answer)["message"]
        assert http.post(CHAT, json=HELLO).status_code == 200


def test_what_is_not_there(tiny):
    with serving(scripted(tiny)) as url, httpx2.Client(base_url=url, timeout=60) as http:
        for method, path, code in (
            ("GET", "/v1/embeddings", 404),
            ("POST", "/v1/messages", 404),
            ("GET", CHAT, 405),
            ("DELETE", "/v1/models", 405),
            ("GET", "/v1/models/nope", 404),
            ("GET", "/static/nope.js", 404),
            ("GET", "/static/../app.py", 404),
        ):
            answer = http.request(method, path)
            assert (answer.status_code, error_of(answer)["type"]) == (code, "invalid_request_error"), path
        assert "access-control-allow-origin" not in http.get("/v1/models", headers={"Origin": "http://evil"}).headers
        page = http.get("/")
        assert "<title>" in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]


@pytest.mark.parametrize(("vllm_names", "line"), [(False, "tokens: 200, "), (True, "Denoising steps: 35, ")])
def test_figures_are_logged_and_shown_as_they_come(tiny, caplog, vllm_names, line):
    caplog.set_level(logging.INFO, "dgemma_jax.serve.lifecycle")
    engine = scripted(tiny)
    how = {"log_interval": 0.05, "vllm_metric_names": vllm_names}
    with serving(engine, **how) as url, httpx2.Client(base_url=url, timeout=60) as http:
        engine.stats = EngineStats(tokens=200, canvases=10, denoising_steps=25)
        eventually(lambda: any(line in message for message in caplog.messages), 5)
        shown = re.search(r"^vllm:diffusion_num_denoising_steps_total\{.*\} (.*)$", http.get("/metrics").text, re.M)
        assert (shown and float(shown[1])) == (35 if vllm_names else None)  # a commit is one of vLLM's steps
        time.sleep(0.2)
        assert sum(line in message for message in caplog.messages) == 1, "nothing was done, and nothing is told"
