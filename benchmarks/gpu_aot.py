"""Full-size 26B programs compiled for GPUs that are not there: `python -m benchmarks.gpu_aot`.

Needs jax's CUDA plugin and compiler wheels, but neither GPU nor driver: `make gpu-aot` installs them. Nothing runs, and
nothing is tuned on a device, so the figures are of memory and of the number of kernels, not of time.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/gpu_aot.json"
MIB = 1 << 20
LAYERS = 30
COMPILED = (  # program, rows, and in how many bits weights are stored
    ("loop", 1, "bf16"),
    ("loop", 2, "bf16"),
    ("encode", 1, "bf16"),
    ("loop", 1, "int8"),
    ("loop", 2, "int8"),
    ("encode", 1, "int8"),
    ("loop", 1, "int4"),
    ("loop", 2, "int4"),
)
SHARED, DEVICES = (("loop", 1, "bf16"), ("loop", 1, "int8")), {"data": 1, "expert": 2, "tensor": 2}  # on H200


def description(kind: str, capability: tuple[int, int], **facts: float) -> str:
    """XLA's GpuTargetConfigProto of a device, in text form."""
    major, minor = capability
    extension = " feature_extension: ACCELERATED_FEATURES" if major in (9, 10) else ""
    numbers = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "fpus_per_core": 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "shared_memory_per_block": 49152,
    }
    info = " ".join(f"{name}: {value}" for name, value in (numbers | facts).items())
    return (
        f"gpu_device_info {{ {info} cuda_compute_capability {{ major: {major} minor: {minor}{extension} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 patch: 0 } '
        f'runtime_version {{ major: 13 minor: 0 patch: 0 }} device_description_str: "{kind}"'
    )


# Sources: NVIDIA's data sheets and CUDA's table of compute capabilities.
TARGETS = {
    "H200": description(
        "NVIDIA H200",
        (9, 0),
        core_count=132,
        threads_per_core_limit=2048,
        shared_memory_per_core=233_472,
        shared_memory_per_block_optin=232_448,
        memory_bandwidth=4_800_000_000_000,
        l2_cache_size=52_428_800,
        device_memory_size=151_397_597_184,
        clock_rate_ghz=1.98,
    ),
    "GB10": description(
        "NVIDIA GB10",
        (12, 1),
        core_count=48,
        threads_per_core_limit=1536,
        shared_memory_per_core=102_400,
        shared_memory_per_block_optin=101_376,
        memory_bandwidth=273_000_000_000,
        l2_cache_size=25_165_824,
        device_memory_size=128_000_000_000,
        clock_rate_ghz=2.5,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_aot", description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, help="compile for this one alone, here, and print JSON")
    options = parser.parse_args()
    if options.target:
        print(json.dumps(measure(options.target)))
        return
    for target in TARGETS:
        for name, figures in record(target).items():
            print(target, name, figures)


def record(target: str) -> dict:
    """The figures of a target, which its entry in RESULTS then holds."""
    figures = measure_apart(target)
    report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"targets": {}}
    report |= {"command": "make gpu-aot", "model": "26B computing in bfloat16, 8192 positions a row, canvas 256"}
    report["targets"][target] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("dgemma-jax", "jax", "jax-cuda13-plugin", "nvidia-cuda-nvcc")},
        "machine": f"{platform.machine()} without a GPU, Python {platform.python_version()}",
        "programs": figures,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    return figures


def measure_apart(target: str) -> dict:
    """`measure` in a process of its own: a compiler that gives up takes its process along."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_aot", "--target", target]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(target: str) -> dict:
    """Figures of every program in COMPILED, by "program, rows, weights"."""
    import jax
    from jax.experimental import topologies

    def devices(count: int) -> list:
        how = {"platform": "cuda", "target_config": TARGETS[target], "topology": f"1x1x{count}"}
        return topologies.get_topology_desc(**how).devices

    one = jax.sharding.Mesh(devices(1), ("device",))
    found = {
        f"{program}, {rows} rows, {weights}": _figures(one, program, rows, weights)
        for program, rows, weights in COMPILED
    }
    if target == "H200":
        shape = tuple(DEVICES.values())
        mesh = jax.sharding.Mesh(np.array(devices(math.prod(shape))).reshape(shape), tuple(DEVICES))
        for program, rows, weights in SHARED:
            name = f"{program}, {rows} rows, {weights}, {mesh.size} devices"
            found[name] = _figures(mesh, program, rows, weights, shared=True)
    return found


def _figures(mesh, program: str, rows: int, weights: str, shared: bool = False) -> dict:
    """Bytes in MiB, kernels, copies of whole weights or cache buffers, and how many arrays are as large as weights.

    shared: the devices of the mesh share the model. All figures are then those of one, and collectives are counted:
    how many of each, and the elements of the largest.
    """
    import jax

    from dgemma_jax.engine.hardware import WEIGHTS
    from dgemma_jax.model.transformer import Implementations
    from dgemma_jax.sharding import share
    from tests.full_size import TEXT_26B, Hlo, Programs, collectives, large_moves, whole_weights

    config = replace(TEXT_26B, quantization=WEIGHTS[weights])
    kernels = Implementations(attention="pallas", experts="pallas", dense="pallas")
    own_mesh = mesh if shared else None
    programs = Programs("bfloat16", rows, implementations=kernels, config=config, mesh=own_mesh)
    function, arguments = getattr(programs, program)()
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(leaf):
        return leaf.update(sharding=here) if getattr(leaf, "sharding", here) is None else leaf

    def held(leaf):
        return jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) if shared else leaf

    started = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = function.lower(*jax.tree.map(place, arguments)).compile()
    hlo, memory = Hlo(compiled.as_text()), compiled.memory_analysis()
    arrays = jax.tree.map(held, (programs.model[1], programs.cache))
    looping = program == "loop"
    kernels = sum(1 for _ in hlo.kernels(inside_loops=looping))
    return {
        "temp_mib": round(memory.temp_size_in_bytes / MIB, 1),
        "alias_mib": round(memory.alias_size_in_bytes / MIB, 1),
        "arguments_mib": round(memory.argument_size_in_bytes / MIB, 1),
        "cache_mib": round(sum(share(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(programs.cache)) / MIB, 1),
        "largest_array_elements": max(one.elements for one in hlo.kernels()),
        "kernels": kernels,
        "kernels_per_layer": round(kernels / LAYERS, 1),
        "large_copies": len(large_moves(hlo, arrays, inside_loops=looping)),
        "as_large_as_weights": dict(Counter(str(list(one.largest)) for one in whole_weights(hlo, config))),
        "collectives": {name: [len(sizes), max(sizes)] for name, sizes in collectives(hlo).items()},
        "compile_s": round(time.perf_counter() - started, 1),
    }


if __name__ == "__main__":
    main()
