"""`dgemma generate --input` as a process that is killed at any moment and resumed."""

import json
import os
import random
import subprocess
import sys
import time

import pytest

LINES = 24


@pytest.fixture
def command(tmp_path):
    """The command line, and its output file."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rng = random.Random(5)
    prompts = [f"Reverse this list: {' '.join(str(rng.randrange(100)) for _ in range(5))}" for _ in range(LINES)]
    source.write_text("".join(json.dumps({"messages": [{"role": "user", "content": p}]}) + "\n" for p in prompts))
    options = ["--input", str(source), "--output", str(output), "--seed", "1", "--slots", "2", "--resume"]
    return [sys.executable, "-m", "dgemma_jax.cli", "generate", *options], output


def environment(tmp_path) -> dict[str, str]:
    """Programs are compiled by the first run alone."""
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    return os.environ | quick | {"PYTHONPATH": os.getcwd()}


def lines(output) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def answered(output) -> dict:
    """The results by id, one of each."""
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(found) == LINES
    return {entry["id"]: entry for entry in found}


def test_killed_and_resumed_it_gives_the_whole(command, tmp_path, soak):
    argv, output = command
    quiet = {"env": environment(tmp_path), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(argv, check=True, **quiet)
    whole = answered(output)
    assert set(whole) == set(range(LINES))

    rng = random.Random(0)
    output.unlink()
    for _ in range(20 if soak else 2):
        before = lines(output)
        if before == LINES:
            assert answered(output) == whole
            output.unlink()
            before = 0
        with subprocess.Popen(argv, **quiet) as process:
            while process.poll() is None and lines(output) <= before:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.1))
            process.kill()
    subprocess.run(argv, check=True, **quiet)
    assert answered(output) == whole
