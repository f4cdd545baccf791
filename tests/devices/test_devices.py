"""Several devices: what is refused, and what eight virtual ones of the CPU compute in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import dgemma_jax as dg
from dgemma_jax import api
from dgemma_jax.cli import main
from dgemma_jax.config import gemma_26b_a4b
from dgemma_jax.sharding import copies, partition, shard_of, uneven
from tests.random_models import random_model

ROOT = Path(__file__).parents[2]
PIPELINE = r"canvas state advances only where the sampler runs.*use data, expert or tensor parallelism instead$"


@pytest.mark.slow
def test_on_eight_virtual_devices(soak):
    """The number of devices is fixed when jax starts."""
    # Unoptimised code, and no --jaxtyping-packages: compiling and checking annotations is what takes the time here.
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
    environment = os.environ | quick | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    options = ["-o", "addopts=--import-mode=importlib --strict-markers", "-p", "no:cacheprovider", "-rA"]
    command = [sys.executable, "-m", "pytest", "tests/devices/meshes.py", *options, *(["--soak"] if soak else [])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout, done.stderr, sep="\n")
    assert done.returncode == 0


@pytest.fixture
def unread(monkeypatch):
    monkeypatch.setattr(api, "read_checkpoint", lambda *_, **__: pytest.fail("the weights are read"))


def mesh_of(*names: str) -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape([1] * len(names)), names)


@pytest.mark.parametrize("name", ["pipe", "pipeline", "stage", "pp", "PP"])
def test_pipelines_are_refused_by_mesh_model_and_engine(unread, name):
    with pytest.raises(ValueError, match=PIPELINE):
        dg.make_mesh(**{name: 2})
    with pytest.raises(ValueError, match=f"the mesh has an axis {name}; .*{PIPELINE}"):
        dg.load("tiny", mesh=mesh_of("tensor", name))


def test_pipelines_are_refused_by_the_engine():
    with pytest.raises(ValueError, match=f"pipeline_parallel_size is 2; .*{PIPELINE}"):
        dg.Engine(random_model(), pipeline_parallel_size=2)


@pytest.mark.parametrize(
    "command",
    [["generate", "hello"], ["chat"], ["serve", "--port", "0"], ["generate", "--input", "in.jsonl", "--output", "out"]],
    ids=lambda command: command[0] + str(len(command)),
)
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--pipeline-parallel-size", "pipeline_parallel_size is 2; the canvas state advances only where the sampler"),
        ("--tensor-parallel-size", "data 1 x expert 1 x tensor 2 takes 2 devices, and there are 1"),
    ],
)
def test_commands_refuse_before_weights_are_read(unread, capsys, monkeypatch, tmp_path, command, flag, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "hello"}\n')
    assert main([*command, flag, "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dgemma: error: ") and message in line


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tensor": 0}, "tensor is 0; expected a positive number of devices"),
        ({"expert": "2"}, "expert is '2'; expected a positive number"),
        ({"rows": 1}, "there is no axis 'rows'; expected data, expert, tensor"),
        ({"data": 2, "tensor": 3}, "data 2 x expert 1 x tensor 3 takes 6 devices, and there are 1; make it smaller"),
    ],
)
def test_meshes_that_cannot_be(axes, message):
    with pytest.raises(ValueError, match=f"^make_mesh: {message}"):
        dg.make_mesh(**axes)


def test_a_mesh_of_others_needs_our_axes(unread):
    with pytest.raises(ValueError, match="the mesh has an axis 'model'; expected data, expert, tensor"):
        dg.load("tiny", mesh=mesh_of("model"))
    with pytest.raises(ValueError, match=r"mesh is \[2\]; expected a jax.sharding.Mesh, see dg.make_mesh"):
        dg.load("tiny", mesh=[2])


class Devices:
    """Stands for a mesh where only its sizes are asked for."""

    def __init__(self, **shape: int):
        self.shape = shape


def test_what_the_devices_of_a_mesh_have_of_the_large_model():
    """Of eight in groups of two and four: an eighth of experts and ids, a quarter of the heads, copies of K/V heads."""
    config, mesh = gemma_26b_a4b(), Devices(data=1, expert=2, tensor=4)
    parts = {name: shard_of(name, size, mesh) for name, size in (("experts", 128), ("vocab", 262_144), ("heads", 16))}
    assert {name: (part.count, part.length) for name, part in parts.items()} == {
        "experts": (8, 16),
        "vocab": (8, 32_768),
        "heads": (4, 4),
    }
    assert tuple(partition(None, parts["vocab"])) == (None, ("expert", "tensor"))
    assert [copies(config, heads, mesh) for heads in (8, 2)] == [1, 2]
    assert uneven(config, mesh) == [
        "mesh: 2 K/V heads of full layers do not divide over 4 devices (tensor): replicated"
    ]


def test_what_three_devices_do_not_divide_is_said():
    assert uneven(gemma_26b_a4b(), Devices(tensor=3)) == [
        "mesh: 16 query heads do not divide over 3 devices (tensor): replicated",
        "mesh: 8 K/V heads of sliding layers do not divide over 3 devices (tensor): replicated",
        "mesh: 2 K/V heads of full layers do not divide over 3 devices (tensor): replicated",
        "mesh: 128 experts are filled up to 129 for 3 devices (tensor)",
        "mesh: 262144 ids are filled up to 264192 for 3 devices (tensor)",
    ]
