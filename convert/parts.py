"""Parameters read straight to the devices of a mesh: each device its part, no parameter whole in the host's memory.

Mapped files are cut before they are put in order and cast. Converted directories hold parameters as they lie in memory,
so Orbax reads the parts itself. Google's tree stacks layers in other orders: its tensors are read whole, then cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dgemma_jax.convert.orbax_files import OrbaxFiles
from dgemma_jax.convert.safetensors_files import Problem
from dgemma_jax.convert.table import DTYPES, Rows, leaf, owned
from dgemma_jax.convert.weights import Parameter, Weights, all_finite, load, part_problem, value_problem
from dgemma_jax.quantization import is_part


def load_parts(weights: Weights, abstract: Mapping, dtype: str | None, placed: Mapping) -> tuple[dict, str]:
    """`weights.load` to where `placed` says: as `abstract` a nested dict, with the sharding and padding of each."""
    return load(weights, abstract, dtype, place=lambda array: array, read=partial(_read, weights, placed))


def _read(
    weights: Weights, placed: Mapping, rows: Rows, abstract: Mapping, dtype: str
) -> Iterator[Parameter[jax.Array]]:
    """`Weights.read` of arrays on the mesh."""
    if weights.in_place:
        yield from _restored(weights, placed, rows, dtype)
        return
    for name, entry, stored in weights.stored(rows):
        view = entry.layout.from_file(stored, leaf(abstract, entry.path).shape)
        with np.errstate(over="ignore"):  # what does not fit float16 is found by the check of values
            array, finite = _spread(view, leaf(placed, entry.path), DTYPES[dtype])
            problem = None if finite else value_problem(name, stored, owned(view, DTYPES[dtype]))
        yield Parameter(entry.path, array, problem)


def _spread(view: np.ndarray, target: jax.ShapeDtypeStruct, dtype: Any) -> tuple[jax.Array, bool]:
    """The array on its devices, and whether all of it is finite. One part is on the host at a time."""
    shape, sharding = target.shape, target.sharding
    holders: dict[tuple, list] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple((part.start, part.stop) for part in index)  # pyright: ignore[reportOptionalIterable]  never None
        holders.setdefault(bounds, []).append(device)
    arrays, finite = [], True
    for bounds, devices in holders.items():
        part = owned(view[(*(slice(*ends) for ends in bounds), ...)], dtype)
        finite = finite and all_finite(part)
        part = _filled(part, sharding.shard_shape(shape))
        arrays += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays), finite


def _filled(part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The last parts of an axis may be short of `shape`, or empty: zeros fill them up."""
    if part.shape == shape:
        return part
    return np.pad(part, [(0, wanted - length) for wanted, length in zip(shape, part.shape, strict=True)])


def _restored(weights: Weights, placed: Mapping, rows: Rows, dtype: str) -> Iterator[Parameter[jax.Array]]:
    entries, targets = dict(rows), {}
    for name, entry in rows:
        target = leaf(placed, entry.path)
        targets[name] = target if is_part(entry.path) else target.update(dtype=DTYPES[dtype])
    assert isinstance(weights.files, OrbaxFiles)  # they alone are in place
    for name, array in weights.files.read_parts(targets):
        yield Parameter(entries[name].path, array, _problem(name, array, weights.files.shape(name)))


def _problem(name: str, array: jax.Array, shape: tuple[int, ...]) -> Problem | None:
    """What is wrong with the values, of which the device looks at all that cannot be scales."""
    if name.endswith("scales"):
        return part_problem(name, np.asarray(array)[tuple(map(slice, shape))])
    if not np.issubdtype(array.dtype, np.integer) and not _is_finite(array):
        values = np.asarray(array)[tuple(map(slice, shape))]
        return value_problem(name, values, values)
    return None


@jax.jit
def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()
