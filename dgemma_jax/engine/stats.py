"""Counters of a scheduler: what was asked, what came out, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class EngineStats:
    """Sums since the start, and what is going on now.

    requests: submitted; finished, cancelled, failed: how they ended. prompt_tokens: of requests whose prompt is
    encoded, cached_tokens: those of them that an earlier request had encoded. tokens, canvases, denoising_steps: of
    finished canvases. at_step_limit: canvases that took all the steps they were given, which a right model seldom does.
    empty: finished answers without a token. commits: passes that encoded a finished canvas, counted by request. slots:
    how many there are; waiting, running: requests without a slot and with one, now. prefix_hits: prompts that began
    with a kept one. images: that went through the image tower. compilations: of the whole process, see
    `dgemma_jax.compilation`. busy_seconds: inside `Scheduler.advance`; device_seconds: the part of it spent in programs
    of the device and in waiting for them.
    """

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    canvases: int = 0
    denoising_steps: int = 0
    at_step_limit: int = 0
    empty: int = 0
    commits: int = 0
    slots: int = 0
    waiting: int = 0
    running: int = 0
    prefix_hits: int = 0
    images: int = 0
    compilations: int = 0
    busy_seconds: float = 0.0
    device_seconds: float = 0.0

    @property
    def host_share(self) -> float:
        """The part of the busy time that was not the device's."""
        return 1 - self.device_seconds / self.busy_seconds if self.busy_seconds else 0.0

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Adds the time of a block to `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - started)
