"""`dgemma convert`: a model in another layout or dtype, item by item, on the CPU."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console


def run(args: Namespace) -> None:
    """Converts as a parsed command line says. ValueError or OSError for what cannot be done."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # a GPU would only be filled up

    from dgemma_jax.checkpoint import open_directory, text_of
    from dgemma_jax.convert.conversion import convert

    opened = open_directory(args.source, verify=True)
    text_of(opened)  # what is copied must be readable, too
    started = time.perf_counter()
    with byte_progress() as progress:
        done = convert(
            opened.weights,
            Path(os.path.expanduser(args.target)),
            opened.config,
            opened.abstract,
            dtype=args.dtype,
            to=args.to,
            quantize=args.quantize,
            overwrite=args.overwrite,
            progress=progress,
        )
    seconds = time.perf_counter() - started
    if opened.weights.note:
        print(f"dgemma: {opened.weights.note}", file=sys.stderr)
    if done.kept or done.damaged:
        again = f", {len(done.damaged)} were damaged and written again" if done.damaged else ""
        print(f"dgemma: {done.kept} items of an interrupted run were kept{again}", file=sys.stderr)
    print(f"{done.directory}: {done.items} items, {done.bytes / 1e9:.3f} GB in {seconds:.1f} s")


@contextmanager
def byte_progress() -> Iterator[Callable[[int, int], None]]:
    """A function (bytes done, bytes in all) that moves a bar with bytes, rate and time left, on a terminal only."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
