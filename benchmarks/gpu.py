"""What a GPU makes of this project, in at most six minutes: `python benchmarks/gpu.py`, from anywhere.

Numerics of every op on the device against its reference, kernel against XLA, a layer and the head at full size, and
whole denoising steps against the floor that the device's measured bandwidth and products allow. What is missing, fails,
or would take too long is left out by name. `--small` does all of it in small sizes.
"""

import argparse
import json
import math
import platform
import sys
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/gpu.json"
BUDGET = 345.0  # seconds; the rest of six minutes is for the start and the result


def make_importable() -> None:
    """Finds the packages of this checkout also where the symlinks in dgemma_jax/ or jaxtyping did not come along."""
    sys.path.insert(0, str(ROOT))
    for name in ("kernels", "convert"):
        if not (ROOT / "dgemma_jax" / name).is_dir():
            module = types.ModuleType(f"dgemma_jax.{name}")
            module.__path__ = [str(ROOT / name)]
            sys.modules[module.__name__] = module
    try:
        import jaxtyping  # noqa: F401
    except ImportError:
        stand_in = types.ModuleType("jaxtyping")
        stand_in.__getattr__ = _annotation
        sys.modules["jaxtyping"] = stand_in


def _annotation(name: str) -> Any:
    """What jaxtyping's name does in an annotation that nobody checks: name[...] is Any."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__class_getitem__": classmethod(lambda cls, _: Any)})


make_importable()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from benchmarks.gpu_cases import (  # noqa: E402
    FULL,
    SMALL,
    Op,
    Sizes,
    attention_case,
    experts_case,
    head_case,
    heads,
    seconds,
)
from dgemma_jax.kernels import selection  # noqa: E402


@dataclass
class Report:
    """The lines of the table as they come. deadline: of `time.monotonic`, after which nothing new is begun."""

    deadline: float
    lines: list[dict] = field(default_factory=list)

    def add(self, case: str, measure: Callable[[], dict], seconds: float = 0.0) -> dict | None:
        """The figures of a case, or None: left out where less than `seconds` are left, or failed, told in one line."""
        if time.monotonic() + seconds > self.deadline:
            return self._take(case, {"left out": "no time left"})
        try:
            return self._take(case, measure())
        except Exception as error:  # whatever one case dies of, the others are still worth their minutes
            traceback.print_exc()
            return self._take(case, {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]})

    def _take(self, case: str, figures: dict) -> dict | None:
        self.lines.append({"case": case} | figures)
        shown = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
        )
        print(f"{case:52}{', '.join(shown)}", flush=True)
        return None if figures.keys() & {"failed", "left out"} else figures


def main() -> int:
    """Runs everything; 1 where a case failed or was wrong."""
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu.py", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for a CPU and for tests")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON to write (%(default)s)")
    options = parser.parse_args()
    sizes = SMALL if options.small else FULL
    report = Report(time.monotonic() + (math.inf if options.small else BUDGET))
    facts = report.add("device", partial(device_facts, sizes)) or {}
    numerics(report, sizes)
    report.add("layer, head and steps", partial(_steps, report, sizes, facts))
    kernels(report, sizes)
    options.output.write_text(json.dumps(_header(options.small) | {"lines": report.lines}, indent=1) + "\n")
    return int(any("failed" in line or line.get("right") is False for line in report.lines))


def _steps(report: Report, sizes: Sizes, facts: dict) -> dict:
    """Flax is first needed here."""
    from benchmarks import gpu_steps

    gpu_steps.run(report.add, sizes, facts)
    return {"done": True}


def _header(small: bool) -> dict:
    names = ("dgemma-jax", "jax", "jaxlib", "flax", "jax-triton", "triton")
    return {
        "command": "python benchmarks/gpu.py" + " --small" * small,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: found for name in names if (found := _version(name))},
        "machine": f"{jax.devices()[0].device_kind}, Python {platform.python_version()}",
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def device_facts(sizes: Sizes) -> dict:
    """Name, chosen implementations, and the measured bytes and floating-point operations per second."""
    n, dtype = sizes.product, jnp.bfloat16
    a = jnp.ones((n, n), dtype)
    block = jnp.ones(sizes.copied // 2, dtype)
    device, widths = selection.this_device(), heads(sizes.config)
    return {
        "attention": selection.attention("auto", device, widths, jnp.dtype(sizes.dtype).itemsize),
        "experts": selection.experts(device),
        "shared memory": device.shared,
        "bytes per second": 2.0 * sizes.copied / seconds(jax.jit(lambda x: x + 1), block),
        "operations per second": 2.0 * n**3 / seconds(jax.jit(lambda x: x @ x), a),
    }


@cache
def able(op: str, sizes: Sizes) -> list[str]:
    """The implementations of an op besides its reference that can run here; the others are told."""
    if op == "experts":
        return ["xla", "pallas"]
    found = []
    for name in ("xla", "pallas", "triton"):
        try:
            widths, itemsize = heads(sizes.config), jnp.dtype(sizes.dtype).itemsize
            found.append(selection.attention(name, selection.this_device(), widths, itemsize))
        except ValueError as error:
            print(f"left out: {error}", flush=True)
    return found


def numerics(report: Report, sizes: Sizes) -> None:
    """Every implementation against the reference, which runs on the device in fp32 with exact products."""
    config, capacity = sizes.config, sizes.prefixes[1]
    lengths = [0, capacity // 2, config.sliding_window + 7, capacity]
    for dtype in ("float32", "bfloat16"):
        for layer in dict.fromkeys(config.layers):
            case = partial(attention_case, config, layer, dtype, lengths, capacity, True)
            for name in able("attention", sizes):
                report.add(f"numerics, attention, {layer.kind}, {dtype}, {name}", partial(compare, case, name, dtype))
        for tokens in sizes.tokens[:2]:
            for name in able("experts", sizes):
                case = partial(experts_case, config, dtype, tokens)
                report.add(f"numerics, experts, {tokens} tokens, {dtype}, {name}", partial(compare, case, name, dtype))
        report.add(
            f"numerics, vocabulary head, {dtype}, xla", partial(compare_heads, partial(head_case, config, dtype, 1))
        )


def compare(case: Callable[[], tuple[Op, tuple]], name: str, dtype: str) -> dict:
    """Largest difference of an implementation from the reference in fp32, relative to the largest number."""
    op, arguments = case()
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == dtype else x, arguments)
    with jax.default_matmul_precision("highest"):  # else a GPU rounds float32 factors to TF32
        out = jax.jit(partial(op, implementation=name))(*arguments)
        right = jax.jit(partial(op, implementation="reference"))(*exact)
    error = float(jnp.max(jnp.abs(out.astype(jnp.float32) - right)) / jnp.max(jnp.abs(right)))
    return {"relative error": error, "right": error < (1e-3 if dtype == "float32" else 3e-2)}


def compare_heads(case: Callable[[], tuple[Op, tuple]]) -> dict:
    """The streamed head against all logits at once, both with exact products."""
    op, arguments = case()
    with jax.default_matmul_precision("highest"):
        ours, right = (jax.jit(partial(op, implementation=name))(*arguments) for name in ("xla", "reference"))
    same = {name: float(jnp.mean(getattr(ours, name) == getattr(right, name))) for name in ("argmax", "sample")}
    entropy = float(jnp.max(jnp.abs(ours.entropy - right.entropy)))
    return same | {"entropy error": entropy, "right": min(same.values()) > 0.98 and entropy < 1e-2}


def kernels(report: Report, sizes: Sizes) -> None:
    """Milliseconds of each implementation of the ops at the sizes of a step."""
    config, dtype = sizes.config, sizes.dtype
    for layer in dict.fromkeys(config.layers):
        for prefix in sizes.prefixes:
            case = partial(attention_case, config, layer, dtype, [prefix], max(sizes.prefixes), False)
            for name in able("attention", sizes):
                report.add(f"attention, {layer.kind}, prefix {prefix}, {name}", partial(race, case, name), seconds=5)
    for tokens in sizes.tokens:
        for name in able("experts", sizes):
            case = partial(experts_case, config, dtype, tokens)
            report.add(f"experts, {tokens} tokens, {name}", partial(race, case, name), seconds=10)


def race(case: Callable[[], tuple[Op, tuple]], name: str) -> dict:
    """Milliseconds of one implementation."""
    op, arguments = case()
    return {"ms": 1e3 * seconds(jax.jit(partial(op, implementation=name)), *arguments)}


if __name__ == "__main__":
    sys.exit(main())
