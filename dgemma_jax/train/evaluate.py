"""How often a model answers held-out prompts exactly, and with how many denoising steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dgemma_jax.api import Model
from dgemma_jax.sampling import Sampling
from dgemma_jax.train import tokenizer as vocabulary
from dgemma_jax.train.data import Example, gap_tokens


class Score(NamedTuple):
    """Means over prompts. stopped_early: share of canvases that needed fewer steps than allowed."""

    accuracy: float
    steps_per_canvas: float
    tokens_per_step: float
    stopped_early: float


def evaluate(
    model: Model, examples: Sequence[Example], sampling: Sampling | None = None, slots: int = 8
) -> tuple[Score, list[int]]:
    """Answers every prompt once; an answer is right if its tokens are the expected ones, control tokens included.

    Every prompt has exactly one right answer. Prompt i draws its random numbers from key i. An example with a gap gets
    the rest of its answer pinned. Also returns the places of the wrong answers.
    """
    tokenizer, sampling = model.required_tokenizer, (sampling or Sampling()).merged(model.defaults)
    samplings = [replace(_pinned(model, example, sampling), seed=i) for i, example in enumerate(examples)]
    prompts, images = [example.prompt for example in examples], [example.images or None for example in examples]
    answers = model.generate(prompts, samplings, images=images, slots=slots)
    given = [[*a.tokens, a.stop_id] for a in answers]
    wanted = [tokenizer.encode(example.answer) for example in examples]
    wrong = [i for i, pair in enumerate(zip(given, wanted, strict=True)) if pair[0] != pair[1]]
    steps = np.concatenate([answer.steps for answer in answers])
    tokens, early = sum(map(len, given)), steps < sampling.max_denoising_steps
    accuracy = 1 - len(wrong) / len(examples)
    return Score(accuracy, float(steps.mean()), float(tokens / steps.sum()), float(early.mean())), wrong


def _pinned(model: Model, example: Example, sampling: Sampling) -> Sampling:
    if example.gap is None:
        return sampling
    first, last = gap_tokens(example, vocabulary.build())
    canvas = model.required_tokenizer.encode(example.answer)
    canvas += [vocabulary.EOS] * (model.config.canvas_length - len(canvas))
    pinned = [not first <= i < last for i in range(len(canvas))]
    canvas = [id if keep else -1 for id, keep in zip(canvas, pinned, strict=True)]
    return replace(sampling, canvas=canvas, pinned=pinned)
