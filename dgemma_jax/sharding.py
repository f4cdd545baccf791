"""A model on several devices: the mesh, and which axis of it cuts what.

Programs run under `jax.shard_map` (`spmd.py`): each device works on its parts and asks for what it needs of the others
(`kernels.shard.Shard`), so that no compiler decides what is sent. Tokens are on every device of the expert and tensor
axes; only sums over heads, columns, experts and ids travel, never weights.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dgemma_jax.config import INT4_GROUP, Config, is_int
from dgemma_jax.kernels.shard import Shard
from dgemma_jax.kernels.vocab_head.types import TILE
from dgemma_jax.parallel import check_parallel

AXES = ("data", "expert", "tensor")
# Which mesh axes cut a logical axis. Experts and ids are what passes mostly read, so all devices of a row share them.
RULES = {
    "rows": ("data",),
    "experts": ("expert", "tensor"),
    "vocab": ("expert", "tensor"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}
# Logical axes that are filled up with zeros where their devices do not divide them, to parts of a multiple of this. The
# others stay whole then.
PADDED = {"experts": 1, "vocab": TILE}


def make_mesh(*, data: int = 1, expert: int = 1, tensor: int = 1, **others: int) -> Mesh:
    """A mesh of the first data x expert x tensor devices of this process, for `dgemma_jax.load`.

    data: groups of devices with a copy of the weights each, which share the rows (slots). expert: devices that share
    the experts and the vocabulary. tensor: devices that share those and the heads and dense MLPs as well. others: axes
    of other names, which no model can use. ValueError for those, and for more devices than there are.
    """
    check_parallel(others)
    if others:
        raise ValueError(f"make_mesh: there is no axis {next(iter(others))!r}; expected {', '.join(AXES)}")
    sizes = {"data": data, "expert": expert, "tensor": tensor}
    for name, size in sizes.items():
        if not is_int(size, 1):
            raise ValueError(f"make_mesh: {name} is {size!r}; expected a positive number of devices")
    devices, wanted = jax.local_devices(), math.prod(sizes.values())
    if wanted > len(devices):
        text = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"make_mesh: {text} takes {wanted} devices, and there are {len(devices)}; make it smaller")
    return Mesh(np.array(devices[:wanted]).reshape(tuple(sizes.values())), AXES)


def checked(mesh: Mesh | None) -> Mesh | None:
    """The mesh, its axes left to programs whatever their type. ValueError, before anything is read, if a model cannot
    use it.
    """
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is {mesh!r:.60}; expected a jax.sharding.Mesh, see dg.make_mesh")
    check_parallel(map(str, mesh.axis_names))
    for name in mesh.axis_names:
        if name not in AXES:
            raise ValueError(f"the mesh has an axis {name!r}; expected {', '.join(AXES)}")
    if mesh.is_multi_process:
        raise ValueError("the mesh has devices of other processes; expected those of one, see dg.make_mesh")
    return Mesh(mesh.devices, mesh.axis_names)


def data_size(mesh: Mesh | None) -> int:
    """How many groups of devices have rows of their own."""
    return 1 if mesh is None else mesh.shape.get("data", 1)


def shard_of(axis: str, size: int, mesh: Mesh | None, multiple: int = 1) -> Shard:
    """How a logical axis of `size` entries is cut on a mesh. multiple: of entries that stay together."""
    extents = {} if mesh is None else mesh.shape
    axes = tuple(name for name in RULES[axis] if extents.get(name, 1) > 1)
    count = math.prod(extents[name] for name in axes)
    unit = PADDED.get(axis)
    if count == 1 or (unit is None and size % (count * multiple)) or (unit is not None and size <= unit):
        return Shard.whole(size)
    length = size // count if unit is None else -(-size // (count * unit)) * unit
    return Shard(size, axes, count, length)


def columns(config: Config, size: int, mesh: Mesh | None) -> Shard:
    """The inner axis of a dense MLP; with 4 bits numbers that share a scale stay together."""
    return shard_of("mlp", size, mesh, INT4_GROUP if config.quantization == "int4" else 1)


def partition(*axes: Shard | None) -> P:
    """The PartitionSpec of an array whose axes are cut like this; None, and the rest, is whole."""
    return P(*(shard.axes if shard and shard.cut else None for shard in axes))


def partition_of(shape: tuple[int, ...], axes: tuple[Shard | None, ...]) -> P:
    """The PartitionSpec of a parameter; an axis of extent 1, as scales have them, is whole."""
    return partition(*(shard if extent > 1 else None for extent, shard in zip(shape, axes, strict=False)))


def placed(array: jax.ShapeDtypeStruct, axes: tuple[Shard | None, ...], mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    """A parameter as it lies on the mesh: with its sharding, and with padding in its shape."""
    if mesh is None:
        return array
    padded = [shard.count * shard.length if shard and shard.padded else None for shard in axes]
    shape = tuple(length or extent for length, extent in zip_longest(padded, array.shape))
    return jax.ShapeDtypeStruct(shape, array.dtype, sharding=NamedSharding(mesh, partition_of(shape, axes)))


def share(array: Any) -> int:
    """How many numbers of an array, or of what stands for one, lie on each device."""
    sharding = getattr(array, "sharding", None)
    return math.prod(array.shape if sharding is None else sharding.shard_shape(array.shape))


def copies(config: Config, key_value_heads: int, mesh: Mesh | None) -> int:
    """How often the cache holds each K/V head of a layer, so that every device has those that its query heads read."""
    heads = shard_of("heads", config.num_attention_heads, mesh)
    return math.lcm(key_value_heads, heads.count) // key_value_heads


def uneven(config: Config, mesh: Mesh | None) -> list[str]:
    """In words, what the devices do not divide: replicated, or filled up with zeros."""
    if mesh is None:
        return []
    kinds = {layer.kind: layer.num_key_value_heads for layer in config.layers}
    dense = columns(config, config.intermediate_size, mesh)
    found = [
        ("heads", config.num_attention_heads, "query heads"),
        *(("kv_heads", heads, f"K/V heads of {kind} layers") for kind, heads in kinds.items()),
        ("mlp", config.self_conditioning_size, "columns of the self-conditioning MLP"),
        ("experts", config.num_experts, "experts"),
        ("vocab", config.vocab_size, "ids"),
    ]
    lines = [_uneven(axis, shard_of(axis, size, mesh), what, mesh) for axis, size, what in found]
    return [line for line in (*lines, _uneven("mlp", dense, "columns of the dense MLPs", mesh)) if line]


def _uneven(axis: str, shard: Shard, what: str, mesh: Mesh) -> str | None:
    axes = [name for name in RULES[axis] if mesh.shape.get(name, 1) > 1]
    if not axes or (shard.cut and not shard.padded):
        return None
    devices = f"{math.prod(mesh.shape[name] for name in axes)} devices ({' x '.join(axes)})"
    if shard.padded:
        return f"mesh: {shard.size} {what} are filled up to {shard.count * shard.length} for {devices}"
    return f"mesh: {shard.size} {what} do not divide over {devices}: replicated"
