"""Time of a conversion against its parts: `python -m benchmarks.convert`.

The parts are reading the source's bytes and saving the same arrays, already in memory, with Orbax alone and the same
options, both in the same process and taking turns with the conversion. All of them leave their output on the disk,
begin with nothing left to write, and come first and last equally often. `cpu` is the processor time of all threads:
what others run on the machine prolongs it less than the seconds.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from dgemma_jax.checkpoint import open_directory
from dgemma_jax.config import Config, LayerConfig, tiny
from dgemma_jax.convert import orbax_files
from dgemma_jax.convert.conversion import convert
from dgemma_jax.convert.hf import table
from dgemma_jax.convert.table import by_item, insert, leaf
from dgemma_jax.convert.weights import load
from dgemma_jax.model.transformer import build
from dgemma_jax.train.export import hf_config

RESULTS = Path(__file__).parent / "results" / "convert.json"
IMAGE_IDS = {"<|image|>": 10, "<|image>": 11, "<image|>": 12}
PARTS = ("read", "save", "convert")
MOST = 1.3  # times the sum of the parts


def model(layers: int) -> Config:
    """Layers with the release's proportions, a sixteenth of its width in experts: about 50 MB each in bfloat16."""
    kinds = ("sliding",) * (layers - 1) + ("full",)
    return replace(
        tiny(),
        vocab_size=16_384,
        hidden_size=1024,
        intermediate_size=1024,
        self_conditioning_size=1024,
        num_attention_heads=8,
        layers=tuple(LayerConfig(kind, 4, 128) for kind in kinds),
        num_experts=16,
        moe_intermediate_size=352,
    )


def write(directory: Path, config: Config) -> None:
    """A random checkpoint in Hugging Face's layout, one shard per item."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf_config(config, IMAGE_IDS)))
    _, abstract = build(config)
    rng = np.random.default_rng(0)
    index = {}
    for item, rows in by_item(list(table(config).items())).items():
        tensors = {}
        for name, entry in rows:
            shape = entry.layout.file_shape(leaf(abstract, entry.path).shape)
            tensors[name] = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
            index[name] = f"{item}.safetensors"
        save_file(tensors, directory / f"{item}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def read_bytes(source: Path) -> None:
    for path in source.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def save_alone(items: dict[str, dict], target: Path) -> None:
    target.mkdir()
    for item, tree in items.items():
        orbax_files.save(target / item, tree)


class Cost(NamedTuple):
    """Of one part, in seconds."""

    wall: float
    cpu: float


def cost(function: Callable, *arguments) -> Cost:
    os.sync()  # what others have left to write is not this part's
    wall, cpu = time.perf_counter(), time.process_time()
    function(*arguments)
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def convert_source(source: Path, target: Path) -> None:
    opened = open_directory(source, verify=True)
    convert(opened.weights, target, opened.config, opened.abstract)


def ratio(row: dict[str, Cost], kind: str) -> float:
    read, save, whole = (getattr(row[name], kind) for name in PARTS)
    return whole / (read + save)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convert", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="layers of about 50 MB (%(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds, an even number; the median counts (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        megabytes, rows = measure(Path(root), options.layers, options.rounds)
    report = {
        "command": f"python -m benchmarks.convert --layers {options.layers} --rounds {options.rounds}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("dgemma-jax", "jax", "orbax-checkpoint", "numpy")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "megabytes": megabytes,
        "seconds": {name: statistics.median(row[name].wall for row in rows) for name in PARTS},
        "cpu": {name: statistics.median(row[name].cpu for row in rows) for name in PARTS},
        "ratio": statistics.median(ratio(row, "wall") for row in rows),
        "ratios": sorted(ratio(row, "wall") for row in rows),
        "cpu_ratio": statistics.median(ratio(row, "cpu") for row in rows),
        "most": MOST,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def measure(root: Path, layers: int, rounds: int) -> tuple[float, list[dict[str, Cost]]]:
    """Megabytes of the model, and what reading, saving and converting cost in each round."""
    source, target = root / "source", root / "target"
    write(source, model(layers))
    opened = open_directory(source)
    params, _ = load(opened.weights, opened.abstract)
    items: dict[str, dict] = {}
    for item, rows in by_item(opened.weights.rows).items():
        for _, entry in rows:
            name = "/".join(map(str, entry.path))
            insert(items.setdefault(item, {}), orbax_files.keys_in_item(name), leaf(params, entry.path))
    parts = {
        "read": (read_bytes, source),
        "save": (save_alone, items, target),
        "convert": (convert_source, source, target),
    }
    found = []
    for number in range(rounds + 1):
        row = {}
        for name in PARTS if number % 2 else reversed(PARTS):
            row[name] = cost(*parts[name])
            shutil.rmtree(target, ignore_errors=True)  # reading leaves none
        print({name: f"{row[name].wall:.3f} s, cpu {row[name].cpu:.3f} s" for name in PARTS}, flush=True)
        found.append(row)
    return sum(array.nbytes for array in jax.tree.leaves(params)) / 1e6, found[1:]  # the first loads libraries


if __name__ == "__main__":
    main()
