"""Accuracy and denoising steps of the bundled model's skills on held-out prompts: `python -m benchmarks.skills`.

The prompts lie in one fixed file and are answered once each through the public API: all of them with the model's own
defaults, the first forty of each skill also under other entropy bounds and step limits.
"""

import argparse
import json
import math
import platform
import shlex
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import dgemma_jax as dg
from dgemma_jax.train import card, data, prompts
from dgemma_jax.train.evaluate import Score, evaluate
from dgemma_jax.train.skills import RECITALS, SKILLS, Question

HERE = Path(__file__).parent
PROMPTS, RESULTS = HERE / "prompts.jsonl.gz", HERE / "results" / "skills.json"
CARD = Path(card.__file__).parents[1] / "assets" / "tiny" / "README.md"
AIMS = {"sudoku": 0.97, "tool answer": 0.97, "infill": 0.90}
AIM = 0.95  # of every other skill
SETTINGS = {
    **{f"entropy bound {bound}": dg.Sampling(entropy_bound=bound) for bound in (0.01, 0.03, 0.3, 1.0, 3.0)},
    **{f"at most {steps} steps": dg.Sampling(max_denoising_steps=steps) for steps in (1, 2, 4, 8)},
}
FEW = 40  # prompts per skill under other settings
SLOTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.skills", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="model to measure (%(default)s)")
    parser.add_argument("--count", type=int, default=prompts.COUNT, help="prompts per skill (%(default)s)")
    parser.add_argument("--skills", nargs="+", choices=[*SKILLS, "recite"], help="which to measure (by default all)")
    parser.add_argument("--card", action="store_true", help="write the figures into the bundled model's card")
    options = parser.parse_args()
    model = dg.load(options.model)
    examples = {skill: found[: options.count] for skill, found in prompts.read(PROMPTS).items()}
    examples["recite"] = [
        data.render(Question((), [{"role": "user", "content": q}], f"{a}<turn|>")) for q, a in RECITALS
    ]
    examples = {skill: found for skill, found in examples.items() if skill in (options.skills or examples)}
    report = {
        "command": f"python -m benchmarks.skills {shlex.join(sys.argv[1:])}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("dgemma-jax", "jax", "jaxlib", "flax", "numpy")},
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "dtype": model.dtype,
        "prompts": PROMPTS.name,
        "slots": SLOTS,
        "skills": {skill: measured(model, skill, found) for skill, found in examples.items()},
        "settings": {name: sweep(model, examples, name, sampling) for name, sampling in SETTINGS.items()},
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    if options.card:
        CARD.write_text(card.card(model.params, model.config, report["skills"]))


def measured(model: dg.Model, skill: str, examples: list[data.Example]) -> dict:
    started = time.perf_counter()
    score, wrong = evaluate(model, examples, slots=SLOTS)
    seconds, count = time.perf_counter() - started, len(examples)
    row = {"count": count, **score._asdict(), "interval_95": wilson(score.accuracy, count), "wrong": wrong}
    print(line(skill, score, row["interval_95"]), f"{seconds:.0f} s", flush=True)
    return row | {"seconds": seconds, "aim": AIMS.get(skill, AIM) if skill in SKILLS else None}


def sweep(model: dg.Model, examples: dict[str, list[data.Example]], name: str, sampling: dg.Sampling) -> dict:
    """Accuracy and steps per canvas of every skill under one setting."""
    print(name, flush=True)
    rows = {}
    for skill, found in examples.items():
        score, _ = evaluate(model, found[:FEW], sampling, SLOTS)
        rows[skill] = {"accuracy": score.accuracy, "steps_per_canvas": score.steps_per_canvas}
        print(f"    {skill:12}{score.accuracy:8.1%}{score.steps_per_canvas:8.2f} steps a canvas", flush=True)
    return rows


def line(skill: str, score: Score, interval: tuple[float, float]) -> str:
    low, high = interval
    return (
        f"{skill:12}{score.accuracy:8.1%} ({low:.1%} - {high:.1%}) {score.steps_per_canvas:6.2f} steps a canvas"
        f" {score.tokens_per_step:6.2f} tokens a step, {score.stopped_early:.1%} of canvases stopped early"
    )


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a share seen in `count` trials."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2) / (1 + z * z / count)
    return middle - reach, middle + reach


if __name__ == "__main__":
    main()
