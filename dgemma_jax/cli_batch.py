"""`dgemma generate --input FILE --output FILE`: a file of prompts, with progress, resumable."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dgemma_jax.batch import EVERYTHING, Shard, answers, finished_ids
from dgemma_jax.cli_generate import load_model, sampling_of
from dgemma_jax.events import Canvas
from dgemma_jax.parallel import mesh_of


def run(args: Namespace) -> int:
    """Answers the lines of args.input; 1 if some could not be answered. ValueError or OSError for what cannot begin."""
    sampling, shard = sampling_of(args), EVERYTHING if args.shard is None else Shard.parse(args.shard)
    mesh = mesh_of(args)
    source, output = Path(args.input), Path(args.output)
    if output.is_dir():
        raise ValueError(f"--output is {args.output!r}, a directory; expected a file for the answers")
    if source.resolve() == output.resolve():
        raise ValueError(f"--output is {output}, the input itself; choose another file")
    if source.exists() and not source.is_file():
        raise ValueError(f"--input is {source}, which is no file; it is read twice, so store the lines in one")
    total = sum(number % shard.of == shard.index and bool(line.strip()) for number, line in enumerate(_lines(source)))
    if output.exists() and output.stat().st_size and not args.resume:
        raise ValueError(f"{output} exists; pass --resume to go on with it, or choose another file")
    done = finished_ids(output) if args.resume else set()
    console = Console(stderr=True)
    model = load_model(args, console, mesh)
    how = {"seed": args.seed, "slots": args.slots, "raw": args.raw, "shard": shard, "done": done}
    failed = 0
    with _named(output), output.open("a", encoding="utf-8") as file, Tally(console, total, len(done)) as tally:
        for result in answers(model, _lines(source), sampling, **how):
            tally.add(result)
            if not isinstance(result, Canvas):
                failed += "error" in result
                file.write(json.dumps(result) + "\n")
                file.flush()
    console.print(f"dgemma: {total - failed} of {total} answered, {failed} failed", highlight=False)
    return 1 if failed else 0


@contextmanager
def _named(output: Path) -> Iterator[None]:
    """An error in writing names the file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(output)
        raise


def _lines(source: Path) -> Iterator[str]:
    with source.open(encoding="utf-8", errors="surrogateescape") as file:  # such a line has its own error
        yield from file


class Tally:
    """A progress bar on a terminal: lines done, tokens per second, steps per canvas, time left."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        what = (TextColumn("{task.fields[rate]:.0f} tokens/s"), TextColumn("{task.fields[steps]:.1f} steps a canvas"))
        columns = (BarColumn(), MofNCompleteColumn(), *what, TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.progress.add_task("", total=total, completed=done, rate=0.0, steps=0.0)
        self.tokens = self.canvases = self.steps = 0
        self.started = time.monotonic()

    def __enter__(self) -> Tally:
        self.progress.start()
        return self

    def __exit__(self, *error) -> None:
        self.progress.stop()

    def add(self, result: dict | Canvas) -> None:
        if isinstance(result, Canvas):
            self.tokens, self.canvases = self.tokens + len(result.tokens), self.canvases + 1
            self.steps += result.steps
            rate = self.tokens / (time.monotonic() - self.started)
            self.progress.update(self.task, rate=rate, steps=self.steps / self.canvases)
        else:
            self.progress.advance(self.task)
