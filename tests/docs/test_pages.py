"""Every block of code of the README and the documentation does what it says, and every notebook what it shows.

In one file, so that one process runs all of it and programs are compiled once.
"""

import ast
import contextlib
import json
import re
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

import dgemma_jax as dg
from dgemma_jax import cli
from dgemma_jax.program_cache import VARIABLE, own_directory
from notebooks.execute import execute, notebooks
from tests.docs.blocks import ROOT, TAGS, Block, Command, blocks, commands, name_of, pages
from tests.docs.notebooks import MOST_BYTES, PERSONAL, forms, outputs, varies

PAGES = {name_of(page): page for page in pages()}
SERVER = "dgemma serve --model tiny --port 8000"
PORT = ":8000"  # in what asks the server
ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
LANGUAGES = {"bash", "python", "text", "json"}


def of(kind: Callable, keep: Callable) -> list:
    return [
        pytest.param(name, thing, id=f"{name}: {' '.join(thing[1 if kind is blocks else 0].split())[:60]}")
        for name, page in PAGES.items()
        for thing in kind(page)
        if keep(thing)
    ]


@pytest.mark.parametrize("name", PAGES)
def test_every_block_is_of_a_kind_that_is_tested(name):
    assert {block.language for block in blocks(PAGES[name])} <= LANGUAGES
    for tagged in [*commands(PAGES[name]), *(b for b in blocks(PAGES[name]) if b.language == "python")]:
        assert tagged.tag is None or tagged.tag in TAGS


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder to be in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks(page)])
def test_the_blocks_of_a_page_run_one_after_the_other(name, folder, capsys):
    scope = {"__name__": name}
    for block in blocks(PAGES[name]):
        printed = ""
        if block.language == "python" and block.tag is None and PORT not in block.code:
            exec(compile(block.code, name, "exec"), scope)
            printed = capsys.readouterr().out
        for command in block.commands:
            if command.tag is None and command.text != SERVER and PORT not in command.text:
                done = bash(command.text, folder)
                assert done.returncode == 0, f"{command.text}: {done.stderr}"
                assert done.stdout.strip() or "--output" in command.text or ">" in command.text, command.text
                printed += done.stdout
        assert block.output is None or PORT in block.code or printed == block.output, block.code


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_stored_notebook_is_small_complete_and_tells_nothing_of_its_machine(path):
    text = path.read_text()
    assert len(text) < MOST_BYTES
    assert '"execution_count": null' not in text, "not executed: make notebooks"
    for cell in nbformat.read(path, as_version=4).cells:
        assert not PERSONAL.search("\n".join(outputs(cell)))
        assert not any(output.startswith(("error", "stderr")) for output in outputs(cell))


@pytest.mark.slow
@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_gives_what_is_stored(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if directory := own_directory():
        monkeypatch.setenv(VARIABLE, str(directory))
    stored, fresh = nbformat.read(path, as_version=4), execute(path)
    for before, after in zip(stored.cells, fresh.cells, strict=True):
        kept = forms if varies(before) else outputs
        assert kept(before) == kept(after), before.source


@pytest.fixture(scope="module")
def port(tmp_path_factory) -> Iterator[str]:
    """The port of a server that was started as the pages say, but for the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    command = f"exec {SERVER.replace('8000', str(number))}"
    where = {"cwd": tmp_path_factory.mktemp("server"), "env": ENVIRONMENT}
    with subprocess.Popen(["bash", "-c", command], stderr=subprocess.DEVNULL, **where) as server:
        try:
            wait_until_ready(server, number)
            yield f":{number}"
        finally:
            server.terminate()
    assert server.returncode == 0


def asks_the_server(thing: Block | Command) -> bool:
    text = thing.code if isinstance(thing, Block) else thing.text
    return PORT in text and thing.tag is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "command"), of(commands, asks_the_server))
def test_the_server_answers_commands(name, command, port, folder):
    done = bash(command.text.replace(PORT, port), folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if '"stream": true' in command.text:
        *chunks, end = done.stdout.removesuffix("\n\n").split("\n\n")
        deltas = [choice["delta"] for chunk in chunks for choice in json.loads(chunk.removeprefix("data: "))["choices"]]
        assert end == "data: [DONE]"
        assert "".join(delta.get("content") or "" for delta in deltas).startswith("January, February")
    elif "chat/completions" in command.text:
        message = json.loads(done.stdout)["choices"][0]["message"]
        assert message["content"] == "4 93 7 12" or message["tool_calls"][0]["function"]["name"] == "get_weather"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block"), of(blocks, lambda b: b.language == "python" and asks_the_server(b)))
def test_the_server_answers_clients(name, block, port, folder, capsys):
    exec(compile(block.code.replace(PORT, port), name, "exec"), {})
    printed = capsys.readouterr().out
    assert printed
    assert block.output is None or printed == block.output


def test_the_server_is_started_in_one_way():
    started = {
        command.text
        for page in PAGES.values()
        for command in commands(page)
        if command.text.startswith("dgemma serve")
        if command.tag is None
    }
    assert started == {SERVER}


@pytest.mark.parametrize(("name", "command"), of(commands, lambda command: command.tag))
def test_a_command_that_is_not_run_could_be(name, command):
    program = command.words[0]
    assert program in NOT_RUN, f"{command.text}: no test knows how to check {program}"
    NOT_RUN[program](command)


@pytest.mark.parametrize(("name", "block"), of(blocks, lambda block: block.language == "python" and block.tag))
def test_a_block_that_is_not_run_compiles_and_names_what_there_is(name, block):
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dg":
            assert hasattr(dg, node.attr), node.attr


def _parses(command: Command) -> None:
    cli._parser().parse_args(command.words[1:])  # leaves with an error otherwise


def _is_target(command: Command) -> None:
    for target in command.words[1:]:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def _names_extras(command: Command) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert command.words[1] == "install"
    ours = [word for word in command.words[2:] if word.split("[")[0] in (project["name"], ".")]
    assert ours, command.text
    for word in ours:
        for extra in re.findall(r"[\w-]+", word.partition("[")[2]):
            assert extra in project["optional-dependencies"], extra


def _exists(command: Command) -> None:
    """A script or module of this repository that knows the flags; for pytest and jupyter, the paths."""
    words = command.words
    if words[1] == "-m" and words[2] not in ("pytest", "venv"):
        source = Path(find_spec(words[2]).origin).read_text()
        assert all(f'"{word}"' in source for word in words[3:] if word.startswith("--")), command.text
        return
    paths = [word.split("::")[0] for word in words[1:] if "/" in word]
    assert paths or words[2:3] == ["venv"], command.text
    assert all((ROOT / path).exists() for path in paths), command.text


NOT_RUN = {
    "dgemma": _parses,
    "make": _is_target,
    "pip": _names_extras,
    "python": _exists,
    "pytest": _exists,
    "jupyter": _exists,
}


def bash(command: str, folder: Path) -> subprocess.CompletedProcess:
    run = ["bash", "-c", command]
    return subprocess.run(run, capture_output=True, text=True, cwd=folder, env=ENVIRONMENT, check=False)


def wait_until_ready(server: subprocess.Popen, port: int) -> None:
    end = time.monotonic() + 600
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready"):
            return
        time.sleep(0.2)
    raise AssertionError(f"the server is not ready (exit code {server.poll()})")
