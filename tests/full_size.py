"""Programs of the 26B model over abstract arrays, nothing allocated, and what their compiled text says of memory."""

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from dgemma_jax.cache import KVCache, init_cache
from dgemma_jax.config import Config, gemma_26b_a4b
from dgemma_jax.diffusion.policy import Knobs, Policy
from dgemma_jax.diffusion.slots import advance, idle
from dgemma_jax.diffusion.step import start, step
from dgemma_jax.functional import encode
from dgemma_jax.model.transformer import AUTO, Implementations, build
from dgemma_jax.sampling import BUILT_IN
from dgemma_jax.spmd import CACHE, Layout

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
TEXT_26B = replace(gemma_26b_a4b(), vision=None)  # none of these programs reads the tower's weights
# Operations that make no array of their own, and those that only move what is there, all of it: no slices.
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all"}
MOVING = {"copy", "transpose", "reshape", "convert", "concatenate", "bitcast-convert", "pad"}


@dataclass(frozen=True)
class Programs:
    """What is compiled: the model in one dtype for some rows and a cache of `capacity` positions a row.

    Every program is (jitted function, arguments); jax.ShapeDtypeStruct stands for each array.
    """

    dtype: str
    rows: int = 1
    capacity: int = 8192
    implementations: Implementations = AUTO
    config: Config = TEXT_26B
    mesh: Mesh | None = None

    @cached_property
    def model(self) -> tuple:
        """The graph and the abstract parameters."""
        return build(self.config, self.dtype, self.implementations, self.mesh)

    @cached_property
    def cache(self) -> KVCache:
        """The abstract cache."""
        shapes = jax.eval_shape(lambda: init_cache(self.config, self.rows, self.capacity, self.dtype, self.mesh))
        if self.mesh is None:
            return shapes
        k, v, lengths = Layout(self.config, self.rows, self.mesh).specs(CACHE)
        place = lambda spec, leaf: leaf.update(sharding=NamedSharding(self.mesh, spec))  # noqa: E731
        return KVCache(
            *(jax.tree.map(partial(place, spec), part) for spec, part in ((k, shapes.k), (v, shapes.v))),
            lengths=place(lengths, shapes.lengths),
        )

    def encode(self, tokens: int = 1024) -> tuple:
        """A chunk of tokens of every row, appended to the donated cache."""
        graph, params = self.model
        return jax.jit(partial(encode, graph), donate_argnums=3), (params, self._ids(tokens), self._ids(), self.cache)

    def step(self) -> tuple:
        """One denoising step."""
        graph, params = self.model
        return jax.jit(partial(step, graph), static_argnums=7), (params, *self.inputs(), Policy())

    def loop(self) -> tuple:
        """The engine's loop of passes that denoise some rows and commit others; cache and slots are donated."""
        graph, params = self.model
        cache, _, keys, _, knobs, _ = self.inputs()
        slots = jax.eval_shape(lambda keys, knobs: idle(self.config, keys, knobs, self.dtype), keys, knobs)
        function = jax.jit(partial(advance, graph, self.config, Policy()), donate_argnums=(1, 2))
        return function, (params, cache, slots, jax.ShapeDtypeStruct((), jnp.int32))

    def _ids(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, *shape), jnp.int32)

    def inputs(self) -> tuple:
        """What a step takes besides parameters: cache, state, keys, canvas index, knobs and suppression."""
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl="threefry2x32"), self.rows))
        active = jax.ShapeDtypeStruct((self.rows,), bool)
        state = jax.eval_shape(partial(start, self.config, dtype=self.dtype), keys, self._ids(), active)
        knobs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), Knobs.of([BUILT_IN] * self.rows))
        suppress = jax.ShapeDtypeStruct((self.rows, self.config.vocab_size), bool)
        return self.cache, state, keys, self._ids(), knobs, suppress


@dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program: operation, the (dtype, shape) of its results, and whom it calls."""

    operation: str
    results: tuple[tuple[str, tuple[int, ...]], ...]
    called: tuple[str, ...]

    @property
    def elements(self) -> int:
        """Of the largest result."""
        return math.prod(self.largest)

    @property
    def largest(self) -> tuple[int, ...]:
        """The dimensions of the largest result; with nothing in it where there is none."""
        return max((shape for _, shape in self.results), key=math.prod, default=(0,))


@dataclass(frozen=True)
class Hlo:
    """The computations of HLO text, by name, and the instructions of each."""

    text: str
    computations: dict[str, list[Instruction]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lines: list[Instruction] = []
        for line in self.text.splitlines():
            if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
                lines = self.computations.setdefault(head[1], [])
            elif found := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ([a-z][\w\-]*)\((.*)", line):
                lines.append(Instruction(found[2], tuple(_arrays(found[1])), tuple(_called(found[3]))))

    def kernels(self, inside_loops: bool = False) -> Iterator[Instruction]:
        """The instructions that run by themselves, fusions as one; optionally only those in bodies of loops."""
        fused = {name for _, one in self._all() if one.operation == "fusion" for name in one.called}
        wanted = self._reached_from_loops() if inside_loops else set(self.computations)
        for name, one in self._all():
            if name in wanted - fused and one.operation not in FREE:
                yield one

    def moves(self, one: Instruction) -> bool:
        """Whether it only moves data: a copy or the like, or a fusion of nothing else."""
        if one.operation != "fusion":
            return one.operation in MOVING
        return all(inner.operation in MOVING | FREE for name in one.called for inner in self.computations.get(name, []))

    def _all(self) -> Iterator[tuple[str, Instruction]]:
        return ((name, one) for name, lines in self.computations.items() for one in lines)

    def _reached_from_loops(self) -> set[str]:
        todo = [name for _, one in self._all() if one.operation == "while" for name in one.called]
        found: set[str] = set()
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += [called for one in self.computations.get(name, []) for called in one.called]
        return found


def _arrays(types: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", types):
        if dtype in BYTES:
            yield dtype, tuple(map(int, filter(None, shape.split(","))))


def _called(rest: str) -> Iterator[str]:
    for names in re.findall(r"(?:calls|body|condition|to_apply|\w+_computations?)=\{?((?:%[\w.\-]+(?:, )?)+)", rest):
        yield from re.findall(r"%([\w.\-]+)", names)


def large_moves(hlo: Hlo, arrays: Collection, *, inside_loops: bool) -> list[Instruction]:
    """Copies of whole weights or cache buffers, told by their dimensions in any order; a chunk of one is no match.

    arrays: the pytree of weights and buffers; those below 2^20 elements are not looked for.
    """

    def dimensions(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(length for length in shape if length > 1))

    wanted = {dimensions(leaf.shape) for leaf in jax.tree.leaves(arrays) if math.prod(leaf.shape) >= 1 << 20}
    return [
        one
        for one in hlo.kernels(inside_loops)
        if hlo.moves(one) and any(dimensions(shape) in wanted for _, shape in one.results)
    ]


def collectives(hlo: Hlo) -> dict[str, list[int]]:
    """What a program sends between devices: by operation, the elements of each one's largest result."""
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    found = ((one.operation.removesuffix("-start"), one.elements) for one in hlo.kernels())
    sent: dict[str, list[int]] = {}
    for name, elements in found:
        if name in names:
            sent.setdefault(name, []).append(elements)
    return sent


def whole_weights(hlo: Hlo, config: Config) -> list[Instruction]:
    """Floating-point arrays as large as one of the config's weights, in whatever shape; those below 2^20 elements are
    not looked for. Of a quantised model they may be weights whose numbers exist all at once. With a canvas of 256 and
    16 heads activations of the experts and a chunk of the table happen to be as large.
    """
    plain = build(replace(config, quantization=None))[1]
    sizes = {math.prod(leaf.shape) for leaf in jax.tree.leaves(plain) if math.prod(leaf.shape) >= 1 << 20}

    def is_one(dtype: str, shape: tuple[int, ...]) -> bool:
        return dtype in ("bf16", "f16", "f32") and math.prod(shape) in sizes

    return [one for one in hlo.kernels() if any(is_one(*result) for result in one.results)]
