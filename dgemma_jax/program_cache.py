"""Where commands keep compiled programs from one run to the next."""

import hashlib
import os
import platform
from pathlib import Path

VARIABLE = "JAX_COMPILATION_CACHE_DIR"  # read by jax when it is imported


def keep_programs() -> None:
    """For this process and before jax is imported: keep compiled programs, unless the user has said where.

    In the user's cache, apart for every kind of processor, since XLA's CPU programs use all that theirs can do.
    """
    if VARIABLE not in os.environ and (directory := own_directory()) is not None:
        os.environ[VARIABLE] = str(directory)


def own_directory() -> Path | None:
    """Where they are kept; None without a home, or with none to write to: every run compiles."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(base, "dgemma-jax", f"{platform.machine()}-{_processor()}")
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return directory


def _processor() -> str:
    """Tells processors apart that cannot run each other's programs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    features = {line for line in lines if line.startswith(("flags", "Features"))} or set(lines)
    return hashlib.sha256("\n".join(sorted(features)).encode()).hexdigest()[:12]
