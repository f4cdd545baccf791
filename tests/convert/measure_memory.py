"""Peak anonymous memory of one conversion, in a process of its own: `python measure_memory.py SRC DST`."""

import json
import sys
import threading
import time
from pathlib import Path

from dgemma_jax.checkpoint import open_directory
from dgemma_jax.convert.conversion import convert


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def main(source: str, target: str, warm_up: str) -> None:
    """Prints bytes before and at the peak. warm_up: a small model, so that libraries are loaded before."""
    small = open_directory(warm_up, verify=True)
    convert(small.weights, Path(target + ".warm"), small.config, small.abstract)
    opened = open_directory(source, verify=True)
    before = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    summary = convert(opened.weights, Path(target), opened.config, opened.abstract)
    done.set()
    watcher.join()
    print(json.dumps({"before": before, "peak": peak, "bytes": summary.bytes, "items": summary.items}))


if __name__ == "__main__":
    main(*sys.argv[1:])
