"""Lists of two to six numbers below 100, letters or words, separated by blanks or commas."""

import random
import string
from collections.abc import Callable

from dgemma_jax.train.skills.question import Question, ask
from dgemma_jax.train.tokenizer import LIST_WORDS

# As many numbers of one digit as of two: lists that people type have both.
NUMBERS = [*range(10)] * 9 + [*range(10, 100)]


def _draw(rng: random.Random, kinds: tuple) -> tuple[list, str]:
    """The items and what separates them."""
    kind = rng.choice(kinds)
    return [rng.choice(kind) for _ in range(rng.randint(2, 6))], rng.choice((" ", ", "))


def _question(rng: random.Random, items: list, separator: str, change: Callable[[list], list], verb: str) -> Question:
    head = rng.choice((f"{verb} this list: ", f"{verb} this list: ", f"{verb}: ", f"{verb} "))
    before, after = map(separator.join, (map(str, items), map(str, change(items))))
    return ask(f"{verb} {' '.join(map(str, items))}", head + before, after)


def reverse(rng: random.Random) -> Question:
    """The items from last to first."""
    items, separator = _draw(rng, (range(10), NUMBERS, NUMBERS, string.ascii_lowercase, LIST_WORDS))
    return _question(rng, items, separator, lambda items: items[::-1], "Reverse")


def sort(rng: random.Random) -> Question:
    """The items in ascending or alphabetical order."""
    kinds = (range(10), NUMBERS, range(100), range(100), string.ascii_lowercase, LIST_WORDS)
    items, separator = _draw(rng, kinds)
    return _question(rng, items, separator, sorted, "Sort")
