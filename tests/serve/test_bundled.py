"""The command as the README prints it, with the bundled model: over HTTP, and on the page in a real browser."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from selenium.webdriver.common.keys import Keys

from tests.serve.browser import Page, chromium

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SUDOKU = ["Solve this sudoku:", "1...", "..3.", ".4..", "...2"]
LOOKS = {"light": ("light", 1280), "dark": ("dark", 1280), "narrow": ("light", 360)}


@pytest.fixture(scope="module")
def url():
    """Of a server that runs; in the end it is told to stop, and does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dgemma_jax.cli", "serve", "--port", str(port), "--max-num-seqs", "1"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert any("listening on" in line for line in server.stderr)
            yield f"http://127.0.0.1:{port}"
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_it_answers(url):
    question = [{"role": "user", "content": "Reverse this list: 12 7 93 4"}]
    answer = httpx2.post(
        f"{url}/v1/chat/completions", json={"messages": question, "seed": 1, "max_tokens": 32}, timeout=600
    )
    assert answer.json()["choices"][0]["message"]["content"] == "4 93 7 12", answer.text


@pytest.fixture(scope="module")
def driver():
    with chromium() as driver:
        yield driver


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
    page.find("scrubber").send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    early = page.texts("#cells > *")
    page.find("scrubber").send_keys(Keys.END)
    assert page.texts("#cells > *") != early
    page.find("scrubber").send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.script("return document.documentElement.scrollWidth") <= width
    assert page.problems() == []
    folder = Path(request.config.getoption("--screenshots") or tmp_path)
    assert driver.save_screenshot(str(folder / f"canvas-{look}.png"))
