"""How much memory is left for arrays."""

import os
from pathlib import Path

import jax
from jax.sharding import Mesh


def free_bytes(fraction: float = 1.0, mesh: Mesh | None = None) -> int:
    """Memory that arrays may still take, out of `fraction` of all there is: the device's, on a CPU the host's.

    mesh: of that of its devices which has the least; on a CPU they share the host's equally.
    """
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    return min(_free(device.memory_stats(), fraction, len(devices)) for device in devices)


def _free(stats: dict[str, int] | None, fraction: float, sharers: int) -> int:
    if stats and "bytes_limit" in stats:
        total, free = stats["bytes_limit"], stats["bytes_limit"] - stats["bytes_in_use"]
    else:
        total, free = (size // sharers for size in _host())
    return max(0, free - int((1 - fraction) * total))


def _host() -> tuple[int, int]:
    """All of the host's memory, and what of it is available."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # free pages alone would leave out the file cache, which a big load has just filled
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        return total, available
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total
