"""Training data of the bundled model, made on the fly: conversations rendered in the chat format and their answers.

Of every skill, one question in 16 is held out by the CRC-32 of its essence (the puzzle, the list, the invented words):
training never draws them, evaluation draws nothing else.
"""

import random
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from dgemma_jax.config import Config
from dgemma_jax.image_batch import ImageBatch
from dgemma_jax.images import PreparedImage, image_batch, prepare
from dgemma_jax.images.placement import expand, source_of, vision_of
from dgemma_jax.text.chat import segments
from dgemma_jax.train import tokenizer as ids
from dgemma_jax.train.skills import SKILLS, UNMEASURED, Question
from dgemma_jax.train.skills.question import HeldOut, side


class Example(NamedTuple):
    """A rendered prompt and the answer that follows it, as strings with control tokens.

    gap: of an infilling answer, the part in characters that is to be filled; the rest is given. images: of the
    placeholders in the prompt, see `images.prepare`.
    """

    prompt: str
    answer: str
    gap: tuple[int, int] | None = None
    images: tuple[Any, ...] = ()


class Batch(NamedTuple):
    """One canvas per row, as numpy arrays: what the diffusion loss needs to know about the data.

    tokens i32[B,T] (prompts and the canvases before, right-padded), lengths i32[B] (of these), canvas i32[B,C] (a part
    of the answer; behind the stop id, fill), answer i32[B] (positions of the canvas up to and with the stop id),
    pinned bool[B,C] (positions that are given and never noised), images: those of all prompts, row after row, or None.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    canvas: np.ndarray
    answer: np.ndarray
    pinned: np.ndarray
    images: ImageBatch | None = None


def render(question: Question) -> Example:
    """The prompt as chat renders it."""
    prompt = segments(question.messages, question.tools or None, question.thinking)
    return Example(str(prompt), question.answer, question.gap, tuple(map(source_of, prompt.media)))


def sample(skill: str, rng: random.Random) -> Example:
    """An example of a skill, free for training."""
    ask = SKILLS.get(skill) or UNMEASURED[skill]
    while side(question := ask(rng)) is not False:
        pass
    return render(question)


def held_out(skill: str, count: int, seed: int) -> list[Example]:
    """The first `count` different held-out examples of a seeded stream."""
    rng = HeldOut(f"{skill} {seed}")
    found: dict[tuple, Example] = {}
    while len(found) < count:
        if side(question := SKILLS[skill](rng)):
            example = render(question)
            found.setdefault((example.prompt, example.images), example)
    return list(found.values())


def pack(examples: list[Example], tokenizer: Tokenizer, length: int, config: Config, rng: random.Random) -> Batch:
    """Encodes examples into arrays with T = `length`, C and images as in `config`; the fill after the stop id is
    `<eos>`.

    Of an answer of several canvases one is drawn, behind the ones before it. ValueError if something does not fit.
    """
    B, C = len(examples), config.canvas_length
    tokens, canvas = np.full((B, length), ids.PAD, np.int32), np.full((B, C), ids.EOS, np.int32)
    sizes, pinned = np.zeros((2, B), np.int32), np.zeros((B, C), bool)
    images: list[PreparedImage] = []
    for row, example in enumerate(examples):
        prompt, answer = (tokenizer.encode(text).ids for text in example[:2])
        if example.images:
            own = [prepare(image, vision_of(config)) for image in example.images]
            prompt, images = expand(prompt, own, config), images + own
        if example.gap and len(answer) > C:
            raise ValueError(f"{len(answer)} tokens with a gap exceed the canvas of {C}: {example}")
        done = C * rng.randrange(-(-len(answer) // C))
        prompt, answer = prompt + answer[:done], answer[done : done + C]
        if len(prompt) > length:
            raise ValueError(f"{len(prompt)} tokens exceed {length}: {example}")
        tokens[row, : len(prompt)], canvas[row, : len(answer)] = prompt, answer
        sizes[:, row] = len(prompt), len(answer)
        if example.gap:
            first, last = gap_tokens(example, tokenizer)
            pinned[row] = True
            pinned[row, first:last] = False
    shown = image_batch(images, vision_of(config)) if images else None
    return Batch(tokens, sizes[0], canvas, sizes[1], pinned, shown)


def gap_tokens(example: Example, tokenizer: Tokenizer) -> tuple[int, int]:
    """First and last + 1 of the answer's tokens that lie in its gap."""
    assert example.gap is not None
    first, last = example.gap
    inside = [i for i, (a, b) in enumerate(tokenizer.encode(example.answer).offsets) if a < last and b > first]
    return inside[0], inside[-1] + 1


def draw(skills: dict[str, int], rng: random.Random) -> list[Example]:
    """`skills[name]` training examples of each skill."""
    return [sample(skill, rng) for skill, count in skills.items() for _ in range(count)]
