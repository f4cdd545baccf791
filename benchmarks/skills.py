"""Accuracy and denoising steps of the bundled model's skills on held-out prompts: `python -m benchmarks.skills`.

The prompts are the same list every time, answered once each through the public API with the model's own defaults.
"""

import argparse
import json
import math
import platform
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import dgemma_jax as dg
from dgemma_jax.train.data import SKILLS
from dgemma_jax.train.evaluate import Score, evaluate

RESULTS = Path(__file__).parent / "results" / "skills.json"
SEED = 2
SLOTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.skills", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="model to measure (%(default)s)")
    parser.add_argument("--count", type=int, default=500, help="prompts per skill (%(default)s)")
    options = parser.parse_args()
    model = dg.load(options.model)
    rows = {}
    print(f"{'skill':10}{'right':>8}{'95 % interval':>16}{'steps/canvas':>14}{'tokens/step':>13}{'early':>8}{'s':>7}")
    for skill in SKILLS:
        started = time.perf_counter()
        score = evaluate(model, skill, options.count, SEED, SLOTS)
        rows[skill] = row(score, options.count, time.perf_counter() - started)
        print(line(skill, rows[skill]), flush=True)
    report = {
        "command": f"python -m benchmarks.skills --model {options.model} --count {options.count}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("dgemma-jax", "jax", "jaxlib", "flax", "numpy")},
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "dtype": model.dtype,
        "prompts_seed": SEED,
        "slots": SLOTS,
        "skills": rows,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


def row(score: Score, count: int, seconds: float) -> dict:
    return {"count": count, **score._asdict(), "interval_95": wilson(score.accuracy, count), "seconds": seconds}


def line(skill: str, row: dict) -> str:
    low, high = row["interval_95"]
    return (
        f"{skill:10}{row['accuracy']:8.1%}{f'{low:.1%} - {high:.1%}':>16}{row['steps_per_canvas']:14.2f}"
        f"{row['tokens_per_step']:13.2f}{row['stopped_early']:8.1%}{row['seconds']:7.1f}"
    )


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a share seen in `count` trials."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2) / (1 + z * z / count)
    return middle - reach, middle + reach


if __name__ == "__main__":
    main()
