"""Host side of generation: a fixed number of slots, filled from the waiting requests at every canvas border."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dgemma_jax.cache import init_cache
from dgemma_jax.config import Config
from dgemma_jax.diffusion.policy import Knobs, Policy
from dgemma_jax.diffusion.random import key_from_seed
from dgemma_jax.diffusion.step import CanvasState
from dgemma_jax.engine.programs import Programs
from dgemma_jax.engine.request import Answer, Request
from dgemma_jax.events import Canvas, Draft, Finished
from dgemma_jax.memory import free_bytes
from dgemma_jax.sampling import BUILT_IN
from dgemma_jax.shapes import RowKeys
from dgemma_jax.text.tokenizer import Tokenizer

SMALLEST_CHUNK, LARGEST_CHUNK = 32, 1024
WHOLE_CANVAS = np.int32(2**31 - 1)
RESTING = Request(ids=(), sampling=BUILT_IN, seed=0, budget=0)
Event = Draft | Canvas | Finished


class StepInputs(NamedTuple):
    """Everything about the rows that is the same in all steps of a canvas."""

    keys: RowKeys
    canvas_index: np.ndarray
    knobs: Knobs
    suppress: np.ndarray


@dataclass
class Row:
    """A request in its row of the batch. canvas: index of the next canvas; length: committed positions."""

    index: int
    request: Request
    answer: Answer
    canvas: int = 0
    length: int = 0


class Runner:
    """Answers a list of requests with a fixed number of rows. The cache lives as long as the runner."""

    def __init__(
        self,
        config: Config,
        params: dict,
        programs: Programs,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        slots: int,
        policy: Policy,
    ):
        self.config, self.params, self.programs = config, params, programs
        self.tokenizer, self.max_model_len, self.policy = tokenizer, max_model_len, policy
        self.dtype = str(params["embedder"]["table"].dtype)
        self.rows: list[Row | None] = [None] * slots
        capacity = self._bucket(config.sliding_window + 4 * config.canvas_length)
        one = jax.eval_shape(lambda: jax.tree.leaves(init_cache(config, 1, capacity, self.dtype)))
        need = slots * sum(leaf.size * leaf.dtype.itemsize for leaf in one)
        if need > free_bytes():
            raise ValueError(f"slots is {slots}; their cache takes {need:,} bytes, {free_bytes():,} are free")
        self.cache = init_cache(config, slots, capacity, self.dtype)

    def run(self, requests: Sequence[Request], drafts: bool = False) -> Iterator[tuple[int, Event]]:
        """(index of the request, event) as things happen; a Finished for every request. drafts: one per step."""
        waiting = deque(enumerate(requests))
        while waiting or any(self.rows):
            for at, row in enumerate(self.rows):
                if row is None and waiting:
                    self._admit(at, *waiting.popleft())
            inputs = self._inputs()
            state = self._start(inputs)
            if drafts:
                state = yield from self._step_by_step(state, inputs)
            else:
                state = self._denoise(state, inputs, WHOLE_CANVAS)
            yield from self._harvest(state)
            self._commit(state)

    def _admit(self, at: int, index: int, request: Request) -> None:
        """Give a request the free row `at` and encode its prompt there, chunk by chunk."""
        row = Row(index, request, Answer(request, self.tokenizer), length=len(request.ids))
        self._make_room(row.length)
        for start in range(0, row.length, LARGEST_CHUNK):
            chunk = np.asarray(request.ids[start : start + LARGEST_CHUNK], np.int32)
            tokens = np.zeros((1, chunk_bucket(len(chunk))), np.int32)
            tokens[0, : len(chunk)] = chunk
            where = np.int32([at, start, len(chunk)])
            self.cache = self.programs.prefill(self.params, self.cache, tokens, *where)
        self.rows[at] = row

    def _inputs(self) -> StepInputs:
        """What the denoising programs are told about the rows; rows at rest get harmless values."""
        requests = [RESTING if row is None else row.request for row in self.rows]
        suppress = np.zeros((len(requests), self.config.vocab_size), bool)
        for at, request in enumerate(requests):
            suppress[at, list(request.sampling.suppress)] = True
        return StepInputs(
            keys=jnp.stack([key_from_seed(request.seed) for request in requests]),
            canvas_index=np.array([0 if row is None else row.canvas for row in self.rows], np.int32),
            knobs=Knobs.of([request.sampling for request in requests]),
            suppress=suppress,
        )

    def _start(self, inputs: StepInputs) -> CanvasState:
        active = np.array([row is not None for row in self.rows])
        return self.programs.start(inputs.keys, inputs.canvas_index, active, self.dtype)

    def _denoise(self, state: CanvasState, inputs: StepInputs, allowance: np.int32) -> CanvasState:
        return self.programs.denoise(self.params, self.cache, state, *inputs, allowance, self.policy)

    def _step_by_step(self, state: CanvasState, inputs: StepInputs) -> Iterator[tuple[int, Event]]:
        while np.any(running := np.asarray(state.running)):
            state = self._denoise(state, inputs, np.int32(1))
            best, steps = np.asarray(state.best), np.asarray(state.steps)
            for at, row in enumerate(self.rows):
                if running[at]:
                    yield row.index, Draft(tokens=best[at].tolist(), step=int(steps[at]))
        return state

    def _harvest(self, state: CanvasState) -> Iterator[tuple[int, Event]]:
        """Hand out the finished canvases and free the rows whose answer is complete."""
        best, steps = np.asarray(state.best), np.asarray(state.steps)
        for at, row in enumerate(self.rows):
            if row is None:
                continue
            yield row.index, row.answer.take(best[at].tolist(), int(steps[at]))
            row.canvas += 1
            if row.answer.finish_reason is not None:
                self.rows[at] = None
                yield row.index, Finished(row.answer.completion())

    def _commit(self, state: CanvasState) -> None:
        """Append the canvases of the rows that go on; the last canvas of an answer is never encoded."""
        going = [row is not None for row in self.rows]
        if not any(going):
            return
        C = self.config.canvas_length
        for row in filter(None, self.rows):
            row.length += C
            self._make_room(row.length)
        self.cache = self.programs.commit(self.params, self.cache, state.best, np.where(going, C, 0).astype(np.int32))

    def _make_room(self, length: int) -> None:
        if length > self.cache.capacity:
            self.cache = self.programs.grow(self.cache, self._bucket(length))

    def _bucket(self, length: int) -> int:
        """Cache capacity for `length` positions: the window times a power of two, never past max_model_len."""
        capacity = self.config.sliding_window
        while capacity < length:
            capacity *= 2
        return min(capacity, self.max_model_len)


def chunk_bucket(length: int) -> int:
    """The padded length of a prefill chunk: a power of two, so that few programs serve all prompts."""
    return max(SMALLEST_CHUNK, 1 << (length - 1).bit_length())
