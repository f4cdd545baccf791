"""Speed of ResponseStream on one core, in MB of model output per second of CPU time.

    python -m benchmarks.text_stream

Three kinds of output, each fed in canvases (1,000 characters, about 256 tokens) and in tokens (4 characters): prose
with thoughts; calls that write files; calls of many small arguments. Best of five runs.
"""

import time

from dgemma_jax.text import ResponseStream

PROSE = (
    "<|channel>thought\nThe user wants the capital, so I look it up: France, Paris, 2 facts.\n<channel|>"
    "The capital of France is **Paris**. It has `n < 3` million people; see the table | below.\n\n" * 6
)
FILE = (
    '<|tool_call>call:write_file{content:<|"|>'
    + 'def check(path):\n    if path < limit and "x" in names:\n        return {"path": [path, 1]}\n\n' * 40
    + '<|"|>,path:<|"|>src/check.py<|"|>}<tool_call|>\n'
)
CALLS = (
    '<|tool_call>call:book{city:<|"|>San Francisco, CA<|"|>,days:14,flexible:true,rooms:[{beds:2},{beds:1}],'
    'note:<|"|>near the park<|"|>}<tool_call|>'
)


def rate(text: str, size: int) -> float:
    """MB/s for `text` fed in pieces of `size` characters."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        stream = ResponseStream()
        for piece in pieces:
            stream.feed(piece)
        stream.finish()
        best = min(best, time.process_time() - start)
    return len(text) / best / 1e6


def main() -> None:
    print(f"{'output':<8}{'canvases':>10}{'tokens':>10}   MB/s")
    for name, unit in (("prose", PROSE), ("files", FILE), ("calls", CALLS)):
        text = unit * (200_000 // len(unit))
        print(f"{name:<8}{rate(text, 1000):>10.1f}{rate(text, 4):>10.1f}")


if __name__ == "__main__":
    main()
