"""The memory plan of the 26B model on five GPUs: `python -m benchmarks.memory_plan`, a table of docs/howto/quantise.md.

With --write it replaces the table there. Nothing is measured on a GPU: see `dgemma inspect --plan`.
"""

import argparse
import re
from pathlib import Path

from dgemma_jax.config import gemma_26b_a4b
from dgemma_jax.engine.capacity import MOST_CHOSEN_ELSEWHERE
from dgemma_jax.engine.hardware import GPUS, WEIGHTS, Estimate, estimate

PAGE = Path(__file__).parents[1] / "docs/howto/quantise.md"
BEGIN, END = "<!-- memory plan -->\n", "<!-- end of memory plan -->"
LENGTH, STEPS = 8192, 16
HEAD = (
    "| GPU | weights | GB of them | most slots of 8,192 | longest single slot | ms a pass, 1 slot | tokens/s, 1 slot |"
    " tokens/s, most slots |"
)


def table() -> str:
    lines = [HEAD, "|---|---|" + "---:|" * 6]
    return "\n".join(lines + [row(gpu, weights) for gpu in GPUS for weights in WEIGHTS]) + "\n"


def row(gpu: str, weights: str) -> str:
    """One line; floors throughout."""
    config = gemma_26b_a4b()

    def planned(slots: int = 1, length: int = LENGTH) -> Estimate:
        return estimate(config, gpu, weights, slots, length)

    one = planned()
    cells = [GPUS[gpu].name, weights, f"{one.weights / 1e9:.1f}"]
    if one.left < 0:
        return f"| {' | '.join(cells)} | does not fit | | | | |"
    slots = max(n for n in _powers(1, MOST_CHOSEN_ELSEWHERE) if planned(n).left >= 0)
    length = max(n for n in _powers(LENGTH, config.max_position_embeddings) if planned(1, n).left >= 0)
    bound = "reading" if one.reading > one.computing else "operations"
    cells += [str(slots), f"{length:,}", f"{1e3 * max(one.reading, one.computing):.1f} ({bound})"]
    return f"| {' | '.join([*cells, f'{one.rate(STEPS):,.0f}', f'{planned(slots).rate(STEPS):,.0f}'])} |"


def _powers(first: int, last: int) -> list[int]:
    return [first << n for n in range(20) if first << n <= last]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_plan", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the table there")
    if parser.parse_args().write:
        text = PAGE.read_text(encoding="utf-8")
        new = re.sub(f"(?<={BEGIN})[\\s\\S]*(?={END})", lambda _: table(), text)
        PAGE.write_text(new, encoding="utf-8")
    print(table(), end="")


if __name__ == "__main__":
    main()
