"""Peak memory of a conversion, measured in a process of its own: it does not grow with the number of layers."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.convert.convert_helpers import manifest
from tests.parity.checkpoints import NARROW, Shape, hf_config, tensor_shapes, write

MEASURE = Path(__file__).with_name("measure_memory.py")
EQUAL = replace(
    NARROW, name="equal", hidden=256, mlp=512, experts=16, expert_width=320, heads=8, kv_heads=8, head=32,
    full_kv_heads=8, full_head=32,
)  # fmt: skip


def write_quickly(directory: Path, shape: Shape) -> Path:
    """A checkpoint whose values repeat: what they are does not matter here."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf_config(shape)))
    block = np.random.default_rng(0).uniform(0.5, 1.5, 99_991).astype(np.float32)
    tensors = {name: np.resize(block, size) for name, size in tensor_shapes(shape).items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def measure(root: Path, layers: int) -> float:
    """Peak anonymous memory above that at the start, in units of the largest item."""
    source = write_quickly(root / f"source_{layers}", replace(EQUAL, layers="S" * (layers - 1) + "F"))
    small = write(root / f"small_{layers}", replace(NARROW, layers="SF"))
    target = root / f"target_{layers}"
    done = subprocess.run([sys.executable, MEASURE, source, target, small], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    sizes = [item["bytes"] for item in manifest(target)["items"].values()]
    assert len(sizes) == layers + 1 and sizes[1:-1] == [max(sizes)] * (layers - 1)
    return (found["peak"] - found["before"]) / max(sizes)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_the_peak_is_at_most_four_items_and_does_not_grow_with_the_layers(tmp_path):
    few, many = measure(tmp_path, 4), measure(tmp_path, 16)
    assert many < 4 and many - few < 0.75, (few, many)
