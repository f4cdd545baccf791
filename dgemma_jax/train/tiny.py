"""Trains the bundled model: `python -m dgemma_jax.train.tiny`, about 25 minutes on two free cores.

It saves its state every two minutes and goes on from there when started again, so it may be stopped at any time:

    nohup python -m dgemma_jax.train.tiny > tiny.log 2>&1 &
"""

import argparse
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np

from dgemma_jax.api import Model
from dgemma_jax.config import tiny
from dgemma_jax.model.transformer import DIFFERENTIABLE, build
from dgemma_jax.sampling import Sampling
from dgemma_jax.text.tokenizer import Tokenizer
from dgemma_jax.train import checkpoint, data, trainer
from dgemma_jax.train import tokenizer as vocabulary
from dgemma_jax.train.card import card
from dgemma_jax.train.evaluate import evaluate
from dgemma_jax.train.export import GENERATION, export
from dgemma_jax.train.init import initial_params
from dgemma_jax.train.loss import Objective, diffusion_loss
from dgemma_jax.train.optim import optimizer

ASSETS = Path(__file__).parents[1] / "assets" / "tiny"
STEPS = 2400
SEED = 0
ROWS = {"sudoku": 5, "reverse": 3}  # per step
PROMPT_LENGTH = 40  # tokens; the longest prompt has 36
SAVE_EVERY_S = 120
LOG_EVERY = 20
TRY_EVERY = 400
TRY_SEED = 1


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dgemma_jax.train.tiny", description="Train the bundled model.")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of the whole run (%(default)s)")
    parser.add_argument("--out", type=Path, default=ASSETS, help="model directory to write (%(default)s)")
    parser.add_argument("--run", type=Path, default=Path("runs/tiny"), help="where its state lies (%(default)s)")
    options = parser.parse_args(arguments)
    jax.config.update("jax_compilation_cache_dir", str(options.run.absolute() / "compiled"))
    model = run(options.steps, options.run / "state.npz")
    export(options.out, tiny(), model.params, vocabulary.build(), card(model, options.steps))
    print(f"written to {options.out}", flush=True)


def run(steps: int, path: Path) -> Model:
    """Trains to `steps`, from the state at `path` if there is one, and returns the model in bf16."""
    config, tokenizer = tiny(), vocabulary.build()
    graph, abstract = build(config, "float32", DIFFERENTIABLE)
    rule = optimizer(steps)
    settings = {"steps": steps, "seed": SEED, "rows": ROWS}
    state = trainer.start(initial_params(abstract, SEED), rule)
    if path.exists():
        state = checkpoint.load(path, state, settings)
    model = Model(config, stored(state.params), Tokenizer(tokenizer), defaults(tokenizer))
    print(f"{sum(leaf.size for leaf in jax.tree.leaves(abstract)):,} parameters, from step {state.step}", flush=True)

    def batches(step: int) -> data.Batch:
        return data.pack(data.draw(ROWS, SEED, step), tokenizer, PROMPT_LENGTH, config.canvas_length)

    update = trainer.make_update(partial(diffusion_loss, graph, config, Objective()), rule, SEED)
    log, saved = Log(), time.monotonic()
    for now, metrics in trainer.train(state, steps, update, batches):
        step = int(now.step)
        log.add(step, metrics)
        if step == steps or time.monotonic() - saved > SAVE_EVERY_S:
            checkpoint.save(path, now, settings)
            saved = time.monotonic()
        if step == steps or step % TRY_EVERY == 0:
            model.params = stored(now.params)
            scores = {skill: evaluate(model, skill, 64, TRY_SEED) for skill in data.SKILLS}
            log.say(step, " ".join(f"{skill} {score.accuracy:.0%}" for skill, score in scores.items()))
    return model


class Log:
    """Prints the mean of the metrics every LOG_EVERY steps, with the time since the start of this process."""

    def __init__(self) -> None:
        self.started, self.history = time.monotonic(), []

    def add(self, step: int, metrics: tuple[jax.Array, ...]) -> None:
        self.history.append([float(value) for value in metrics])
        if step % LOG_EVERY == 0:
            loss, one_shot = np.mean(self.history, axis=0)
            self.say(step, f"loss {loss:.4f} one shot {one_shot:.3f}")
            self.history.clear()

    def say(self, step: int, text: str) -> None:
        print(f"step {step} {time.monotonic() - self.started:.0f} s {text}", flush=True)


def stored(params: dict) -> dict:
    """The parameters as they will be stored: trained in fp32, rounded to bf16."""
    return jax.tree.map(lambda leaf: leaf.astype(jax.numpy.bfloat16), params)


def defaults(tokenizer: vocabulary.Tokenizer) -> Sampling:
    return Sampling.from_generation_config(GENERATION, special_ids=Tokenizer(tokenizer).special_ids)


if __name__ == "__main__":
    main()
