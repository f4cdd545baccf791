"""Two layers of the 26B model at full width on a CPU: `python -m benchmarks.full_width`.

Random weights in bfloat16 and the real vocabulary, written as safetensors, converted to 8 and to 4 bits, loaded and
made to generate two canvases; each in a process of its own, whose peak memory is what counts.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from dgemma_jax.config import QUANTIZATIONS, gemma_26b_a4b
from dgemma_jax.convert.hf import table
from dgemma_jax.convert.table import by_item, leaf
from dgemma_jax.model.transformer import build
from dgemma_jax.train.export import hf_config

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "full_width.json"
MOST = 18_000_000_000  # bytes that any of the processes may take
STEPS, CANVASES = 3, 2
CONFIG = gemma_26b_a4b()
TWO_LAYERS = replace(CONFIG, layers=CONFIG.layers[4:6], vision=None)
IMAGE_IDS = {"<|image|>": 258_880, "<|image>": 255_999, "<image|>": 258_882}
ROWS = 1 << 22  # numbers drawn at once


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.full_width", description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="only write the checkpoint to this directory")
    parser.add_argument("--generate", type=Path, help="only generate with the model of this directory, and print JSON")
    options = parser.parse_args()
    if options.write:
        write(options.write)
    elif options.generate:
        print(json.dumps(generate(options.generate)))
    else:
        with tempfile.TemporaryDirectory() as root:
            measure(Path(root))


def measure(root: Path) -> None:
    report = {
        "command": "python -m benchmarks.full_width",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("dgemma-jax", "jax", "orbax-checkpoint", "numpy")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "model": f"layers 4 and 5 of 26B, vocabulary {CONFIG.vocab_size}, random, bfloat16",
        "most bytes": MOST,
    }
    _, report["write"] = child("-m", "benchmarks.full_width", "--write", root / "source")
    report["source bytes"] = sum(path.stat().st_size for path in (root / "source").glob("*.safetensors"))
    for quantization in QUANTIZATIONS:
        target = root / quantization
        convert = ("-m", "dgemma_jax.cli", "convert", root / "source", target, "--quantize", quantization)
        told, converted = child(*convert)
        found, generated = child("-m", "benchmarks.full_width", "--generate", target)
        told = told.removeprefix(f"{root}/")
        report[quantization] = {"told": told, "convert": converted, "generate": generated} | json.loads(found)
    worst = max(report[name][part]["peak bytes"] for name in QUANTIZATIONS for part in ("convert", "generate"))
    report["worst peak bytes"] = worst
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(f"the most memory of any process: {worst / 1e9:.1f} GB")
    check_peak(worst)


def check_peak(worst: int) -> None:
    """Leaves with a line if that is more bytes than a process may take."""
    if worst > MOST:
        raise SystemExit(f"the most memory of any process is {worst:,} bytes; expected at most {MOST:,}")


def child(*arguments: object) -> tuple[str, dict[str, float]]:
    """What Python prints last with these arguments, and the seconds and peak bytes that it takes."""
    started = time.perf_counter()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, *map(str, arguments)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        out = process.stdout.read().strip()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{arguments} failed with {process.returncode}")
    figures = {"seconds": time.perf_counter() - started, "peak bytes": 1024 * usage.ru_maxrss}
    print(*arguments[1:], figures, out, flush=True)
    return out.splitlines()[-1] if out else "", figures


def write(directory: Path) -> None:
    """The checkpoint in Hugging Face's layout, a shard per item: matrices of fan-in scale, the rest near one."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf_config(TWO_LAYERS, IMAGE_IDS)))
    _, abstract = build(TWO_LAYERS)
    rng, index = np.random.default_rng(0), {}
    for item, rows in by_item(list(table(TWO_LAYERS).items())).items():
        tensors = {name: draw(rng, entry.layout.file_shape(leaf(abstract, entry.path).shape)) for name, entry in rows}
        save_file(tensors, directory / f"{item}.safetensors")
        index |= dict.fromkeys(tensors, f"{item}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers in bfloat16, some at a time."""
    result = np.empty(shape, ml_dtypes.bfloat16)
    flat = result.reshape(-1)
    for start in range(0, flat.size, ROWS):
        part = flat[start : start + ROWS]
        numbers = rng.standard_normal(part.size, np.float32)
        part[:] = 1 + 0.2 * numbers if len(shape) < 2 else numbers * shape[-1] ** -0.5
    return result


def generate(directory: Path) -> dict:
    """Two canvases of three steps; the bytes of the params by dtype."""
    import jax

    import dgemma_jax as dg

    model = dg.load(directory, max_model_len=1024)
    sampling = dg.Sampling(
        max_new_tokens=CANVASES * CONFIG.canvas_length,
        max_denoising_steps=STEPS,
        stability_threshold=None,
        stop_token_ids=None,
        seed=1,
    )
    started = time.perf_counter()
    (answer,) = model.generate([[2, 5, 6, 7]], sampling)
    assert answer.steps == [STEPS] * CANVASES and len(answer.tokens) == CANVASES * CONFIG.canvas_length, answer
    stored: dict[str, int] = {}
    for array in jax.tree.leaves(model.params):
        stored[array.dtype.name] = stored.get(array.dtype.name, 0) + array.nbytes
    return {
        "params bytes": stored,
        "steps": answer.steps,
        "generation seconds, compiling included": time.perf_counter() - started,
    }


if __name__ == "__main__":
    main()
