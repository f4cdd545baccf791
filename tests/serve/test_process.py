"""`dgemma serve` as a process: flags that cannot be honoured, signals, exit codes."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

import dgemma_jax as dg
from dgemma_jax import cli_serve
from dgemma_jax.cli import main
from tests.serve.harness import ScriptedEngine

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
# A server whose engine takes so many seconds to answer; "fail" in the prompt is the end of the engine.
PROGRAM = """
import logging
import socket
import sys
import time
import dgemma_jax as dg
from dgemma_jax import cli_serve
from dgemma_jax.serve.app import create_app
from tests.serve.harness import ScriptedEngine

logging.basicConfig(level=logging.INFO)
seconds, limit, warm = map(float, sys.argv[1:])
tiny = dg.load("tiny")

def script(request):
    if "fail" in tiny.tokenizer.decode(request.ids):
        engine.fail(MemoryError("device"))
    return "word " * 500 if request.sampling.logprobs else "fine<turn|>"

engine = ScriptedEngine(tiny, script, delay=seconds)
engine.warmup = lambda: time.sleep(warm)
listener = cli_serve._bound("127.0.0.1", 0)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # a client that reads nothing is soon noticed
print(listener.getsockname()[1], flush=True)
sys.exit(cli_serve.serve(create_app(engine, "scripted"), listener, limit))
"""


@contextmanager
def process(seconds: float, limit: float, warm: float = 0):
    """(process, client) of a running server."""
    command = [sys.executable, "-c", PROGRAM, str(seconds), str(limit), str(warm)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline())
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
                while True:
                    try:
                        http.get("/health")
                        break
                    except httpx2.ConnectError:
                        assert server.poll() is None
                yield server, http
        finally:
            server.kill()


def until(http, path: str, code: int) -> None:
    while http.get(path).status_code != code:
        time.sleep(0.05)  # each leaves a line in a pipe that nobody empties yet


def test_a_signal_lets_answers_finish():
    with process(seconds=2, limit=100) as (server, http):
        until(http, "/ready", 200)
        with http.stream("POST", CHAT, json=HELLO | {"stream": True}) as response:  # it is let in
            server.send_signal(signal.SIGTERM)
            until(http, "/ready", 503)
            assert http.post(CHAT, json=HELLO).status_code == 503
            text = response.read().decode()
        assert '"content":"fine"' in text and text.endswith("data: [DONE]\n\n")
        assert server.wait(30) == 0
        log = server.stderr.read()
        assert f'"POST {CHAT} HTTP/1.1" 200' in log and f'"POST {CHAT} HTTP/1.1" 503' in log
        assert "hello" not in log, "prompts are not logged"


def test_a_connection_that_has_not_sent_its_request_is_answered():
    with process(seconds=0, limit=100) as (server, http):
        with socket.create_connection((http.base_url.host, http.base_url.port), timeout=30) as connection:
            server.send_signal(signal.SIGTERM)
            time.sleep(0.4)  # the listener is closed, for nobody waits for an answer
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((http.base_url.host, http.base_url.port))
            connection.sendall(b"GET /ready HTTP/1.1\r\nHost: here\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        assert server.wait(30) == 0


def test_answers_that_take_too_long_are_cancelled():
    with process(seconds=600, limit=0.5) as (server, http):
        until(http, "/ready", 200)
        with http.stream("POST", CHAT, json=HELLO | {"stream": True}) as response:
            server.send_signal(signal.SIGINT)
            assert "the server is shutting down; the answer was cancelled" in response.read().decode()
        assert server.wait(30) == 130


def test_clients_that_neither_send_nor_read_do_not_hold_up_the_end():
    with process(seconds=0, limit=100) as (server, http):
        until(http, "/ready", 200)
        fat = HELLO | {"n": 4, "logprobs": True, "top_logprobs": 20}
        half = sending(http, HELLO, but=5)
        unread = [sending(http, fat | {"stream": stream}) for stream in (True, False)]
        time.sleep(1)
        server.send_signal(signal.SIGTERM)
        answer = b"".join(iter(lambda: half.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 503 ") and b"the server is shutting down" in answer
        assert server.wait(30) == 0
        assert "Traceback" not in server.stderr.read()
        for client in (half, *unread):
            client.close()


def sending(http, body: dict, but: int = 0) -> socket.socket:
    """A client that takes in little, having sent a request but for its last bytes."""
    content = json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.settimeout(30)
    client.connect((http.base_url.host, http.base_url.port))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    client.sendall(head.encode() + b"\r\n\r\n" + content[: len(content) - but])
    return client


def test_a_warm_up_is_not_waited_for():
    with process(seconds=0, limit=100, warm=600) as (server, http):
        assert http.get("/ready").status_code == 503
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def test_the_end_of_the_engine_is_the_end_of_the_process():
    with process(seconds=0, limit=100) as (server, http):
        answer = http.post(CHAT, json={"messages": [{"role": "user", "content": "fail"}]})
        assert answer.status_code == 503 and "MemoryError" in answer.json()["error"]["message"]
        assert server.wait(30) == 2
        assert "dgemma: error: the engine has failed: MemoryError('device')" in server.stderr.read()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pipeline-parallel-size", "2"], "pipeline_parallel_size is 2"),
        (["--port", "70000"], "--port is 70000; expected 0 .. 65535"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0; expected more than 0"),
        (["--slots", "-1"], "--max-num-seqs is -1"),
        (["--memory-fraction", "0"], "--memory-fraction is 0.0; expected above 0 and at most 1"),
        (["--memory-fraction", "nan"], "--memory-fraction is nan; expected above 0 and at most 1"),
        (["--memory-fraction", "0.0001", "--max-num-seqs", "64"], "64 slots of"),
        (["--max-queue", "-1"], "--max-queue is -1; expected 0 or more"),
        (["--request-timeout", "nan"], "--request-timeout is nan"),
        (["--log-interval", "0"], "--log-interval is 0.0"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key", "a\nb"], "--api-key is empty or holds characters"),
        (["--model", "nowhere/at-all"], "neither a directory nor in the cache"),
        (["--max-model-len", "1000000"], "max_model_len is 1000000; expected an integer in 2 .. 4096"),
        (
            ["--max-num-seqs", "60000", "--max-model-len", "4096"],
            r"60000 slots of 4,096 positions take [\d,]+ bytes beside [\d,]+ of weights, [\d,]+ are free: lower",
        ),
        (["--attention-implementation", "magic"], "attention_implementation is 'magic'"),
    ],
)
def test_flags_are_checked_before_weights_are_read(capsys, monkeypatch, flags, message):
    import dgemma_jax.api as api

    monkeypatch.setattr(api, "read_checkpoint", lambda *_, **__: pytest.fail("the weights are read"))
    assert main(["serve", "--port", "0", *flags]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("dgemma: error: ") and re.search(message, error)


@pytest.fixture
def served(tiny, monkeypatch):
    """(application, address) that `dgemma serve` would serve with so many flags, without the weights."""
    found = []
    monkeypatch.setattr(dg, "load", lambda *_, **__: tiny)
    monkeypatch.setattr(dg, "Engine", lambda model, *_, **__: ScriptedEngine(model, lambda _: ""))
    monkeypatch.setattr(cli_serve, "serve", lambda app, listener, _: found.append((app, listener.getsockname()[0])))

    def run(*flags: str):
        assert main(["serve", "--port", "0", *flags]) == 0
        return found.pop()

    return run


def test_by_default_this_machine_alone_reaches_the_server(served):
    assert served()[1] == "127.0.0.1"
    assert served("--host", "0.0.0.0")[1] == "0.0.0.0"


def test_the_names_of_the_metrics_are_chosen_by_a_flag(served):
    for flags, wanted in (((), False), (("--vllm-metric-names",), True)):
        app, _ = served(*flags)
        assert app.state.lifecycle.metrics.vllm_names == wanted


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"--port {port} cannot be used (Address already in use)" in capsys.readouterr().err


def test_the_key_of_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("DGEMMA_API_KEY", " ")
    assert main(["serve"]) == 2
    assert "DGEMMA_API_KEY is empty or holds" in capsys.readouterr().err


def test_without_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve"]) == 2
    assert "pip install 'dgemma-jax[serve]'" in capsys.readouterr().err
