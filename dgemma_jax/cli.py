"""The command `dgemma`. Nothing heavy is imported until a subcommand runs, so `--help` is quick."""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from dgemma_jax import cli_bench, cli_train
from dgemma_jax.program_cache import keep_programs

CHAT = "Talk with the model, at a terminal or over a pipe with a turn per line. /help lists what else it takes."
CONVERT = "Write a model in another layout or dtype. A run that was interrupted goes on where it stopped."
STEP = "Time one denoising step of a model here: rows with canvases behind cached positions."
SERVE = "Serve a model over HTTP with OpenAI's interface, documented at /docs, and a page that shows the canvas at /."
EXIT_ERROR, EXIT_INTERRUPTED, EXIT_UNREAD = 2, 130, 141


class _Version(argparse.Action):
    """Prints what there is and where it would run, and leaves. Only here is jax imported before a command runs."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from dgemma_jax.about import about

        print(about())
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, from that of the command, which knows what it takes."""

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        found, unknown = super().parse_known_args(*arguments, **options)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_ERROR, f"dgemma: error: {message}; see `{self.prog} --help`\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 0, 1 if some lines of a file could not be answered, 2 after an
    error (one line on stderr), 130 after Ctrl-C, 141 when nobody reads on.

    argv: without the program's name; None is the command line of this process.
    """
    _open_streams()
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # behind --version, too
    except BrokenPipeError:  # such as `| head -1`; what is still buffered goes nowhere, without a complaint at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD


def _run(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    if argv is None:
        # While modules are imported an exception would be lost in jax or leave them half-made.
        signal.signal(signal.SIGINT, lambda *_: leave(EXIT_INTERRUPTED))
        keep_programs()
    logging.basicConfig(format=("%(asctime)s " if args.command == "serve" else "") + "dgemma: %(message)s")
    logging.getLogger("dgemma_jax.api").setLevel(logging.INFO)
    try:
        return import_module(f"dgemma_jax.cli_{args.command}").run(args) or 0
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        lines = (line.strip() for line in str(error).splitlines())  # one for each of several problems
        print(f"dgemma: error: {'; '.join(lines)}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        if argv is None:
            leave(EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED


def _open_streams() -> None:
    """A standard stream that the caller closed reads as empty and swallows what is written; every character prints."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (for the rest of the process)
    for stream in (sys.stdout, sys.stderr):  # an answer is not lost to a terminal that lacks its characters
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def leave(code: int) -> NoReturn:
    """Ends the process at once: XLA goes on with an interrupted compilation, and a normal shutdown would crash it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dgemma",
        description="DiffusionGemma, a block-diffusion language model, in JAX.",
        epilog="dgemma COMMAND --help tells what a command takes.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="versions, the device, and what runs there")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="answer prompts", description="Answer prompts."))
    _add_chat(commands.add_parser("chat", help="talk in the terminal", description=CHAT))
    _add_convert(commands.add_parser("convert", help="write a model in another layout", description=CONVERT))
    _add_serve(commands.add_parser("serve", help="answer over HTTP", description=SERVE))
    _add_bench(commands.add_parser("bench", help="measure a step or a server", description="Measure."))
    _add_inspect(commands.add_parser("inspect", help="tell what a model is", description="Tell what a model is."))
    cli_train.add_arguments(commands.add_parser("train", help="train the bundled model", description="Train a model."))
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="one answer each; with none, standard input is the prompt")
    add("--raw", action="store_true", help="the prompt is the model's input as it stands, not a user's turn of a chat")
    add("--image", action="append", metavar="FILE", help="show the model this image with every PROMPT; may be repeated")
    add("--json", action="store_true", help="one JSON object per answer and line")
    add("--watch", action="store_true", help="show the canvas while it is denoised, one prompt after the other")
    add("--slots", type=int, metavar="N", help="prompts denoised together (by default as many as there are, up to 8)")
    _add_model_and_knobs(parser)
    add = parser.add_argument_group("a file of prompts, instead of PROMPT").add_argument
    add("--input", metavar="FILE", help="one JSON object with prompt or messages per line")
    add("--output", metavar="FILE", help="where the answers go, one JSON object per line as they finish")
    add("--resume", action="store_true", help="go on with an --output that an earlier run left")
    add("--shard", metavar="I/N", help="only every N-th line of --input, from line I on, counted from 0")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tools", metavar="FILE", help="JSON file with the functions that the model may call")
    add("--thinking", action="store_true", help="let the model think before it answers")
    _add_model_and_knobs(parser)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_dtype(parser)
    add = parser.add_argument
    add("--served-model-name", metavar="NAME", help="what requests call the model (by default as --model)")
    add("--max-num-seqs", "--slots", type=int, metavar="N", help="answers denoised together (by default what fits)")
    add("--max-model-len", type=int, metavar="N", help="longest prompt plus answer in tokens (by default what fits)")
    add("--memory-fraction", type=float, metavar="X", help="part of JAX's memory to fill (by default 0.9)")
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=8000, metavar="N", help="port to listen on (%(default)s); 0 takes a free one")
    add("--api-key", metavar="KEY", help="demand this bearer token (by default DGEMMA_API_KEY, if that is set)")
    add("--max-queue", type=int, default=64, metavar="N", help="answers that may wait for a slot (%(default)s)")
    add("--request-timeout", type=float, default=600.0, metavar="S", help="most seconds for an answer (%(default)g)")
    add("--shutdown-timeout", type=float, default=30.0, metavar="S", help="seconds to finish answers in (%(default)g)")
    add("--max-body-bytes", type=int, default=16 << 20, metavar="N", help="longest request (%(default)s)")
    add("--max-images", type=int, default=8, metavar="N", help="most images in a request (%(default)s)")
    add("--allow-remote-images", action="store_true", help="fetch images by their http and https URLs, none private")
    add(
        "--log-interval",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds between two lines of figures (%(default)g)",
    )
    add("--vllm-metric-names", action="store_true", help="add vLLM's series to /metrics, and log its line")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    step = benchmarks.add_parser("step", help="one denoising step", description=STEP)
    _add_model(step)
    _add_dtype(step)
    add = step.add_argument
    add("--slots", type=int, default=1, metavar="N", help="canvases denoised together (%(default)s)")
    add("--prefix", type=int, default=64, metavar="N", help="cached positions before each canvas (%(default)s)")
    add("--json", action="store_true", help="one JSON object")
    cli_bench.add_serve(benchmarks.add_parser("serve", help="a running server under load", description=cli_bench.SERVE))


def _add_convert(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SRC", help="directory (Hugging Face, converted, Google's Orbax), hub name, or tiny")
    add("target", metavar="DST", help="directory to write; new or empty")
    add("--dtype", choices=("bfloat16", "float32"), help="of all weights (by default each as it is stored)")
    add("--quantize", choices=("int8", "int4"), help="bits of experts, attention, dense MLP; of the embedding always 8")
    add("--to", choices=("orbax", "hf"), default="orbax", help="Orbax items per layer (default), or safetensors shards")
    add("--overwrite", action="store_true", help="replace the model that lies in DST")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="directory, hub name in the local cache, or tiny")
    add("--tensors", action="store_true", help="list every stored tensor")
    add("--verify", action="store_true", help="read a converted directory and compare each tensor with its checksum")
    add("--json", action="store_true", help="one JSON object")
    add = parser.add_argument_group("how far it is from what it was converted from").add_argument
    add("--report", metavar="PROMPTS", help="compare both on a file of prompts, as for generate --input")
    add("--source", metavar="MODEL", help="what MODEL was converted from")
    add = parser.add_argument_group(
        "what it takes of a GPU; MODEL may be a config.json, no weights are read"
    ).add_argument
    add("--plan", action="store_true", help="memory, the floors of a pass, tokens per second")
    add("--gpu", choices=("h200", "h100", "a100-80", "rtx5090", "gb10"), help="the GPU")
    add("--slots", type=int, metavar="N", help="answers denoised together (1)")
    add("--max-model-len", type=int, metavar="N", help="positions of a slot (by default the model's context)")
    add("--weights", choices=("bf16", "int8", "int4"), help="how weights are stored (by default as MODEL says)")
    add("--steps", type=float, nargs="+", metavar="X", help="denoising steps per canvas (8 16 48)")


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="tiny", help="directory, hub name in the local cache, or tiny (the default, bundled)")
    choices = "auto|reference|xla|pallas|triton"
    add("--attention-implementation", default="auto", metavar=choices, help="auto (the default) takes what suits here")
    add = parser.add_argument_group("several devices (by default one)").add_argument
    add(
        "--data-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="groups that have all weights and their own slots",
    )
    add("--expert-parallel-size", type=int, default=1, metavar="N", help="devices that share experts and vocabulary")
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="devices that share these, heads and MLPs")
    add("--pipeline-parallel-size", type=int, default=1, metavar="N", help="must be 1")


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    choices = ("bfloat16", "float32", "float16")
    parser.add_argument("--dtype", choices=choices, help="of the weights (by default as they are stored)")


def _add_model_and_knobs(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add = parser.add_argument
    add("--seed", type=int, metavar="N", help="0 to 2**63 - 1; the same seed gives the same answer")
    add = parser.add_argument_group("sampling (by default what the model brings along)").add_argument
    add("--max-new-tokens", type=int, metavar="N", help="longest answer in tokens (by default the rest of the context)")
    add("--max-denoising-steps", type=int, metavar="N", help="most steps per canvas")
    add("--entropy-bound", type=float, metavar="X", help="nats of entropy accepted per step; higher is faster")
    add("--t-max", type=float, metavar="X", help="temperature of the first step")
    add("--t-min", type=float, metavar="X", help="temperature that the steps fall towards")
    add("--temperature", type=float, metavar="X", help="of the proposals only; 0 proposes the likeliest tokens")
    add("--top-k", type=int, metavar="N", help="propose only the N likeliest tokens")
    add("--top-p", type=float, metavar="X", help="propose only the likeliest tokens that together hold this share")
    add("--stop", action="append", metavar="TEXT", help="end the answer before this text; may be repeated")


if __name__ == "__main__":
    sys.exit(main())
