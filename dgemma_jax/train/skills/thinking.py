"""Thinking: with the switch on, a short thought in its channel comes before the answer of any skill."""

import random
from collections.abc import Callable

from dgemma_jax.train.skills.lists import reverse, sort
from dgemma_jax.train.skills.question import Question
from dgemma_jax.train.skills.sudoku import sudoku
from dgemma_jax.train.skills.texts import REFUSAL
from dgemma_jax.train.skills.tools import no_call, tool_call


def thinking(rng: random.Random) -> Question:
    """A question of another skill, asked with thinking on."""
    skill = rng.choice((sudoku, reverse, sort, tool_call, no_call))
    question = skill(rng)
    thought = f"<|channel>thought\n{_thought(skill, question)}<channel|>"
    return question._replace(answer=thought + question.answer, thinking=True)


def _thought(skill: Callable, question: Question) -> str:
    """In a few tokens what the answer will be about; of a list, its ends after the change."""
    if skill is sudoku:
        return "Solve the sudoku."
    if question.answer.startswith(REFUSAL):
        return "No tool fits."
    if skill is tool_call:
        return f"Call {question.answer.removeprefix('<|tool_call>call:').split('{')[0]}."
    items = question.answer.removesuffix("<turn|>").replace(",", "").split()
    return f"The first is {items[0]}, the last is {items[-1]}."
