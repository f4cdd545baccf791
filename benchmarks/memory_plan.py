"""The memory plan of the 26B model on five GPUs: `python -m benchmarks.memory_plan`, a table of docs/howto/quantise.md.

With --write it replaces the table there, and the README's, which has a line per GPU. Nothing is measured on a GPU: see
`dgemma inspect --plan`.
"""

import argparse
import re
from pathlib import Path

from dgemma_jax.config import gemma_26b_a4b
from dgemma_jax.engine.capacity import MOST_CHOSEN_ELSEWHERE
from dgemma_jax.engine.hardware import GPUS, WEIGHTS, Estimate, estimate

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs/howto/quantise.md", ROOT / "README.md"
BEGIN, END = "<!-- memory plan -->\n", "<!-- end of memory plan -->"
CONFIG, LENGTH, STEPS = gemma_26b_a4b(), 8192, 16
HEAD = (
    "| GPU | weights | GB of them | most slots of 8,192 | longest single slot | ms a pass, 1 slot | tokens/s, 1 slot |"
    " tokens/s, most slots |"
)


def table() -> str:
    lines = [HEAD, "|---|---|" + "---:|" * 6]
    return "\n".join(lines + [row(gpu, weights) for gpu in GPUS for weights in WEIGHTS]) + "\n"


def row(gpu: str, weights: str) -> str:
    """One line; floors throughout."""
    one = planned(gpu, weights)
    cells = [GPUS[gpu].name, weights, f"{one.weights / 1e9:.1f}"]
    if (slots := most_slots(gpu, weights)) is None:
        return f"| {' | '.join(cells)} | does not fit | | | | |"
    longest = CONFIG.max_position_embeddings
    length = max(n for n in _powers(LENGTH, longest) if planned(gpu, weights, 1, n).left >= 0)
    bound = "reading" if one.reading > one.computing else "operations"
    cells += [str(slots), f"{length:,}", f"{1e3 * max(one.reading, one.computing):.1f} ({bound})"]
    rates = (f"{planned(gpu, weights, count).rate(STEPS):,.0f}" for count in (1, slots))
    return f"| {' | '.join([*cells, *rates])} |"


def short_table() -> str:
    """The README's: the most slots by GPU and weights."""
    sizes = (f"{weights}, {planned('h200', weights).weights / 1e9:.1f} GB" for weights in WEIGHTS)
    lines = [f"| GPU | {' | '.join(sizes)} |", "|---|" + "---:|" * len(WEIGHTS)]
    for gpu in GPUS:
        most = (most_slots(gpu, weights) or "does not fit" for weights in WEIGHTS)
        lines.append(f"| {GPUS[gpu].name} | {' | '.join(map(str, most))} |")
    return "\n".join(lines) + "\n"


def planned(gpu: str, weights: str, slots: int = 1, length: int = LENGTH) -> Estimate:
    return estimate(CONFIG, gpu, weights, slots, length)


def most_slots(gpu: str, weights: str) -> int | None:
    """Of LENGTH positions; None if not even one fits."""
    return max((n for n in _powers(1, MOST_CHOSEN_ELSEWHERE) if planned(gpu, weights, n).left >= 0), default=None)


def _powers(first: int, last: int) -> list[int]:
    return [first << n for n in range(20) if first << n <= last]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_plan", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the tables of the pages")
    if parser.parse_args().write:
        for page, new in ((PAGE, table()), (README, short_table())):
            old = page.read_text(encoding="utf-8")
            page.write_text(re.sub(f"(?<={BEGIN})[\\s\\S]*(?={END})", lambda _, new=new: new, old), encoding="utf-8")
    print(table(), end="")


if __name__ == "__main__":
    main()
