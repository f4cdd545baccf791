"""How much memory is left for arrays."""

import os
from pathlib import Path

import jax


def free_bytes() -> int:
    """Memory that arrays may still take: the device's own figure, on a CPU the host's free memory."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # free pages alone would leave out the file cache, which a big load has just filled
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
