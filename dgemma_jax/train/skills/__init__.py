"""What the bundled model learns: a function per skill that draws a question and its one right answer."""

import random
from collections.abc import Callable

from dgemma_jax.train.skills.lists import reverse, sort
from dgemma_jax.train.skills.pictures import dots, shape
from dgemma_jax.train.skills.question import Question
from dgemma_jax.train.skills.sudoku import sudoku
from dgemma_jax.train.skills.texts import RECITALS, count, follow_up, greet, infill, recite, small_talk
from dgemma_jax.train.skills.thinking import thinking
from dgemma_jax.train.skills.tools import no_call, tool_answer, tool_call

__all__ = ["RECITALS", "SKILLS", "UNMEASURED", "Question"]

Skill = Callable[[random.Random], Question]

SKILLS: dict[str, Skill] = {
    "sudoku": sudoku,
    "reverse": reverse,
    "sort": sort,
    "tool call": tool_call,
    "no call": no_call,
    "tool answer": tool_answer,
    "greet": greet,
    "thinking": thinking,
    "infill": infill,
    "shape": shape,
    "dots": dots,
}

# Too few different questions to hold any out, made of the skills above, or (count) not learned: it never stops in time.
UNMEASURED: dict[str, Skill] = {"recite": recite, "small talk": small_talk, "follow-up": follow_up, "count": count}
