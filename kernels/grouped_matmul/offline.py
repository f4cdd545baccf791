"""Machine code of the grouped products for GPUs that are not there: registers, spills, shared memory.

`python -m dgemma_jax.kernels.grouped_matmul.offline` prints the table of README.md; what it needs is said in
`dgemma_jax.kernels.mixed_attention.offline`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from dgemma_jax.config import INT4_GROUP, QUANTIZATIONS
from dgemma_jax.kernels import pallas_compat
from dgemma_jax.kernels.grouped_matmul import pallas
from dgemma_jax.kernels.grouped_matmul.xla import Plan, plan
from dgemma_jax.kernels.mixed_attention.offline import GPUS, compile_pallas
from dgemma_jax.kernels.quantized import Weight
from dgemma_jax.quantization import quantized_spec
from dgemma_jax.shapes import Array


@dataclass(frozen=True)
class Case:
    """One of the two products of an expert layer, "gate_up" or "down", over R tokens; the widths are those of 26B.

    quantization: None, "int8" or "int4", of the matrices.
    """

    product: str
    R: int
    dtype: jnp.dtype = jnp.bfloat16
    quantization: str | None = None
    E: int = 128
    A: int = 8
    D: int = 2816
    I: int = 704  # noqa: E741

    @property
    def tile(self) -> pallas.Tile:
        """The tile that the op chooses for this shape."""
        return pallas.tile_for(self.R * self.A, self.E, jnp.dtype(self.dtype).itemsize)

    def lower(self, kind: str) -> jax.stages.Lowered:
        """The product alone, lowered for CUDA and this kind of GPU."""
        R, A, E, D, width = self.R, self.A, self.E, self.D, self.I
        gated = self.product == "gate_up"
        where = jax.eval_shape(lambda ids: plan(ids, E, self.tile.rows), jax.ShapeDtypeStruct((R, A), jnp.int32))
        source = jax.ShapeDtypeStruct((R, D) if gated else (R * A, width), self.dtype)
        shape = (E, D, 2 * width) if gated else (E, width, D)
        matrices = jax.ShapeDtypeStruct(shape, self.dtype)
        if self.quantization is not None:
            matrices = quantized_spec(("layers", 0, "experts", self.product), shape, self.quantization)
        dtype = self.dtype if gated else jnp.float32

        def product(where: Plan, source: Array, matrices: Weight) -> Array:
            return pallas.grouped(where, source, matrices, self.tile, rows=R * A, gated=gated, dtype=dtype)

        with pallas_compat.absent_gpu(kind):
            return jax.jit(product).trace(where, source, matrices).lower(lowering_platforms=("cuda",))


# As many tokens as make the op choose each tile in turn: a canvas, chunks of prompts.
CASES = tuple(Case(product, R) for R in (256, 512, 1024, 2048) for product in ("gate_up", "down"))
FLOAT32 = tuple(Case(product, 256, jnp.float32) for product in ("gate_up", "down"))
QUANTIZED = tuple(replace(case, quantization=quantization) for quantization in QUANTIZATIONS for case in CASES)


def table(cases: Sequence[Case] = CASES + FLOAT32 + QUANTIZED) -> str:
    """The table of README.md: a line per tile and product, registers and shared memory (bytes) by GPU."""
    lines = ["| rows x columns x inner, warps, stages | product | spilled bytes | " + " | ".join(GPUS) + " |"]
    lines.append("|---|---|---|" + "---|" * len(GPUS))
    for case in cases:
        codes = [compile_pallas(case, gpu) for gpu in GPUS.values()]
        t, spilled = case.tile, max(code.spilled for code in codes)
        inner = INT4_GROUP if case.quantization == "int4" else t.inner
        numbers = case.quantization or jnp.dtype(case.dtype).name
        name = f"{t.rows} x {t.columns} x {inner}, {t.warps}, {t.stages}, {numbers}"
        figures = " | ".join(f"{code.registers} regs, {code.shared:,}" for code in codes)
        lines.append(f"| {name} | {case.product} | {spilled} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
