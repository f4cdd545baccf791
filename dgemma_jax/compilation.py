"""Compiled programs: kept on disk from one process to the next, and counted."""

from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_COMPILED = "/jax/core/compile/backend_compile_duration"
_count = 0


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    _count += event == _COMPILED


jax.monitoring.register_event_duration_secs_listener(_listen)


def compilations() -> int:
    """Programs that this process has compiled, or read from disk instead, since this module was imported."""
    return _count


def keep_on_disk(directory: str | Path) -> None:
    """From now on this process looks there for compiled programs before it compiles, and leaves its own there.

    It is JAX's persistent compilation cache, which a process has one of.
    """
    compilation_cache.reset_cache()  # a process that compiled before has already decided that it has none
    jax.config.update("jax_compilation_cache_dir", str(directory))
