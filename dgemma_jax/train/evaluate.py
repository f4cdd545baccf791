"""How often a model answers held-out prompts exactly, and with how many denoising steps."""

from typing import NamedTuple

import numpy as np

from dgemma_jax.api import Model
from dgemma_jax.sampling import Sampling
from dgemma_jax.train import data


class Score(NamedTuple):
    """Means over the prompts of a skill. stopped_early: share of canvases that needed fewer steps than allowed."""

    accuracy: float
    steps_per_canvas: float
    tokens_per_step: float
    stopped_early: float


def evaluate(model: Model, skill: str, count: int, seed: int, slots: int = 8) -> Score:
    """Answers `count` held-out prompts of a seeded list, one try each; an answer is right if it is the expected text.

    Every skill has exactly one right answer per prompt. Prompt i draws its random numbers from key i.
    """
    examples = data.held_out(skill, count, seed)
    samplings = [Sampling(seed=i) for i in range(count)]
    answers = model.generate([example.prompt for example in examples], samplings, slots=slots)
    right = [f"{a.text}<turn|>" == e.answer for a, e in zip(answers, examples, strict=True)]
    steps = np.concatenate([answer.steps for answer in answers])
    tokens = sum(len(answer.tokens) for answer in answers)
    early = steps < model.defaults.max_denoising_steps
    return Score(float(np.mean(right)), float(steps.mean()), float(tokens / steps.sum()), float(early.mean()))
