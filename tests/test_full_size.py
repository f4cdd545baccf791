"""The 26B model's programs compiled for the CPU over abstract fp32 weights: what must not be in memory is not.

XLA's CPU compiler casts bf16 weights whole, so fp32 stands for them; `make gpu-aot` does the same in bf16 for GPUs.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.full_size import Hlo, Programs, large_moves, whole_weights

pytestmark = pytest.mark.usefixtures("abstract_arrays")
PROGRAMS = Programs("float32")
FAST = {"xla_backend_optimization_level": 0}  # of the machine code; what the program does with memory is the same


def compiled(program: tuple) -> tuple[Hlo, Any]:
    function, arguments = program
    done = function.lower(*arguments).compile(compiler_options=FAST)
    return Hlo(done.as_text()), done.memory_analysis()


@pytest.fixture(scope="module")
def loop() -> Hlo:
    return compiled(PROGRAMS.loop())[0]


@pytest.mark.slow
def test_the_loop_makes_no_array_of_canvas_times_vocabulary(loop):
    C, V = PROGRAMS.config.canvas_length, PROGRAMS.config.vocab_size
    largest = max(loop.kernels(), key=lambda one: one.elements)
    assert largest.elements < C * V, largest


@pytest.mark.slow
def test_the_loop_copies_neither_weights_nor_cache(loop):
    assert sum(1 for _ in loop.kernels(inside_loops=True)) > 30 * 10
    assert large_moves(loop, (PROGRAMS.model[1], PROGRAMS.cache), inside_loops=True) == []


@pytest.mark.slow
def test_encoding_a_chunk_works_in_the_donated_cache():
    _, memory = compiled(PROGRAMS.encode())
    assert memory.alias_size_in_bytes == sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(PROGRAMS.cache)
    )


@pytest.mark.slow
def test_encoding_a_chunk_takes_no_more_memory_behind_a_long_prompt():
    """A chunk of 1,024 tokens of a sliding and a full layer, in a cache of 8,192 positions and of 131,072."""
    config = replace(PROGRAMS.config, layers=PROGRAMS.config.layers[4:6])
    assert {layer.kind for layer in config.layers} == {"sliding", "full"}
    temps = [
        compiled(Programs("float32", capacity=capacity, config=config).encode())[1].temp_size_in_bytes
        for capacity in (8192, 131_072)
    ]
    assert temps[1] <= temps[0] + (1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "layer"), [("int8", 4), ("int4", 5)])
def test_no_quantised_weight_is_ever_whole_as_numbers(quantization, layer):
    """A sliding layer, a full one. Of weights only an expert's numbers exist at once, a tile's or a chunk's."""
    other = {"canvas_length": 192, "num_attention_heads": 24}  # so that nothing else is as large as a weight
    config = replace(
        PROGRAMS.config, layers=PROGRAMS.config.layers[layer : layer + 1], quantization=quantization, **other
    )
    programs = Programs("float32", config=config)
    hlo, memory = compiled(programs.loop())
    assert whole_weights(hlo, config) == []
    assert large_moves(hlo, programs.model[1], inside_loops=False) == []
    assert memory.temp_size_in_bytes < 512 << 20


def test_a_copy_of_a_weight_inside_a_loop_is_found():
    text = """HloModule wrong
%fused (p: f32[1024,2048]) -> f32[2048,1024] {
  %p = f32[1024,2048]{1,0} parameter(0)
  ROOT %t = f32[2048,1024]{1,0} transpose(%p), dimensions={1,0}
}
%body (arg: (s32[], f32[1024,2048])) -> (s32[], f32[1024,2048]) {
  %w = f32[1024,2048]{1,0} get-tuple-element(%arg), index=1
  %moved = f32[2048,1024]{1,0} fusion(%w), kind=kLoop, calls=%fused
  %half = f32[512,2048]{1,0} slice(%w), slice={[0:512], [0:2048]}
}
ENTRY %main (p: f32[1024,2048]) -> f32[1024,2048] {
  %copied = f32[1024,2048]{0,1} copy(%p)
  %loop = (s32[], f32[1024,2048]{1,0}) while(%t), condition=%always, body=%body
}
"""
    hlo, weights = Hlo(text), [jax.ShapeDtypeStruct((1024, 2048), jnp.float32)]
    assert [one.operation for one in large_moves(hlo, weights, inside_loops=True)] == ["fusion"]
    assert [one.operation for one in large_moves(hlo, weights, inside_loops=False)] == ["fusion", "copy"]
    assert large_moves(hlo, [jax.ShapeDtypeStruct((1024, 1536), jnp.float32)], inside_loops=False) == []
