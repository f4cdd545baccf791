"""Machine code of the two GPU kernels for GPUs that are not there: registers, spills, shared memory.

`python -m dgemma_jax.kernels.mixed_attention.offline` prints the table of README.md. Needs the `triton` wheel, whose
compiler stands in for the one inside XLA (registers may differ a little), and neither a GPU nor jax's CUDA wheels.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
from dgemma_jax.kernels.mixed_attention.launch import Launch, tile_for


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
    "RTX PRO 6000": Gpu(120, "NVIDIA RTX PRO 6000", 101376),
    "GB10": Gpu(121, "NVIDIA GB10", 101376),
}


@dataclass(frozen=True)
class Code:
    """What one kernel takes on one GPU: registers per thread; spilled and shared bytes per thread and program."""

    registers: int
    spilled: int
    shared: int
    grid: tuple[int, ...]


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

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, k, v, prefix_k, prefix_v, prefix_length, own_length, causal, blocks."""
        f = lambda dtype, *shape: jax.ShapeDtypeStruct((1, *shape), dtype)  # noqa: E731
        q, own, prefix = (f(self.dtype, n, h, self.H) for n, h in ((self.T, 16), (self.T, self.K), (self.S, self.K)))
        return q, own, own, prefix, prefix, f(jnp.int32), f(jnp.int32), f(jnp.bool_), f(jnp.int32, self.T)

    def lower(self, kind: str, op: Callable[..., Any] = pallas.mixed_attention) -> jax.stages.Lowered:
        """An implementation lowered for CUDA and this kind of GPU."""
        with pallas_compat.absent_gpu(kind):
            traced = jax.jit(partial(op, window=self.window)).trace(*self.arguments())
            return traced.lower(lowering_platforms=("cuda",))


# The two kinds of layers of 26B; heads half as wide, for the third tile, whose prefix two programs share.
CASES = (
    Case("sliding, 256 wide", 256, 8, 1024, 1024),
    Case("full, 512 wide", 512, 2, 8192, None),
    Case("full, 128 wide", 128, 8, 8192, None),
)


def compile_pallas(case: Case, gpu: Gpu) -> Code:
    """The machine code that the Triton wheel makes of the one Triton kernel that Pallas lowers to."""
    (config,) = _triton_calls(case.lower(gpu.kind).compiler_ir("stablehlo").operation)
    context = mlir.make_ir_context()
    dialect.register_dialect(context)
    context.load_all_available_dialects()
    number = lambda name: int(config[name].value)  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ttir")
        source.write_text(ir.Module.parse(config["ir"].value_bytes, context).operation.get_asm())
        grid = tuple(number(f"grid_{axis}") for axis in "xyz")
        return _compile(str(source), gpu, number("num_warps"), number("num_stages"), grid)


def compile_triton(case: Case, gpu: Gpu) -> Code:
    """The machine code that the Triton wheel makes of the hand-written kernel."""
    source, launch = triton_source(case)
    return _compile(source, gpu, launch.tile.warps, launch.tile.stages, launch.grid)


def triton_source(case: Case) -> tuple[Any, Launch]:
    """The hand-written kernel specialised to a case, as jax-triton does it, and its programs."""
    from triton.compiler import ASTSource

    from dgemma_jax.kernels.mixed_attention.triton import attend, call_for

    q, k, _, prefix_k, *_ = case.arguments()
    launch, constants, (out, _) = call_for(q, k, prefix_k)
    types = {jnp.dtype(jnp.bfloat16): "*bf16", jnp.dtype(jnp.float32): "*fp32"}
    signature = dict.fromkeys(attend.arg_names, types[q.dtype])
    signature |= dict.fromkeys(("length", "cached", "first", "last"), "*i32")
    signature |= {"out": types[out.dtype], "log_sum": "*fp32"} | dict.fromkeys(constants, "constexpr")
    aligned = {(index,): [["tt.divisibility", 16]] for index, kind in enumerate(signature.values()) if kind[0] == "*"}
    return ASTSource(attend, signature, constants, aligned), launch


COMPILERS = {"pallas": compile_pallas, "triton": compile_triton}


def _triton_calls(operation: Any) -> Iterator[Any]:
    """The configurations of the Triton calls inside an MLIR operation."""
    for region in operation.regions:
        for block in region:
            for child in block:
                name = child.operation.name
                if name == "stablehlo.custom_call" and "triton" in str(child.attributes["call_target_name"]):
                    yield child.attributes["mhlo.backend_config"]
                yield from _triton_calls(child.operation)


def _compile(source: Any, gpu: Gpu, warps: int, stages: int, grid: tuple[int, ...]) -> Code:
    """What the Triton wheel, and the assembler inside, make of a file of Triton IR or an ASTSource."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", gpu.capability, 32), options=options)
    report = _assemble(kernel.asm["ptx"], gpu)
    counted = [int(re.search(pattern, report)[1]) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")]
    return Code(*counted, kernel.metadata.shared, grid)


def _assemble(ptx: str, gpu: Gpu) -> str:
    """What the assembler inside the Triton wheel says of this PTX."""
    from triton.backends.nvidia.compiler import get_ptxas

    architecture = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        program, result = get_ptxas(gpu.capability).path, Path(folder, "kernel.cubin")
        command = [program, "-v", f"-arch={architecture}", source, "-o", result]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def table(cases: Sequence[Case] = CASES) -> str:
    """The table of README.md: a line per case and GPU, figures of the Pallas kernel / the Triton kernel."""
    lines = [
        "| layer, tile | GPU | programs | registers | spilled bytes | shared memory |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        tile = tile_for(case.H, jnp.dtype(case.dtype).itemsize)
        name = f"{case.name}: {tile.queries} x {tile.keys}, {tile.warps} warps, {tile.stages} stages"
        for gpu_name, gpu in GPUS.items():
            codes = [compiler(case, gpu) for compiler in COMPILERS.values()]
            both = lambda field: " / ".join(f"{getattr(code, field):,}" for code in codes)  # noqa: B023, E731
            programs = " x ".join(map(str, codes[0].grid))
            figures = f"{both('registers')} | {both('spilled')} | {both('shared')} of {gpu.shared:,}"
            lines.append(f"| {name} | {gpu_name} | {programs} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
