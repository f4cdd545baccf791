"""4x4 sudokus with one solution. The 288 filled grids are shared; only the puzzles are held out."""

import random
from collections.abc import Iterable
from itertools import permutations, product

import numpy as np

from dgemma_jax.train.skills.question import Question, ask

Grid = tuple[int, ...]  # 16 digits 1..4, row by row


def _solutions() -> list[Grid]:
    """All 288 filled 4x4 grids: rows, columns and 2x2 boxes hold each digit once."""
    rows = list(permutations((1, 2, 3, 4)))
    bands = [a + b for a in rows for b in rows if {*a[:2], *b[:2]} == {*a[2:], *b[2:]} == {1, 2, 3, 4}]
    columns = [[{band[i], band[i + 4]} for i in range(4)] for band in bands]
    return [
        bands[top] + bands[low]
        for top, low in product(range(len(bands)), repeat=2)
        if all(above.isdisjoint(below) for above, below in zip(columns[top], columns[low], strict=True))
    ]


SOLUTIONS = _solutions()
_SOLUTION_ARRAY = np.array(SOLUTIONS)


def lines(cells: Iterable[object]) -> str:
    text = "".join(map(str, cells))
    return "\n".join(text[i : i + 4] for i in range(0, 16, 4))


def sudoku(rng: random.Random) -> Question:
    """A 4x4 sudoku with 4 to 12 givens and exactly one solution."""
    while True:
        solution = rng.choice(SOLUTIONS)
        givens = rng.sample(range(16), rng.randint(4, 12))
        if (_SOLUTION_ARRAY[:, givens] == np.take(solution, givens)).all(1).sum() == 1:
            break
    puzzle = lines(digit if i in givens else "." for i, digit in enumerate(solution))
    head = rng.choice(("Solve this sudoku:\n", "Solve this sudoku:\n", "Solve:\n"))
    return ask(puzzle, head + puzzle, lines(solution))
