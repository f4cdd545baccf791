"""Many callers, one model: a worker thread owns the device and serves what they submit.

with dg.Engine(model, slots=8) as engine:
    handles = [engine.submit(prompt, dg.Sampling(max_new_tokens=64)) for prompt in prompts]
    texts = [handle.result().text for handle in handles]
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma_jax.api import Model
from dgemma_jax.compilation import keep_on_disk
from dgemma_jax.config import is_int, is_number
from dgemma_jax.engine.capacity import MEMORY_FRACTION, plan
from dgemma_jax.engine.job import draft_interval
from dgemma_jax.engine.prefix_cache import PrefixCache
from dgemma_jax.engine.request import Request
from dgemma_jax.engine.scheduler import PREFILL_CHUNK
from dgemma_jax.engine.worker import Worker
from dgemma_jax.parallel import check_parallel

if TYPE_CHECKING:
    from dgemma_jax.api import Prompt
    from dgemma_jax.diffusion.policy import Policy
    from dgemma_jax.engine.handle import Handle
    from dgemma_jax.engine.stats import EngineStats
    from dgemma_jax.sampling import Sampling

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests from any number of threads and event loops; a context manager.

    An engine that nobody holds any more answers what it was asked and goes.

    slots: rows denoised together; None: as many as memory holds, a power of two up to 64, on a CPU up to 8.
    policy: of all requests. max_model_len: longest prompt plus output; None is the model's, or, with slots chosen, what
    memory leaves to each. memory_fraction: the part of the device's memory that may be filled, weights included.
    prefill_chunk: most tokens of prompts that are encoded before the other requests go on. prefix_cache_bytes: device
    memory for encoded prompts, so that a conversation's next turn need not encode the earlier ones again; None is a
    tenth of the slots' cache, 0 is none. attention_implementation: see `dgemma_jax.load`; "auto" is the model's.
    compilation_cache: directory for compiled programs, used from then on by the whole process; None leaves it as it is.
    pipeline_parallel_size: must be 1; a model on several devices is loaded on a mesh. ValueError for what cannot be or
    does not fit.
    """

    def __init__(
        self,
        model: Model,
        slots: int | None = None,
        policy: Policy | None = None,
        *,
        max_model_len: int | None = None,
        memory_fraction: float = MEMORY_FRACTION,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_cache_bytes: int | None = None,
        attention_implementation: str = "auto",
        compilation_cache: str | Path | None = None,
        pipeline_parallel_size: int = 1,
    ):
        if not isinstance(model, Model):
            raise ValueError(f"model is {model!r:.60}; expected a dg.Model, as dg.load returns")
        check_parallel(pipeline_parallel_size=pipeline_parallel_size)
        if prefix_cache_bytes is not None and not is_int(prefix_cache_bytes):
            raise ValueError(f"prefix_cache_bytes is {prefix_cache_bytes!r}; expected bytes, 0 for none, or None")
        if not is_number(memory_fraction) or not 0 < memory_fraction <= 1:
            raise ValueError(f"memory_fraction is {memory_fraction!r}; expected a number above 0 and at most 1")
        longest = model.max_model_len if max_model_len is None else model.variant(max_model_len).max_model_len
        wanted = (slots, max_model_len, longest, prefix_cache_bytes, memory_fraction)
        planned = plan(model.config, model.dtype, *wanted, mesh=model.mesh)
        if compilation_cache is not None:
            if not isinstance(compilation_cache, str | Path):
                raise ValueError(f"compilation_cache is {compilation_cache!r}; expected a directory, or None")
            keep_on_disk(compilation_cache)
        self.model = model.variant(planned.max_model_len, attention_implementation)
        self._scheduler = self.model.scheduler(planned.slots, policy, fixed=True, prefill_chunk=prefill_chunk)
        self._scheduler.prefixes = PrefixCache(planned.prefix_cache_bytes)
        self._worker = Worker(self._scheduler)
        weakref.finalize(self, self._worker.close, wait=False).atexit = False  # nobody can submit any more

    def submit(
        self,
        prompt: Prompt | Sequence[Mapping],
        sampling: Sampling | None = None,
        seed: int | None = None,
        *,
        tools: Sequence[Mapping] | None = None,
        thinking: bool = False,
        images: Any = None,
        drafts: int | None = None,
    ) -> Handle:
        """Queue a prompt (text or token ids) or the messages of a conversation, and return at once.

        tools, thinking: for messages, see `Model.chat`; images: for a prompt, see `Model.generate`. drafts: steps
        between two Draft events, None for none.
        ValueError for what cannot be answered; RuntimeError if the engine is closed or has failed.
        """
        return self.submit_request(self.model.request(prompt, sampling, seed, tools, thinking, images), drafts)

    def submit_request(self, request: Request, drafts: int | None = None) -> Handle:
        """`submit` for a request that `model.request` has checked; drafts: see there."""
        if not isinstance(request, Request):
            raise ValueError(f"request is {request!r:.60}; expected what model.request returns")
        return self._worker.submit(request, draft_interval(drafts))

    @property
    def stats(self) -> EngineStats:
        """Counters since the start, as of the last round."""
        return self._scheduler.snapshot()

    @property
    def error(self) -> BaseException | None:
        """What ended the worker; None while it is well."""
        return self._worker.error

    def warmup(self) -> float:
        """Compile now what serving needs, instead of at the first request; returns the seconds it took.

        Copies in and out of the prefix cache are compiled when they are first made.
        """
        started = time.perf_counter()
        programs = self._worker.call(self._scheduler.warmup)
        seconds = time.perf_counter() - started
        logger.info("%d programs compiled in %.0f s", programs, seconds)
        return seconds

    def close(self, cancel: bool = False) -> None:
        """Take no more requests and wait until the others are answered; cancel: end them with what they have.

        Then the device's memory is free again.
        """
        self._worker.close(cancel)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        self.close(cancel=kind is not None)
