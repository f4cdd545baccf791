"""What 8 and 4 bits cost: `python -m benchmarks.quantized`.

The bundled model is converted and answers the same held-out prompts as its source with the same seeds; its logits are
compared in the source's states; and a denoising step of a larger random model is timed, all three formats taking turns.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp

import dgemma_jax as dg
from benchmarks.skills import PROMPTS, SLOTS, evaluate
from dgemma_jax.checkpoint import open_directory
from dgemma_jax.config import QUANTIZATIONS, Config, LayerConfig, tiny
from dgemma_jax.convert.conversion import convert
from dgemma_jax.diffusion.policy import Knobs, Policy
from dgemma_jax.diffusion.random import key_from_seed
from dgemma_jax.diffusion.step import start, step
from dgemma_jax.fidelity import compare
from dgemma_jax.inspection import part_of
from dgemma_jax.model.transformer import build
from dgemma_jax.quantization import dequantized_params, quantized_params
from dgemma_jax.sampling import BUILT_IN
from dgemma_jax.train import prompts
from tests.random_models import random_params

RESULTS = Path(__file__).parent / "results" / "quantized.json"
AIMS = {"int8": 0.5, "int4": 3.0}  # points that a skill may lose
COMPARED = 3  # prompts per skill whose logits are compared
ROUNDS, CALLS = 7, 2
PARTS = ("attention", "dense MLP", "experts", "embedding")
# A sixth of the release's width, as in benchmarks/step.py.
TIMED = replace(
    tiny(),
    vocab_size=32_768,
    hidden_size=512,
    intermediate_size=512,
    self_conditioning_size=512,
    num_attention_heads=8,
    layers=(LayerConfig("sliding", 4, 64),) * 5 + (LayerConfig("full", 1, 128),),
    sliding_window=128,
    num_experts=16,
    top_k_experts=4,
    moe_intermediate_size=256,
    canvas_length=256,
    dtype="float32",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=prompts.COUNT, help="prompts per skill (%(default)s)")
    options = parser.parse_args()
    report = {
        "command": f"python -m benchmarks.quantized --count {options.count}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("dgemma-jax", "jax", "jaxlib", "flax", "numpy")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "aims, points": AIMS,
        "step": times(TIMED),
    }
    with tempfile.TemporaryDirectory() as root:
        source = dg.load("tiny")
        models = {"source": source} | {name: converted(Path(root), name) for name in QUANTIZATIONS}
    examples = {skill: found[: options.count] for skill, found in prompts.read(PROMPTS).items()}
    some = [example for found in examples.values() for example in found[:COMPARED]]
    requests = [source.request(e.prompt, seed=seed, images=e.images or None) for seed, e in enumerate(some)]
    report["bytes"] = {name: sum(x.nbytes for x in jax.tree.leaves(model.params)) for name, model in models.items()}
    report["logits"] = {name: fidelity(source, models[name], requests) for name in QUANTIZATIONS}
    report["logits with one part quantised"] = {
        f"{name}, {part}": fidelity(source, with_part(source, name, part), requests)
        for name in QUANTIZATIONS
        for part in PARTS
        if (name, part) != ("int4", "embedding")
    }
    report["skills"] = {skill: skill_of(models, skill, found) for skill, found in examples.items()}
    losses = {name: max(row["points lost"][name] for row in report["skills"].values()) for name in QUANTIZATIONS}
    report["most points lost"] = losses
    print(f"most points lost: {losses}, at most {AIMS}")
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


def converted(root: Path, quantization: str) -> dg.Model:
    """The bundled model in another format, through its files."""
    opened = open_directory("tiny")
    convert(opened.weights, root / quantization, opened.config, opened.abstract, quantize=quantization)
    return dg.load(root / quantization)


def with_part(source: dg.Model, quantization: str, part: str) -> dg.Model:
    """The source with the numbers that one part of it has when quantised."""
    numbers = dequantized_params(quantized_params(source.params, quantization), source.dtype)

    def choose(path: tuple, plain: jax.Array, quantized: jax.Array) -> jax.Array:
        return quantized if part_of([key.key for key in path]) == part else plain

    params = jax.tree.map_with_path(choose, source.params, numbers)
    return dg.Model(source.config, params, source.tokenizer, source.defaults)


def fidelity(source: dg.Model, model: dg.Model, requests: list) -> dict:
    found = compare(source, model, requests, SLOTS)
    print(
        f"RMS error {found.rms_error:.4f}, argmax the same at {found.argmax_agreement:.2%}, {found.model}", flush=True
    )
    return found._asdict() | {name: getattr(found, name)._asdict() for name in ("source", "model")}


def skill_of(models: dict[str, dg.Model], skill: str, examples: list) -> dict:
    """Accuracy and steps of every model, and the points that each format loses."""
    scores = {name: evaluate(model, examples, slots=SLOTS)[0] for name, model in models.items()}
    lost = {name: 100 * (scores["source"].accuracy - scores[name].accuracy) for name in QUANTIZATIONS}
    line = "  ".join(
        f"{name} {score.accuracy:.1%}, {score.steps_per_canvas:.2f} steps" for name, score in scores.items()
    )
    print(f"{skill:12}{line}", flush=True)
    return {name: score._asdict() for name, score in scores.items()} | {"points lost": lost}


def times(config: Config) -> dict:
    """Seconds of a denoising step of one row behind an empty cache, by format, and their ratio to plain weights'."""
    params = random_params(config)
    runs = {"float32": stepper(config, params)}
    for name in QUANTIZATIONS:
        runs[name] = stepper(replace(config, quantization=name), quantized_params(params, name))
    rounds = [{name: seconds(run) for name, run in runs.items()} for _ in range(ROUNDS)]
    median = {name: statistics.median(row[name] for row in rounds) for name in runs}
    ratios = {name: statistics.median(row[name] / row["float32"] for row in rounds) for name in QUANTIZATIONS}
    print(f"a step: {median} s, ratios {ratios}", flush=True)
    return {"seconds": median, "ratio": ratios, "rounds": rounds}


def stepper(config: Config, params: dict) -> Callable[[], jax.Array]:
    """One compiled step, warmed up."""
    graph, _ = build(config)
    cache = dg.init_cache(config, 1, 1024)
    zeros, keys = jnp.zeros(1, jnp.int32), key_from_seed(0)[None]
    state = start(config, keys, zeros, jnp.ones(1, bool), config.dtype)
    inputs = (cache, state, keys, zeros, Knobs.of([BUILT_IN]), jnp.zeros((1, config.vocab_size), bool))
    compiled = jax.jit(partial(step, graph), static_argnums=7)

    def run() -> None:
        jax.block_until_ready(compiled(params, *inputs, Policy()))

    run()
    return run


def seconds(run: Callable[[], None]) -> float:
    """The faster of two calls."""
    taken = []
    for _ in range(CALLS):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return min(taken)


if __name__ == "__main__":
    main()
