"""Trains the bundled model: `dgemma train tiny` or `python -m dgemma_jax.train.tiny`, four to five hours on two free
cores.

It saves its state every two minutes and goes on from there when started again, so it may be stopped at any time:

    nohup dgemma train tiny > tiny.log 2>&1 &
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dgemma_jax.cli_train import add_tiny
from dgemma_jax.config import Config, tiny
from dgemma_jax.model.transformer import DIFFERENTIABLE, build
from dgemma_jax.train import checkpoint, data, sight, trainer
from dgemma_jax.train import tokenizer as vocabulary
from dgemma_jax.train.card import card
from dgemma_jax.train.export import export
from dgemma_jax.train.init import initial_params
from dgemma_jax.train.loss import Objective, diffusion_loss
from dgemma_jax.train.optim import optimizer

SEED = 0
SIGHT_STEPS, SIGHT = 1500, {"shape": 32, "dots": 32}
SAVE_EVERY_S = 120
LOG_EVERY = 20
BLIND = replace(tiny(), vision=None)


class Bucket(NamedTuple):
    """Prompts of up to `length` tokens, and how many of each skill make a step."""

    length: int
    rows: dict[str, int]


class Stage(NamedTuple):
    """A run of the optimizer: its steps, its data, and its share of the learning rate. sees: with the image tower."""

    steps: int
    buckets: tuple[Bucket, ...]
    rate: float = 1.0
    sees: bool = False


PICTURES = Bucket(100, {"shape": 8, "dots": 8})
SHORT = Bucket(52, {"sudoku": 3, "reverse": 1, "sort": 6, "infill": 2, "recite": 1, "small talk": 1})
LONG = Bucket(224, {"tool call": 1, "no call": 1, "tool answer": 3, "greet": 5, "thinking": 2, "follow-up": 1})
SEEN = Bucket(100, {"shape": 6, "dots": 10})
# The second stage goes on from the weights of the first, with more of what they were bad at. The third has an image
# tower, which has learned to see by then, and finds words for that; the fourth is for what suffered meanwhile, and the
# last for counting dots again.
STAGES = (
    Stage(
        7000,
        (
            Bucket(52, {"sudoku": 4, "reverse": 1, "sort": 3, "infill": 3, "recite": 1, "small talk": 1}),
            Bucket(224, {"tool call": 3, "no call": 1, "tool answer": 3, "count": 2, "thinking": 2, "follow-up": 1}),
        ),
    ),
    Stage(
        5000,
        (
            Bucket(52, {"sudoku": 3, "reverse": 1, "sort": 5, "infill": 2, "recite": 1, "small talk": 1}),
            Bucket(224, {"tool call": 2, "no call": 2, "tool answer": 3, "greet": 2, "thinking": 3, "follow-up": 1}),
        ),
        rate=0.6,
    ),
    Stage(
        2000,
        (
            PICTURES,
            Bucket(52, {"sudoku": 3, "reverse": 1, "sort": 5, "infill": 3, "recite": 1, "small talk": 1}),
            PICTURES,
            Bucket(224, {"tool call": 2, "no call": 1, "tool answer": 3, "greet": 4, "thinking": 2, "follow-up": 1}),
        ),
        rate=0.4,
        sees=True,
    ),
    Stage(2000, (SHORT, LONG, SHORT, SEEN, SHORT, LONG, SHORT, LONG), rate=0.4, sees=True),
    Stage(1500, (SEEN, SHORT, SEEN, LONG, SEEN, SHORT), rate=0.2, sees=True),
)


OUT = Path(__file__).parents[1] / "assets" / "tiny"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dgemma_jax.train.tiny", description="Train the bundled model.")
    add_tiny(parser, OUT)
    options = parser.parse_args(arguments)
    train(options.out, options.run)


def train(out: Path, directory: Path) -> None:
    """Trains, with the state in `directory`, and writes the model to `out`."""
    jax.config.update("jax_compilation_cache_dir", str(directory.absolute() / "compiled"))
    params = run(STAGES, directory)
    export(out, tiny(), params, vocabulary.build(), card(params, tiny()))
    print(f"written to {out}", flush=True)


def run(stages: tuple[Stage, ...], directory: Path) -> dict:
    """Trains stage after stage, each from its state in `directory` if there is one; returns the parameters in bf16.

    They are the mean of what the last two stages end with, which is better than both at what either forgot (stochastic
    weight averaging, arXiv 1803.05407).
    """
    params, before, done = {}, {}, 0
    for number, stage in enumerate(stages, 1):
        config = tiny() if stage.sees else BLIND
        graph, abstract = build(config, "float32", DIFFERENTIABLE)
        fresh = initial_params(new(abstract, params), SEED)
        if stage.sees and fresh:
            fresh = run_sight(graph, config, fresh, params, directory / "sight.npz")
        params = fresh | params
        before = params
        print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters", flush=True)
        params = run_stage(graph, config, params, stage, done, directory / f"stage{number}.npz")
        done += stage.steps
    return jax.tree.map(lambda a, b: ((a + b) / 2).astype(jax.numpy.bfloat16), before, params)


def new(abstract: dict, params: dict) -> dict:
    """The parts of a model that are not among `params`."""
    return {name: part for name, part in abstract.items() if name not in params}


def run_sight(graph, config: Config, tower: dict, rest: dict, path: Path) -> dict:
    """The image tower once it can see, beside the parameters of a model that cannot."""
    rule = optimizer(SIGHT_STEPS)
    params = tower | {"probe": sight.initial_probe(config.hidden_size)}
    update = trainer.make_update(partial(sight.sight_loss, graph, rest), rule, SEED)
    log = Log("pictures", "told")

    def batches(step: int) -> sight.Pictures:
        return sight.pictures(SIGHT, config, random.Random(f"{SEED} sight {step}"))

    settings = {"steps": SIGHT_STEPS, "seed": SEED, "pictures": SIGHT}
    start = trainer.start(params, rule)
    params = kept(path, settings, start, SIGHT_STEPS, update, batches, lambda _: log).params
    return {name: params[name] for name in tower}


def run_stage(graph, config: Config, params: dict, stage: Stage, done: int, path: Path) -> dict:
    """The parameters after a stage that starts with `params`, `done` steps after the beginning of the training."""
    tokenizer = vocabulary.build()
    rule = optimizer(stage.steps, stage.rate)
    settings = {"steps": stage.steps, "seed": SEED, "rate": stage.rate, "buckets": [*map(list, stage.buckets)]}
    update = trainer.make_update(partial(diffusion_loss, graph, config, Objective()), rule, SEED)
    logs = {b.length: Log(f"prompts to {b.length}", "one shot") for b in stage.buckets}

    def batches(step: int) -> data.Batch:
        length, rows = bucket(stage, step)
        rng = random.Random(f"{SEED} {done + step}")
        return data.pack(data.draw(rows, rng), tokenizer, length, config, rng)

    start = trainer.start(params, rule)
    log = lambda step: logs[bucket(stage, step).length]  # noqa: E731
    return kept(path, settings, start, stage.steps, update, batches, log).params


def kept(
    path: Path,
    settings: dict,
    start: trainer.State,
    steps: int,
    update: trainer.Update,
    batches: Callable[[int], Any],
    log: Callable[[int], "Log"],
) -> trainer.State:
    """The state after so many steps; it is saved in `path` on the way and goes on from there. log: which one hears of a
    step."""
    state = start = checkpoint.load(path, start, settings) if path.exists() else start
    print(f"{path.stem}: from step {state.step} of {steps}", flush=True)
    saved = time.monotonic()
    for state, metrics in trainer.train(start, steps, update, batches):
        step = int(state.step)
        log(step - 1).add(step, metrics)
        if step == steps or time.monotonic() - saved > SAVE_EVERY_S:
            checkpoint.save(path, state, settings)
            saved = time.monotonic()
    return state


def bucket(stage: Stage, step: int) -> Bucket:
    """Two steps of each in turn: one without self-conditioning, one with."""
    return stage.buckets[step // 2 % len(stage.buckets)]


class Log:
    """Prints the mean of the metrics every LOG_EVERY of its steps, with the time since the start.

    what: these steps are; measure: the second metric's name, beside the loss.
    """

    def __init__(self, what: str, measure: str) -> None:
        self.started, self.what, self.measure, self.history = time.monotonic(), what, measure, []

    def add(self, step: int, metrics: tuple[jax.Array, ...]) -> None:
        self.history.append([float(value) for value in metrics])
        if len(self.history) == LOG_EVERY:
            loss, share = np.mean(self.history, axis=0)
            seconds = time.monotonic() - self.started
            print(f"step {step} {seconds:.0f} s {self.what}: loss {loss:.4f} {self.measure} {share:.3f}", flush=True)
            self.history.clear()


if __name__ == "__main__":
    main()
