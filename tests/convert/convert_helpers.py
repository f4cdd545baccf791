"""Conversions in this process, in children that may be killed, and what to compare afterwards."""

import hashlib
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np

from dgemma_jax.checkpoint import open_checkpoint, open_directory
from dgemma_jax.convert.conversion import Summary, convert
from dgemma_jax.convert.orbax_files import MANIFEST

CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["dgemma_jax.checkpoint", "dgemma_jax.convert.conversion", "orbax.checkpoint"])


def convert_model(source, target, **options) -> Summary:
    opened = open_directory(source, verify=True)
    return convert(opened.weights, Path(target), opened.config, opened.abstract, **options)


def params_of(directory) -> dict:
    return open_checkpoint(directory)[1]


def assert_same_params(first, second) -> None:
    """Bit for bit, dtypes included."""

    def check(a, b):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(check, first, second)


def manifest(directory) -> dict:
    return json.loads((Path(directory) / MANIFEST).read_text())


def contents(directory) -> dict[str, str]:
    """Every file below a directory and the hash of its content."""
    files = [path for path in sorted(Path(directory).rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def in_child(function, *arguments) -> int:
    """Runs a function of a module in a new process; its exit code, negative for a signal."""
    child = CHILDREN.Process(target=function, args=arguments)
    child.start()
    child.join()
    code = child.exitcode
    child.close()
    return code


def convert_until(kill_at: int | None, count_file: Path, source, target, options: dict) -> None:
    """Converts, and kills this process when it touches the target's files for the `kill_at`-th time.

    None counts: the number of such events goes to `count_file`.
    """
    events = 0
    kinds = ("open", "os.mkdir", "os.rename", "os.remove", "os.listdir", "shutil.copyfile")

    def hook(kind: str, arguments: tuple) -> None:
        nonlocal events
        if kind in kinds and arguments and str(arguments[0]).startswith(str(target)):
            events += 1
            if events == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    convert_model(source, target, **options)
    if kill_at is None:
        count_file.write_text(str(events))
