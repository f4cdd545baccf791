"""Machine code of the Pallas kernel for GPUs that are not there: registers, spills, shared memory.

`python -m dgemma_jax.kernels.mixed_attention.offline` prints the table of README.md. Needs the `triton` wheel, whose
compiler stands in for the one inside XLA (registers may differ a little), and neither a GPU nor jax's CUDA wheels.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.lib.triton import dialect

from dgemma_jax.kernels import pallas_compat
from dgemma_jax.kernels.mixed_attention import pallas


@dataclass(frozen=True)
class Gpu:
    """A GPU: compute capability times ten, jax's name of it, and the shared memory one program may ask for, bytes."""

    capability: int
    kind: str
    shared: int


GPUS = {
    "A100": Gpu(80, "NVIDIA A100", 166912),
    "H100, H200": Gpu(90, "NVIDIA H100", 232448),
    "B200": Gpu(100, "NVIDIA B200", 232448),
    "GB10": Gpu(121, "NVIDIA GB10", 101376),
}


@dataclass(frozen=True)
class Code:
    """What one kernel takes on one GPU: registers per thread; spilled and shared bytes per thread and program."""

    registers: int
    spilled: int
    shared: int
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """Arguments of mixed_attention for one row, N = 16."""

    name: str
    H: int
    K: int
    S: int
    window: int | None
    dtype: jnp.dtype = jnp.bfloat16
    T: int = 256

    def lower(self, kind: str) -> jax.stages.Lowered:
        """The op lowered for CUDA and this kind of GPU."""
        f = lambda dtype, *shape: jax.ShapeDtypeStruct((1, *shape), dtype)  # noqa: E731
        own, prefix = f(self.dtype, self.T, self.K, self.H), f(self.dtype, self.S, self.K, self.H)
        rows = f(jnp.int32), f(jnp.int32), f(jnp.bool_)
        op = jax.jit(partial(pallas.mixed_attention, window=self.window))
        with pallas_compat.absent_gpu(kind):
            traced = op.trace(f(self.dtype, self.T, 16, self.H), own, own, prefix, prefix, *rows)
            return traced.lower(lowering_platforms=("cuda",))


# The two kinds of layers of 26B; heads half as wide, for the third tile, whose prefix two programs share.
CASES = (
    Case("sliding, 256 wide", 256, 8, 1024, 1024),
    Case("full, 512 wide", 512, 2, 8192, None),
    Case("sliding, float32", 256, 8, 1024, 1024, jnp.float32),
    Case("full, float32", 512, 2, 8192, None, jnp.float32),
    Case("full, 128 wide", 128, 8, 8192, None),
)


def _triton_calls(operation: Any) -> Iterator[Any]:
    """The configurations of the Triton calls inside an MLIR operation."""
    for region in operation.regions:
        for block in region:
            for child in block:
                name = child.operation.name
                if name == "stablehlo.custom_call" and "triton" in str(child.attributes["call_target_name"]):
                    yield child.attributes["mhlo.backend_config"]
                yield from _triton_calls(child.operation)


def compile_kernel(lowered: jax.stages.Lowered, gpu: Gpu) -> Code:
    """The machine code that the Triton wheel makes of the one Triton kernel of a lowered program."""
    import triton
    from triton.backends.compiler import GPUTarget

    (config,) = _triton_calls(lowered.compiler_ir("stablehlo").operation)
    context = mlir.make_ir_context()
    dialect.register_dialect(context)
    context.load_all_available_dialects()
    number = lambda name: int(config[name].value)  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ttir")
        source.write_text(ir.Module.parse(config["ir"].value_bytes, context).operation.get_asm())
        options = {"num_warps": number("num_warps"), "num_stages": number("num_stages")}
        kernel = triton.compile(str(source), target=GPUTarget("cuda", gpu.capability, 32), options=options)
        report = _assemble(kernel.asm["ptx"], Path(triton.__file__).parent, Path(folder), gpu)
    counted = [int(re.search(pattern, report)[1]) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")]
    return Code(*counted, kernel.metadata.shared, tuple(number(f"grid_{axis}") for axis in "xyz"))


def _assemble(ptx: str, triton: Path, folder: Path, gpu: Gpu) -> str:
    """What the assembler bundled with Triton says of this PTX."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    program = triton / "backends/nvidia/bin" / ("ptxas-blackwell" if gpu.capability >= 100 else "ptxas")
    architecture = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)[1]
    command = [program, "-v", f"-arch={architecture}", source, "-o", folder / "kernel.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def table(cases: Sequence[Case] = CASES) -> str:
    """The table of README.md: a line per case and GPU."""
    lines = ["| layer | GPU | programs | registers | spilled bytes | shared memory |", "|---|---|---|---|---|---|"]
    for case in cases:
        for name, gpu in GPUS.items():
            code = compile_kernel(case.lower(gpu.kind), gpu)
            programs = " x ".join(map(str, code.grid))
            memory = f"{code.shared:,} of {gpu.shared:,}"
            lines.append(f"| {case.name} | {name} | {programs} | {code.registers} | {code.spilled} | {memory} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
