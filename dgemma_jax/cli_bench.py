"""`dgemma bench`: `step` is in `cli_bench_step`; `serve` measures a running server, ours or vLLM, under load."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from dgemma_jax.serve.load import Load

SERVE = "Send chat completions to a running server with OpenAI's interface and measure the answers."
CONCURRENCY, COUNT, WORDS, TOKENS = 8, 64, (16, 64), (128, 128)  # unless chosen
ROWS = (
    ("Requests completed", "completed", "d"),
    ("Requests failed", "failed", "d"),
    ("Duration (s)", "duration", ".2f"),
    ("Prompt tokens", "total_input_tokens", "d"),
    ("Generated tokens", "total_output_tokens", "d"),
    ("Requests per second", "request_throughput", ".2f"),
    ("Generated tokens per second", "output_throughput", ".2f"),
    ("Time to first canvas, mean (ms)", "mean_ttft_ms", ".1f"),
    ("Time to first canvas, median (ms)", "median_ttft_ms", ".1f"),
    ("Time to first canvas, 99th percentile (ms)", "p99_ttft_ms", ".1f"),
    ("Latency, mean (ms)", "mean_e2el_ms", ".1f"),
    ("Latency, median (ms)", "median_e2el_ms", ".1f"),
    ("Latency, 99th percentile (ms)", "p99_e2el_ms", ".1f"),
    ("Committed tokens per second", "diffusion_committed_throughput", ".2f"),
    ("Denoising steps per canvas", "diffusion_steps_per_canvas", ".2f"),
    ("Committed tokens per denoising step", "diffusion_committed_per_step", ".2f"),
    ("Committed tokens", "diffusion_committed_tokens", "d"),
    ("Denoising steps", "diffusion_denoising_steps", "d"),
    ("Canvas positions evaluated", "diffusion_canvas_positions", "d"),
)


def add_serve(parser: argparse.ArgumentParser) -> None:
    """The flags of `dgemma bench serve`."""
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="the server (%(default)s)")
    add("--model", metavar="NAME", help="the name that requests ask for (by default the server's first)")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add("--max-concurrency", type=_count, metavar="N", help=f"requests at a time (by default {CONCURRENCY})")
    add("--request-rate", type=_rate, metavar="X", help="instead, requests a second on average, at random times")
    add("--num-prompts", type=_count, metavar="N", help=f"requests (by default {COUNT}, or all lines of --prompts)")
    add("--prompts", metavar="FILE", help="what to ask: one JSON object with prompt or messages per line")
    add("--input-words", type=_range, metavar="A-B", help="instead, so many random words (by default 16-64)")
    add("--output-tokens", type=_range, metavar="A-B", help="longest answer (by default 128; with --prompts, no limit)")
    add("--seed", type=_seed, default=0, metavar="N", help="of lengths, words, times and requests (%(default)s)")
    add("--timeout", type=_rate, default=600.0, metavar="S", help="seconds until an answer counts as failed (600)")
    add("--json", action="store_true", help="one JSON object, with every request, under the names of vLLM's benchmark")


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if some requests failed. ValueError or OSError for what cannot begin."""
    if args.benchmark == "step":
        from dgemma_jax.cli_bench_step import run as run_step

        return run_step(args)
    if args.request_rate is not None and args.max_concurrency is not None:
        raise ValueError("--request-rate sends whether answers come or not; drop it or --max-concurrency")
    if args.prompts is not None and args.input_words is not None:
        raise ValueError("--input-words is for random prompts; drop it or --prompts")
    try:
        from dgemma_jax.serve import load
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'dgemma-jax[serve]'") from None

    if args.prompts is not None:
        prompts = load.read_prompts(Path(args.prompts), args.num_prompts, args.output_tokens, args.seed)
    else:
        words, tokens = args.input_words or WORDS, args.output_tokens or TOKENS
        prompts = load.random_prompts(args.num_prompts or COUNT, words, tokens, args.seed)
    concurrency = None if args.request_rate is not None else args.max_concurrency or CONCURRENCY
    how = {"model": args.model, "api_key": args.api_key, "seed": args.seed, "timeout": args.timeout}
    found = _measured(load.Load(args.base_url, prompts, concurrency, args.request_rate, **how))
    if args.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 1 if found["failed"] else 0


def _measured(load: Load) -> dict[str, Any]:
    """The report, under a progress bar that is there on a terminal only."""
    import asyncio

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from dgemma_jax.serve.load import measure

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(load.prompts))
        return asyncio.run(measure(load, lambda outcome: progress.advance(task)))


def table(title: str, rows: Sequence[tuple[str, str, str]], found: dict[str, Any]) -> Table:
    """Of the figures that are known. rows: of each what it is, its name, and how it is written."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.title, made.title_justify = title, "left"
    made.add_column()
    made.add_column(justify="right")
    for what, name, form in rows:
        if found[name] is not None:
            made.add_row(what, format(found[name], form))
    return made


def _print(found: dict[str, Any]) -> None:
    """A table of what is known, then what went wrong."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    console.print(table(f"{found['model_id']} at {found['base_url']}", ROWS, found))
    if found["metrics"] is None:
        console.print("The server shows no diffusion counters at /metrics.")
    for error, count in found["errors"].items():
        console.print(Text(f"{count} failed: {error}", style="red"))


def _checked(kind: Callable[[str], Any], fits: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """A type for argparse whose error says what was expected."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r}; expected {expected}")
        return value

    return parse


def _bounds(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    return int(low), int(high if dash else low)


_count = _checked(int, lambda value: value > 0, "a positive number")
_seed = _checked(int, lambda value: value >= 0, "a number from 0 on")
_rate = _checked(float, lambda value: 0 < value < math.inf, "a positive, finite number")
_range = _checked(_bounds, lambda value: 0 < value[0] <= value[1], "a positive number, or two as in 16-64")
