"""The command as the README prints it, with the bundled model: over HTTP, and on the page in a real browser."""

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import httpx2
import pytest
from selenium.webdriver.common.keys import Keys

from tests.serve.browser import Page

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SUDOKU = ["Solve this sudoku:", "1...", "..3.", ".4..", "...2"]
LOOKS = {"light": ("light", 1280), "dark": ("dark", 1280), "narrow": ("light", 360)}


@pytest.fixture(scope="module")
def server():
    """(its address, the process); the last test ends it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dgemma_jax.cli", "serve", "--port", str(port), "--max-num-seqs", "1"]
    command += ["--max-model-len", "256"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert any("listening on" in line for line in process.stderr)
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.kill()


@pytest.fixture
def url(server):
    return server[0]


def ask(url: str, seed: int = 1) -> httpx2.Response:
    question = [{"role": "user", "content": "Reverse this list: 12 7 93 4"}]
    return httpx2.post(f"{url}/v1/chat/completions", json={"messages": question, "seed": seed}, timeout=600)


def test_it_answers(url):
    answer = ask(url)
    assert answer.json()["choices"][0]["message"]["content"] == "4 93 7 12", answer.text


@pytest.mark.parametrize("look", LOOKS)
def test_its_canvas_denoises_on_the_page(driver, url, look, request, tmp_path):
    page = Page(driver)
    scheme, width = LOOKS[look]
    page.open(f"{url}/", width=width, scheme=scheme, motion="no-preference")
    assert page.find("model").text == "tiny"
    page.find("settings").click()
    page.find("seed").send_keys("1")
    page.find("settings").find_element("css selector", "summary").click()
    prompt = page.find("prompt")
    prompt.send_keys(Keys.CONTROL, "a", Keys.NULL)
    for line in SUDOKU:
        prompt.send_keys(line, Keys.SHIFT, Keys.ENTER, Keys.NULL)
    prompt.send_keys(Keys.BACKSPACE, Keys.ENTER)
    page.until_idle()
    rows = page.texts(".turn.model > .text")[0].split()
    assert all(sorted(line) == list("1234") for line in [*rows, *map("".join, zip(*rows, strict=True))])
    steps = [caption for caption in page.captions() if re.match(r"Canvas 1, step \d+: \d+ of 32 kept", caption)]
    assert len(steps) > 1 and len(set(steps)) == len(steps)
    frames = []
    for keys in ((Keys.HOME,), (Keys.END,), (Keys.HOME, Keys.ARROW_RIGHT)):
        page.find("scrubber").send_keys(*keys)
        frames.append((page.texts("#cells > *"), page.states()))
    noise, done, first = frames
    assert set(noise[1]) == {"noise"} and set(done[1]) == {"accepted", "cut"} and noise[0] != done[0]
    assert set(first[1]) == {"accepted", "noise"}, "the first step keeps some and draws the others anew"
    assert page.script("return document.documentElement.scrollWidth") <= width
    assert page.problems() == []
    folder = Path(request.config.getoption("--screenshots") or tmp_path)
    page.picture(folder / f"canvas-{look}.png", height=740)


def test_a_signal_amid_many_requests(server):
    """Each is answered, or told that the server is shutting down; then it ends."""
    url, process = server
    with ThreadPoolExecutor(16) as pool:
        pending = [pool.submit(ask, url, seed) for seed in range(16)]
        next(as_completed(pending))
        process.send_signal(signal.SIGTERM)
        answers = [one.result() for one in pending if not isinstance(one.exception(), httpx2.ConnectError)]
    codes = [answer.status_code for answer in answers]
    assert set(codes) <= {200, 503} and 200 in codes
    for answer in answers:
        body = answer.json()
        assert body["usage"] if answer.status_code == 200 else "shutting down" in body["error"]["message"]
    assert process.wait(60) == 0
