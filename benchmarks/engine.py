"""Sixteen requests of mixed length through the engine: `python -m benchmarks.engine`.

On random weights (the model of `benchmarks.step`) beside transformers' `generate`, which gets the same requests in
static batches of eight, every batch as long as its longest request; on the bundled model with early stopping on, at
several numbers of slots.
"""

import argparse
import json
import platform
import random
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

import dgemma_jax as dg
from benchmarks.step import TEXT, THREADS, _transformers
from dgemma_jax.train import prompts

RESULTS = Path(__file__).parent / "results" / "engine.json"
PROMPTS = Path(__file__).parent / "prompts.jsonl.gz"
REQUESTS, BATCH, STEPS, CANVAS = 16, 8, 3, 256
LEAST = 2.5  # times the throughput of transformers, at eight slots
HOST = 0.05  # most of the time


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 8, 16], help="numbers of slots (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    report = {
        "command": f"python -m benchmarks.engine --slots {' '.join(map(str, options.slots))}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("dgemma-jax", "jax", "jaxlib", "torch", "transformers")},
        "machine": f"{platform.machine()}, {THREADS} threads, Python {platform.python_version()}",
        "bundled model": {slots: bundled(slots) for slots in options.slots},
        "random weights": beside(options.slots),
        "least": LEAST,
        "most host share": HOST,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


def bundled(slots: int) -> dict:
    """Requests of all skills that are prompts alone, on the bundled model."""
    model = dg.load("tiny")
    plain = [e for found in prompts.read(PROMPTS).values() for e in found[:2] if not (e.gap or e.images)]
    return served(model, slots, [(e.prompt, dg.Sampling(seed=i)) for i, e in enumerate(plain[:REQUESTS])], "bundled")


def beside(counts: list[int]) -> dict:
    """Tokens per second of both on random weights, every canvas STEPS steps."""
    with tempfile.TemporaryDirectory() as directory:
        theirs, ours = _transformers(directory), dg.load(directory)
    rng = random.Random(0)
    wanted = [(rng.randint(20, 300), CANVAS * rng.randint(1, 3)) for _ in range(REQUESTS)]
    requests = [([rng.randrange(20, TEXT["vocab_size"]) for _ in range(length)], size) for length, size in wanted]
    seconds = static_batches(theirs, requests)
    base = sum(size for _, size in requests) / seconds
    print(f"transformers, batches of {BATCH}: {base:.1f} tokens/s", flush=True)
    fixed = {"max_denoising_steps": STEPS, "stability_threshold": None, "stop_token_ids": None}
    mine = [(ids, dg.Sampling(max_new_tokens=size, seed=0, **fixed)) for ids, size in requests]
    results = {slots: served(ours, slots, mine, "random weights") for slots in counts}
    for slots, row in results.items():
        row["ratio"] = row["tokens_per_second"] / base
        print(f"{slots:3} slots: {row['ratio']:.2f} times transformers", flush=True)
    print(f"aims: at {BATCH} slots at least {LEAST} times, host at most {HOST:.0%}", flush=True)
    return {"transformers": {"tokens_per_second": base, "seconds": seconds}, "slots": results}


def static_batches(theirs, requests: list[tuple[list[int], int]]) -> float:
    """Seconds of `generate` for all requests, eight at a time."""
    total = 0.0
    for first in range(0, len(requests), BATCH):
        batch = requests[first : first + BATCH]
        width = max(len(ids) for ids, _ in batch)
        rows = [[0] * (width - len(ids)) + ids for ids, _ in batch]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in batch]
        began = time.perf_counter()
        theirs.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(size for _, size in batch),
            max_denoising_steps=STEPS,
            stability_threshold=None,
            eos_token_id=None,
        )
        total += time.perf_counter() - began
    return total


def served(model: dg.Model, slots: int, requests: list, name: str) -> dict:
    """The engine on warm programs: tokens per second, steps, and the host's share of the time."""
    with dg.Engine(model, slots=slots, prefix_cache_bytes=0) as engine:
        engine.warmup()
        began = time.perf_counter()
        handles = [engine.submit(prompt, sampling) for prompt, sampling in requests]
        tokens = sum(len(handle.result().tokens) for handle in handles)
        seconds = time.perf_counter() - began
    stats = engine.stats
    row = {
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "canvases": stats.canvases,
        "denoising_steps": stats.denoising_steps,
        "host_share": stats.host_share,
    }
    print(f"{name}, {slots} slots: {row['tokens_per_second']:.1f} tokens/s, host {stats.host_share:.2%}", flush=True)
    return row


if __name__ == "__main__":
    main()
