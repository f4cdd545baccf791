"""`dgemma generate`: prompts in, answers out, with progress or the live canvas on a terminal."""

from __future__ import annotations

import json
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from dgemma_jax.events import Canvas, Completion, Finished
from dgemma_jax.parallel import mesh_of
from dgemma_jax.sampling import Sampling

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from dgemma_jax.api import Model

NOT_ASKED_FOR = ("logprobs", "top_logprobs")  # by any flag
KNOBS = (
    "max_new_tokens",
    "max_denoising_steps",
    "entropy_bound",
    "t_min",
    "t_max",
    "temperature",
    "top_k",
    "top_p",
    "stop",
)


def run(args: Namespace) -> int:
    """Answers the prompts of a parsed command line. ValueError for what cannot be done; after Ctrl-C the answers that
    are finished are printed before KeyboardInterrupt leaves.
    """
    if _is_batch(args):
        from dgemma_jax.cli_batch import run as run_batch

        return run_batch(args)
    console = Console(stderr=True)
    _check_watch(args, console)
    # Choices are checked before the weights are read.
    sampling, mesh = sampling_of(args), mesh_of(args)
    prompts = _prompts(args.prompts)

    model = load_model(args, console, mesh)
    as_they_are = args.raw or model.tokenizer is None
    inputs = [(prompt, args.image) for prompt in prompts]
    if not as_they_are:
        inputs = [model.reader.user_turn(prompt, args.image or ())[:2] for prompt in prompts]
    if args.watch:
        from dgemma_jax.cli_watch import watch

        events = watch(model, inputs, sampling, args.seed, console)
    else:
        texts, images = zip(*inputs, strict=True)
        told = model.events(list(texts), sampling, args.seed, images=images, slots=args.slots)
        events = _with_progress(told, len(prompts), console)
    answers = _Answers(prompts, as_json=args.json)
    try:
        for index, completion in events:
            answers.add(index, completion)
    except KeyboardInterrupt:
        answers.flush()
        raise
    return 0


def _is_batch(args: Namespace) -> bool:
    """Whether a file of prompts is to be answered. ValueError where the options do not go together."""
    if args.input is None:
        for name in ("output", "resume", "shard"):
            if getattr(args, name) not in (None, False):
                raise ValueError(f"--{name} goes with --input, the file of prompts")
        return False
    if args.output is None:
        raise ValueError("--input needs --output, the file that takes the answers")
    if args.prompts or args.watch or args.json or args.image:
        raise ValueError("--input takes its prompts from the file; drop PROMPT, --image, --watch and --json")
    return True


def load_model(args: Namespace, console: Console, mesh: Mesh | None) -> Model:
    """The model asked for, under a spinner on a terminal. From here on Ctrl-C is an exception, see `cli.main`."""
    import dgemma_jax as dg

    with console.status(Text(f"loading {args.model}")) if console.is_terminal else nullcontext():
        model = dg.load(args.model, attention_implementation=args.attention_implementation, mesh=mesh)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return model


def sampling_of(args: Namespace) -> Sampling:
    """What a command line chooses; the seed is checked but left out, because it is the library's own argument."""
    Sampling(seed=args.seed)
    return Sampling(**{name: value for name in KNOBS if (value := getattr(args, name)) is not None})


def _check_watch(args: Namespace, console: Console) -> None:
    if args.watch and not console.is_terminal:
        raise ValueError("--watch needs a terminal on standard error; drop it, or redirect standard output only")
    if args.watch and args.slots not in (None, 1):
        raise ValueError(f"--slots is {args.slots}; expected 1 with --watch, which shows one prompt at a time")


def _prompts(arguments: list[str]) -> list[str]:
    if not arguments and sys.stdin.isatty():
        print("dgemma: type the prompt and end it with Ctrl-D", file=sys.stderr)
    prompts = arguments or [sys.stdin.read().removesuffix("\n")]
    if "" in prompts:
        raise ValueError("the prompt is empty; give one as an argument or on standard input")
    return prompts


def _with_progress(
    events: Iterator[tuple[int, Canvas | Finished]], prompts: int, console: Console
) -> Iterator[tuple[int, Completion]]:
    """The completions as they come, under a progress bar that is there on a terminal only."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn())
    tokens = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=prompts, tokens=0)
        for index, event in events:
            if isinstance(event, Finished):
                progress.advance(task)
                progress.stop()  # while it runs, what is printed would go through it to standard error
                yield index, event.completion
                progress.start()
            else:
                tokens += len(event.tokens)
                progress.update(task, tokens=tokens)


class _Answers:
    """Prints completions in the order of their prompts, each as soon as those before it are out."""

    def __init__(self, prompts: list[str], as_json: bool) -> None:
        self.prompts = prompts
        self.as_json = as_json
        self.waiting: dict[int, Completion] = {}
        self.next = 0

    def add(self, index: int, completion: Completion) -> None:
        self.waiting[index] = completion
        while self.next in self.waiting:
            self._print(self.next, self.waiting.pop(self.next))
            self.next += 1

    def flush(self) -> None:
        """Prints what still waits for an answer that will not come."""
        for index in sorted(self.waiting):
            self._print(index, self.waiting.pop(index))

    def _print(self, index: int, completion: Completion) -> None:
        if self.as_json:
            fields = {name: value for name, value in asdict(completion).items() if name not in NOT_ASKED_FOR}
            print(json.dumps({"prompt": index} | fields), flush=True)
            return
        if len(self.prompts) > 1:
            print(("\n" if index else "") + f"> {self.prompts[index]}")
        print(completion.text, flush=True)
