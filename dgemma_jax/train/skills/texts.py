"""Skills about text: greeting, counting, reciting, filling a gap, and what to say to anything else."""

import random
import string

from dgemma_jax.train.skills.lists import reverse, sort
from dgemma_jax.train.skills.question import Question, ask, invented, split_invented
from dgemma_jax.train.skills.sudoku import sudoku
from dgemma_jax.train.tokenizer import DAYS, LIST_WORDS, MONTHS

GAP = "<gap>"
REFUSAL = "Sorry, I cannot do that."


def sentence(rng: random.Random, most: int) -> str:
    """Invented words, some from lists, of at most `most` characters in all."""
    words: list[str] = []
    length = rng.randint(3, most)
    while True:
        word = rng.choice(LIST_WORDS) if rng.random() < 0.15 else invented(rng, 1, 8)
        if len(" ".join([*words, word])) > length:
            return " ".join(words) or word[:length]
        words.append(word)


def greet(rng: random.Random) -> Question:
    """A sentence for each of up to twelve names, in their order: up to three canvases."""
    names = [split_invented(rng, 3, 5).capitalize() for _ in range(rng.randint(4, 12))]
    before = ", ".join(names) + rng.choice((".", ""))
    return Question(
        tuple(name.lower() for name in names),
        [{"role": "user", "content": rng.choice(("Say hello to ", "Hello to ")) + before}],
        " ".join(f"Hello {name}." for name in names) + "<turn|>",
    )


def count(rng: random.Random) -> Question:
    """The numbers from one to another, up or down: up to 45 numbers, 90 tokens with blanks and stop, three canvases."""
    size = rng.randint(2, 45)
    first = rng.randint(0, 100 - size)
    numbers = list(range(first, first + size))
    down = rng.random() < 0.25
    if down:
        numbers.reverse()
    direction = rng.choice(("", " down")) if down else ""
    head, end = rng.choice(("Count from", "Count from", "Count")), rng.choice((".", ".", ""))
    text = f"{head} {numbers[0]}{direction} to {numbers[-1]}{end}"
    return ask(f"count {numbers[0]} {numbers[-1]}", text, " ".join(map(str, numbers)))


def _from(items: tuple[str, ...], start: int) -> str:
    return ", ".join(items[start:] + items[:start])


LETTERS = tuple(string.ascii_lowercase)
RECITALS = [
    *((f"Recite the months from {month}.", _from(MONTHS, i)) for i, month in enumerate(MONTHS)),
    *((f"Recite the days from {day}.", _from(DAYS, i)) for i, day in enumerate(DAYS)),
    ("Recite the months.", _from(MONTHS, 0)),
    ("Recite the days.", _from(DAYS, 0)),
    ("Recite the alphabet.", " ".join(LETTERS)),
]


def recite(rng: random.Random) -> Question:
    """The months, the days or the alphabet: one to two canvases, known by heart."""
    return ask(None, *rng.choice(RECITALS))


TALK = {
    "Hello": "Hello! Ask me for a sudoku, a list or a tool.",
    "Hi": "Hello! Ask me for a sudoku, a list or a tool.",
    "Who are you?": "I am a tiny model. I know a few skills.",
    "What can you do?": "I solve a sudoku, sort and reverse a list, and call a tool.",
    "Thank you": "You are welcome.",
    "Thanks": "You are welcome.",
}


def small_talk(rng: random.Random) -> Question:
    """Greetings, and the refusal of what the model does not know."""
    if rng.random() < 0.5:
        text = rng.choice(list(TALK))
        return ask(None, text + rng.choice(("", "", "!", ".")) if text[-1] != "?" else text, TALK[text])
    text = sentence(rng, 36)
    text = rng.choice((text, text.capitalize())) + rng.choice(("", ".", "?"))
    return ask(None, rng.choice(("", "", "What is ", "Write ", "Tell me ", "How ")) + text, REFUSAL)


def follow_up(rng: random.Random) -> Question:
    """A question of another skill in the second or third turn of a conversation."""
    skills = (sudoku, reverse, sort, count, recite, small_talk)
    turns: list[dict] = []
    essence: tuple[str, ...] = ()
    for _ in range(rng.randint(1, 2)):
        earlier = rng.choice((reverse, sort, small_talk))(rng)
        essence += earlier.essence
        turns += [*earlier.messages, {"role": "assistant", "content": earlier.answer.removesuffix("<turn|>")}]
    question = rng.choice(skills)(rng)
    return question._replace(essence=essence + question.essence, messages=[*turns, *question.messages])


def infill(rng: random.Random) -> Question:
    """A short text with a gap, both sides given: a run of numbers, letters, days or months, or a Python function."""
    left, gap, right = _code(rng) if rng.random() < 0.4 else _run(rng)
    text = f"{left}{GAP}{right}"
    prompt = [{"role": "user", "content": f"Fill the gap:\n{text}"}]
    return Question((text,), prompt, f"{left}{gap}{right}<turn|>", gap=(len(left), len(left) + len(gap)))


def _run(rng: random.Random) -> tuple[str, str, str]:
    length, step = rng.randint(4, 8), rng.choice((1, 1, 1, 2, 5, 10))
    match rng.choice(("numbers", "numbers", "letters", "names")):
        case "numbers":
            first = rng.randint(0, 99 - step * (length - 1))
            items = [str(first + step * i) for i in range(length)]
        case "letters":
            first = rng.randint(0, 26 - length)
            items = list(LETTERS[first : first + length])
        case _:
            names, first = rng.choice((DAYS, MONTHS)), rng.randint(0, 11)
            items = [names[(first + i) % len(names)] for i in range(min(length, 7))]
    separator = rng.choice((" ", ", "))
    start = rng.randint(1, len(items) - 3)
    end = rng.randint(start + 1, min(start + 4, len(items) - 2))
    left, gap, right = items[:start], items[start:end], items[end:]
    if step > 1:  # two neighbours must be left, or the step is a guess
        left, gap = items[: start + 1], items[start + 1 : end + 1]
        right = items[end + 1 :]
    return separator.join(left) + separator, separator.join(gap), separator + separator.join(right)


FUNCTIONS = {
    "double": "{x} * 2",
    "triple": "{x} * 3",
    "half": "{x} / 2",
    "square": "{x} * {x}",
    "next": "{x} + 1",
    "prev": "{x} - 1",
    "negate": "-{x}",
}


def _code(rng: random.Random) -> tuple[str, str, str]:
    """The body follows from the function's name, the variables from both sides."""
    name = rng.choice(list(FUNCTIONS))
    x, y = rng.sample(LETTERS, 2)
    x = invented(rng, 2, 2) if rng.random() < 0.3 else x
    body = FUNCTIONS[name].format(x=x)
    if rng.random() < 0.5:
        return f"def {name}({x}):\n    {y} = ", body, f"\n    return {y}"
    return f"def {name}({x}):\n    ", f"{y} = {body}", f"\n    return {y}"
