"""The server under load, over HTTP, at several concurrencies: `python -m benchmarks.serve`.

Starts `dgemma serve --model tiny` on a free port of this machine, waits until it is ready, and sends sudokus, lists to
reverse and to sort, each concurrency the same prompts after a round that is not measured.
"""

import argparse
import asyncio
import contextlib
import json
import platform
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path

import httpx2

from dgemma_jax.serve.load import Load, Prompt, measure
from dgemma_jax.train.skills import SKILLS

RESULTS = Path(__file__).parent / "results" / "serve.json"
ASKED, SLOTS, START, STOP = ("sudoku", "reverse", "sort"), 8, 1800, 60  # skills, rows, seconds
SHOWN = ("request_throughput", "output_throughput", "median_ttft_ms", "median_e2el_ms", "p99_e2el_ms")
PER_STEP = ("diffusion_steps_per_canvas", "diffusion_committed_per_step")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8], help="open requests (%(default)s)")
    parser.add_argument("--count", type=int, default=64, help="prompts of each measurement (%(default)s)")
    options = parser.parse_args()
    asked = prompts(options.count)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without stopping the server
    with server() as url:
        asyncio.run(measure(Load(url, asked, concurrency=max(options.concurrency))))
        rows = {concurrency: measured(url, asked, concurrency) for concurrency in options.concurrency}
    report = {
        "command": f"python -m benchmarks.serve {shlex.join(sys.argv[1:])}".strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("dgemma-jax", "jax", "jaxlib", "fastapi", "uvicorn", "httpx2")},
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "model": "tiny",
        "slots": SLOTS,
        "skills": ASKED,
        "concurrency": rows,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


def prompts(count: int) -> list[Prompt]:
    """Questions of the skills in turn."""
    rng = random.Random(0)
    return [Prompt(SKILLS[skill](rng).messages, None) for skill in islice(cycle(ASKED), count)]


def measured(url: str, asked: list[Prompt], concurrency: int) -> dict:
    """The figures without the single requests. RuntimeError if one failed, because the others would say little."""
    found = asyncio.run(measure(Load(url, asked, concurrency=concurrency)))
    if found["failed"]:
        raise RuntimeError(f"{found['failed']} of {len(asked)} requests failed: {found['errors']}")
    print(f"{concurrency:3} at a time", *(f"{name} {found[name]:.2f}" for name in SHOWN + PER_STEP), flush=True)
    return {name: value for name, value in found.items() if name not in ("base_url", "errors", "requests")}


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The URL of a server that is ready, stopped with SIGTERM in the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ("--model", "tiny", "--port", str(port), "--max-num-seqs", str(SLOTS))
    process = subprocess.Popen([sys.executable, "-m", "dgemma_jax.cli", "serve", *flags])
    try:
        url = f"http://127.0.0.1:{port}"
        wait(process, f"{url}/ready")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    if code:
        raise RuntimeError(f"the server ended with exit code {code}")


def wait(process: subprocess.Popen, url: str) -> None:
    """Until the server is ready. RuntimeError if it ends, or is not ready in START seconds."""
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        with contextlib.suppress(httpx2.HTTPError):  # it does not listen yet
            if httpx2.get(url).status_code == 200:
                return
        time.sleep(2)
    raise RuntimeError(f"{url} is not ready after {START} seconds")


if __name__ == "__main__":
    main()
