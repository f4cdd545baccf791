"""Training data of the bundled model, made on the fly: prompts in the chat format and their answers, per skill.

Of every skill, the prompts whose essence (the puzzle, the list) has a CRC-32 divisible by 16 are held out: training
never draws them, evaluation draws nothing else. Sudokus share their 288 solutions; only the puzzles are held apart.
"""

import random
import string
import zlib
from collections.abc import Callable, Iterable
from itertools import permutations, product
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from dgemma_jax.train import tokenizer as ids


class Question(NamedTuple):
    """What a user may ask. `essence` decides on which side of the held-out split it falls, however it is worded."""

    essence: str
    text: str
    answer: str


class Example(NamedTuple):
    """A rendered prompt and the answer that ends it, as strings with control tokens."""

    prompt: str
    answer: str


class Batch(NamedTuple):
    """One canvas per row, as numpy arrays: what the diffusion loss needs to know about the data.

    tokens i32[B,T] (prompts, right-padded), lengths i32[B] (of the prompts), canvas i32[B,C] (the answer, its stop id,
    then fill), answer i32[B] (positions of the canvas up to and with the stop id).
    """

    tokens: np.ndarray
    lengths: np.ndarray
    canvas: np.ndarray
    answer: np.ndarray


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
    head = rng.choice(("Solve this sudoku:\n", "Solve:\n"))
    return Question(puzzle, head + puzzle, lines(solution))


# As many numbers of one digit as of two: lists that people type have both.
NUMBERS = [*range(10)] * 9 + [*range(10, 100)]


def reverse(rng: random.Random) -> Question:
    """A list of two to six numbers below 100, letters or words, separated by spaces or commas, to be reversed."""
    kind = rng.choice((range(10), NUMBERS, NUMBERS, string.ascii_lowercase, ids.LIST_WORDS))
    items = [str(rng.choice(kind)) for _ in range(rng.randint(2, 6))]
    comma = rng.choice((" ", ", "))
    head = rng.choice(("Reverse this list: ", "Reverse: ", "Reverse "))
    return Question(" ".join(items), head + comma.join(items), comma.join(reversed(items)))


SKILLS: dict[str, Callable[[random.Random], Question]] = {"sudoku": sudoku, "reverse": reverse}


def is_held_out(question: Question) -> bool:
    return zlib.crc32(question.essence.encode()) % 16 == 0


def sample(skill: str, rng: random.Random, held_out: bool = False) -> Example:
    """Draws questions until one falls on the wanted side of the split, and renders it in the chat format."""
    question = SKILLS[skill](rng)
    while is_held_out(question) != held_out:
        question = SKILLS[skill](rng)
    return Example(f"<bos><|turn>user\n{question.text}<turn|>\n<|turn>model\n", f"{question.answer}<turn|>")


def held_out(skill: str, count: int, seed: int) -> list[Example]:
    """The first `count` different held-out examples of a seeded stream."""
    rng = random.Random(f"{skill} {seed}")
    found: dict[str, Example] = {}
    while len(found) < count:
        example = sample(skill, rng, held_out=True)
        found.setdefault(example.prompt, example)
    return list(found.values())


def pack(examples: list[Example], tokenizer: Tokenizer, length: int, canvas_length: int) -> Batch:
    """Encodes examples into arrays with T = `length`, C = `canvas_length`; the fill after the stop id is `<eos>`.

    Raises ValueError if a prompt or an answer does not fit.
    """
    tokens = np.full((len(examples), length), ids.PAD, np.int32)
    canvas = np.full((len(examples), canvas_length), ids.EOS, np.int32)
    sizes = np.zeros((2, len(examples)), np.int32)
    for row, example in enumerate(examples):
        prompt, answer = (tokenizer.encode(text).ids for text in example)
        if len(prompt) > length or len(answer) > canvas_length:
            raise ValueError(f"{len(prompt)} + {len(answer)} tokens exceed {length} + {canvas_length}: {example}")
        tokens[row, : len(prompt)], canvas[row, : len(answer)] = prompt, answer
        sizes[:, row] = len(prompt), len(answer)
    return Batch(tokens, sizes[0], canvas, sizes[1])


def draw(skills: dict[str, int], seed: int, step: int) -> list[Example]:
    """The training examples of a step, `skills[name]` of each skill; a function of seed and step alone."""
    rng = random.Random(f"{seed} {step}")
    return [sample(skill, rng) for skill, count in skills.items() for _ in range(count)]
