"""Trains the bundled model: `python -m dgemma_jax.train.tiny`, about 80 minutes on two free cores.

It saves its state every two minutes and goes on from there when started again, so it may be stopped at any time:

    nohup python -m dgemma_jax.train.tiny > tiny.log 2>&1 &
"""

import argparse
import random
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from dgemma_jax.config import tiny
from dgemma_jax.model.transformer import DIFFERENTIABLE, build
from dgemma_jax.train import checkpoint, data, trainer
from dgemma_jax.train import tokenizer as vocabulary
from dgemma_jax.train.card import card
from dgemma_jax.train.export import export
from dgemma_jax.train.init import initial_params
from dgemma_jax.train.loss import Objective, diffusion_loss
from dgemma_jax.train.optim import optimizer

ASSETS = Path(__file__).parents[1] / "assets" / "tiny"
STEPS = 7000
SEED = 0
SAVE_EVERY_S = 120
LOG_EVERY = 20


class Bucket(NamedTuple):
    """Prompts of up to `length` tokens, and how many of each skill make a step."""

    length: int
    rows: dict[str, int]


BUCKETS = (
    Bucket(52, {"sudoku": 4, "reverse": 1, "sort": 3, "infill": 3, "recite": 1, "small talk": 1}),
    Bucket(224, {"tool call": 3, "no call": 1, "tool answer": 3, "count": 2, "thinking": 2, "follow-up": 1}),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dgemma_jax.train.tiny", description="Train the bundled model.")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of the whole run (%(default)s)")
    parser.add_argument("--out", type=Path, default=ASSETS, help="model directory to write (%(default)s)")
    parser.add_argument("--run", type=Path, default=Path("runs/tiny"), help="where its state lies (%(default)s)")
    options = parser.parse_args(arguments)
    jax.config.update("jax_compilation_cache_dir", str(options.run.absolute() / "compiled"))
    params = run(options.steps, options.run / "state.npz")
    export(options.out, tiny(), params, vocabulary.build(), card(params, tiny()))
    print(f"written to {options.out}", flush=True)


def run(steps: int, path: Path) -> dict:
    """Trains to `steps`, from the state at `path` if there is one, and returns the parameters in bf16."""
    config, tokenizer = tiny(), vocabulary.build()
    graph, abstract = build(config, "float32", DIFFERENTIABLE)
    rule = optimizer(steps)
    settings = {"steps": steps, "seed": SEED, "buckets": [[length, rows] for length, rows in BUCKETS]}
    start = state = trainer.start(initial_params(abstract, SEED), rule)
    if path.exists():
        start = state = checkpoint.load(path, start, settings)
    print(f"{sum(leaf.size for leaf in jax.tree.leaves(abstract)):,} parameters, from step {state.step}", flush=True)

    def batches(step: int) -> data.Batch:
        length, rows = bucket(step)
        rng = random.Random(f"{SEED} {step}")
        return data.pack(data.draw(rows, rng), tokenizer, length, config, rng)

    update = trainer.make_update(partial(diffusion_loss, graph, config, Objective()), rule, SEED)
    logs, saved = {b.length: Log(b.length) for b in BUCKETS}, time.monotonic()
    for state, metrics in trainer.train(start, steps, update, batches):
        step = int(state.step)
        logs[bucket(step - 1).length].add(step, metrics)
        if step == steps or time.monotonic() - saved > SAVE_EVERY_S:
            checkpoint.save(path, state, settings)
            saved = time.monotonic()
    return stored(state.params)


def bucket(step: int) -> Bucket:
    """Two steps of each in turn: one without self-conditioning, one with."""
    return BUCKETS[step // 2 % len(BUCKETS)]


class Log:
    """Prints the mean of a bucket's metrics every LOG_EVERY of its steps, with the time since the start."""

    def __init__(self, length: int) -> None:
        self.started, self.length, self.history = time.monotonic(), length, []

    def add(self, step: int, metrics: tuple[jax.Array, ...]) -> None:
        self.history.append([float(value) for value in metrics])
        if len(self.history) == LOG_EVERY:
            loss, one_shot = np.mean(self.history, axis=0)
            what = f"prompts to {self.length}: loss {loss:.4f} one shot {one_shot:.3f}"
            print(f"step {step} {time.monotonic() - self.started:.0f} s {what}", flush=True)
            self.history.clear()


def stored(params: dict) -> dict:
    """The parameters as they will be stored: trained in fp32, rounded to bf16."""
    return jax.tree.map(lambda leaf: leaf.astype(jax.numpy.bfloat16), params)


if __name__ == "__main__":
    main()
