"""What a skill draws, and the invented words that fill questions."""

import random
import zlib
from typing import Any, NamedTuple

from dgemma_jax.train.tokenizer import CONSONANTS, VOWELS


class Question(NamedTuple):
    """What a user may ask.

    essence: what decides on the side of the held-out split, however it is worded; all of it must fall on one side. With
    none the question is always free for training.
    messages: the conversation, without the answer. answer: the model's turn as rendered, with control tokens and the
    stop token. tools: declarations in OpenAI's format. gap: where in an infilling answer the gap lies, in characters.
    """

    essence: tuple[str, ...]
    messages: list[dict[str, Any]]
    answer: str
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = False
    gap: tuple[int, int] | None = None


def ask(essence: str | None, text: str, answer: str) -> Question:
    """A question of one user turn, answered in plain text."""
    return Question((essence,) if essence else (), [{"role": "user", "content": text}], f"{answer}<turn|>")


def is_held_out(essence: str) -> bool:
    """One essence in 16."""
    return zlib.crc32(essence.encode()) % 16 == 0


def side(question: Question) -> bool | None:
    """True: held out. False: free for training. None: its parts fall on both sides, so it serves neither."""
    sides = {is_held_out(part) for part in question.essence} or {False}
    return sides.pop() if len(sides) == 1 else None


def invented(rng: random.Random, least: int = 3, most: int = 8) -> str:
    """A word that can be spoken, or one time in eight any letters."""
    length = rng.randint(least, most)
    if rng.random() < 1 / 8:
        return "".join(rng.choices(VOWELS + CONSONANTS, k=length))
    word = ""
    while len(word) < length:
        onset, coda = rng.random() < 0.9, rng.random() < 0.3
        word += rng.choice(CONSONANTS) * onset + rng.choice(VOWELS) + rng.choice(CONSONANTS) * coda
    return word[:length]


def split_invented(rng: random.Random, least: int = 3, most: int = 8) -> str:
    """An invented word of the side of the split that this stream of questions is on: see `one_side`."""
    while is_held_out(word := invented(rng, least, most)) != one_side(rng):
        pass
    return word


def one_side(rng: random.Random) -> bool:
    """Whether this generator draws held-out questions: `HeldOut` does, any other does not."""
    return isinstance(rng, HeldOut)


class HeldOut(random.Random):
    """The generator of held-out questions, so that words are drawn from their side at once and not by rejection."""
