"""A request in the hands of the scheduler."""

import time
from dataclasses import dataclass, field
from itertools import pairwise

from dgemma_jax.config import is_int
from dgemma_jax.engine.request import Answer, Request
from dgemma_jax.events import Canvas, Draft, Failed, Finished, Timings

Event = Draft | Canvas | Finished | Failed


@dataclass(eq=False)
class Job:
    """A request on its way. drafts: steps between two Draft events, None for none.

    number: how many came before it. slot: where it is, None while it waits and when it is done. encoded: positions of
    it in the cache. at_work: its prompt is encoded. committing: the next pass encodes its finished canvas. steps: of
    its canvas, as last seen. marks: when it came, had a slot, and was at work (seconds of the performance counter).
    """

    request: Request
    answer: Answer
    number: int
    drafts: int | None = None
    slot: int | None = None
    encoded: int = 0
    at_work: bool = False
    committing: bool = False
    cancelled: bool = False
    steps: int = 0
    marks: list[float] = field(default_factory=list)

    @property
    def row(self) -> int:
        """Its slot, once it has one."""
        assert self.slot is not None
        return self.slot

    def mark(self) -> None:
        """Note the time."""
        self.marks.append(time.perf_counter())

    def end(self) -> Finished | Failed:
        """The last event: the answer, or the error in making it, which is the tokenizer's."""
        marks = [*self.marks, time.perf_counter()]
        laps = [later - earlier for earlier, later in pairwise(marks)]
        try:
            return Finished(self.answer.completion(), Timings(*laps))
        except Exception as error:
            return Failed(error)


def draft_interval(value: int | None) -> int | None:
    """Steps between two drafts, None for none. ValueError for anything else."""
    if value is not None and not is_int(value, 1):
        raise ValueError(f"drafts is {value!r}; expected a positive number of steps, or None")
    return value
