"""Every example of the README runs as printed."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
# A terminal, a conversation, a checkpoint of 50 GB, a server.
NOT_RUN = ("--watch", "dgemma chat", "--model google", "dgemma serve")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.split(" #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if ("dgemma " in line or line.startswith("printf ")) and not any(part in line for part in NOT_RUN)
]


@pytest.mark.slow
def test_the_python_blocks_run_one_after_the_other(capsys):
    scope = {}
    for block in (block for block in PYTHON if "openai" not in block):
        exec(compile(block, "README.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert printed.startswith("4 93 7 12\n")
    assert "Finished(" in printed
    assert scope["logits"].shape == (1, scope["model"].config.canvas_length, scope["model"].config.vocab_size)


@pytest.mark.slow
def test_the_commands_run_one_after_the_other(tmp_path):
    assert len(COMMANDS) >= 7
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    for command in COMMANDS:
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, env={"PATH": path}, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert done.stdout.strip() or "jsonl" in command, command
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {answer["id"]: answer["text"] for answer in answers} == {0: "7 4 9", "b": "e w q"}


@pytest.mark.slow
def test_the_server_answers_as_shown(tmp_path, capsys):
    port = free_port()
    (serve,) = re.findall(r"^dgemma serve .*?(?=  )", README, re.MULTILINE)
    (curl,) = re.findall(r"^curl .*\n.*", README, re.MULTILINE)
    (client,) = [block for block in PYTHON if "openai" in block]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    with subprocess.Popen(
        ["bash", "-c", f"exec {serve.replace('8000', str(port))}"],
        cwd=tmp_path,
        env={"PATH": path},
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            wait_until_ready(server, port)
            command = curl.replace("8000", str(port))
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
            assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "4 93 7 12"
            exec(compile(client.replace("8000", str(port)), "README.md", "exec"), {})
            assert capsys.readouterr().out.startswith("4 93 7 12 ")
        finally:
            server.terminate()
    assert server.returncode == 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until_ready(server: subprocess.Popen, port: int) -> None:
    end = time.monotonic() + 600
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready"):
            return
        time.sleep(0.2)
    raise AssertionError(f"the server is not ready (exit code {server.poll()})")
