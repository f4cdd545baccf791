"""Orbax items on disk: one saved, one read, and the tensors of a whole directory of them by name.

A converted directory holds `weights/<item>`, each an Orbax checkpoint of its own that any Orbax reader restores to the
nested dict below that part of params, and the manifest, which is written last: config, and per item each tensor's
dtype, shape and checksum (crc32 of its bytes in C order, little endian).
"""

from __future__ import annotations

import json
import logging
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from dgemma_jax.config import Config
from dgemma_jax.convert.safetensors_files import Problem
from dgemma_jax.convert.table import insert, leaf

if TYPE_CHECKING:
    import jax
    import orbax.checkpoint as ocp

MANIFEST = "dgemma-manifest.json"
VERSION = 1
WEIGHTS = "weights"
TREE = "_METADATA"  # the file that makes a folder an Orbax tree


class Stored(NamedTuple):
    """Where a tensor lies: the Orbax checkpoint, its keys in that tree, its header, its checksum if it is to hold."""

    tree: Path
    keys: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    crc32: int | None = None


@dataclass
class OrbaxFiles:
    """Tensors by name, of one Orbax tree or of several; iterates over the names.

    stacks: names that hold parts of several items; they stay in memory until other ones are read.
    """

    paths: list[Path]
    tensors: dict[str, Stored]
    stacks: frozenset[str] = frozenset()
    problems: list[Problem] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    _kept: dict[str, np.ndarray] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> str:
        return self.tensors[name].dtype

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors, all of them read before the first comes. ValueError names the one that is damaged."""
        names = list(names)
        arrays = {name: array for name, array in self._kept.items() if name in names}
        self._kept = dict(arrays)
        trees: dict[Path, list[str]] = {}
        for name in names:
            if name not in arrays:
                trees.setdefault(self.tensors[name].tree, []).append(name)
        for tree, wanted in trees.items():
            found = restore(tree, [self.tensors[name].keys for name in wanted])
            arrays |= dict(zip(wanted, found, strict=True))
            del found
        self._kept = {name: array for name, array in arrays.items() if name in self.stacks}
        for name in names:
            array = arrays.pop(name)
            self._check_header(name, array.dtype, array.shape)
            self._check_values(name, array)
            yield name, array

    def read_parts(self, targets: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[tuple[str, jax.Array]]:
        """The tensors as the targets say, with dtype, sharding and zeros behind the end; each device reads its part."""
        trees: dict[Path, list[str]] = {}
        for name in targets:
            trees.setdefault(self.tensors[name].tree, []).append(name)
        for tree, names in trees.items():
            keys = [self.tensors[name].keys for name in names]
            for name, header in zip(names, headers(tree, keys), strict=True):
                self._check_header(name, *header)  # Orbax would cut or fill up what has another shape
            yield from zip(names, restore(tree, keys, [targets[name] for name in names]), strict=True)

    def _check_header(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        stored = self.tensors[name]
        if (dtype.name, shape) != (stored.dtype, stored.shape):
            header = f"{stored.dtype}{list(stored.shape)}"
            raise ValueError(f"{stored.tree}: {name} is {dtype}{list(shape)}, recorded as {header}{AGAIN}")

    def _check_values(self, name: str, array: np.ndarray) -> None:
        stored = self.tensors[name]
        if stored.crc32 is not None and checksum(array) != stored.crc32:
            raise ValueError(f"{stored.tree}: {name} has other values than were written (crc32){AGAIN}")


AGAIN = "; the item is damaged: convert again"


def checksum(array: np.ndarray) -> int:
    """crc32 of the values of a C-contiguous array."""
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def record(array: np.ndarray) -> dict[str, Any]:
    """What the manifest says about an array."""
    return {"dtype": array.dtype.name, "shape": list(array.shape), "crc32": checksum(array)}


@cache
def _checkpointer(purpose: str) -> ocp.Checkpointer:
    """One for saving and one for reading, since a conversion does both at once; making one takes a while.

    Uncompressed: weights shrink by a fifth and take several times as long to write. Orbax is imported where it is used,
    so that loading from safetensors does not wait for it.
    """
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def save(path: Path, tree: Mapping[str, Any]) -> None:
    """Writes a nested dict of arrays as one Orbax checkpoint, which appears at `path` when it is whole."""
    import jax
    import orbax.checkpoint as ocp

    # Orbax copies numpy arrays before it writes them, jax's not.
    arrays = jax.device_put(tree, jax.devices("cpu")[0], may_alias=True)
    with _quiet():
        _checkpointer("save").save(path.absolute(), args=ocp.args.PyTreeSave(arrays))


@overload
def restore(path: Path, wanted: list[tuple[str, ...]]) -> list[np.ndarray]: ...
@overload
def restore(path: Path, wanted: list[tuple[str, ...]], targets: list[jax.ShapeDtypeStruct]) -> list[jax.Array]: ...
def restore(
    path: Path, wanted: list[tuple[str, ...]], targets: list[jax.ShapeDtypeStruct] | None = None
) -> list[np.ndarray] | list[jax.Array]:
    """The arrays at some keys of an Orbax checkpoint. ValueError, with the path, if it cannot be read.

    targets: dtype, shape and sharding of each, instead of numpy arrays as they are stored.
    """
    import orbax.checkpoint as ocp

    args: dict[str, Any] = {}
    for index, keys in enumerate(wanted):
        insert(args, keys, ocp.RestoreArgs(restore_type=np.ndarray) if targets is None else _part_of(targets[index]))
    _must_be_there(path)
    try:
        with _quiet():
            request = ocp.args.PyTreeRestore(item=args, restore_args=args, partial_restore=True)
            tree = _checkpointer("restore").restore(path.absolute(), args=request)
    except Exception as error:  # Orbax passes on whatever its storage libraries raise
        raise ValueError(f"{path} cannot be read ({first_line(error)}){AGAIN}") from error
    return [leaf(tree, keys) for keys in wanted]


def _part_of(target: jax.ShapeDtypeStruct) -> ocp.ArrayRestoreArgs:
    import orbax.checkpoint as ocp

    return ocp.ArrayRestoreArgs(sharding=target.sharding, global_shape=target.shape, dtype=target.dtype, strict=False)


def headers(path: Path, wanted: list[tuple[str, ...]]) -> list[tuple[np.dtype, tuple[int, ...]]]:
    """Dtype and shape of the arrays at some keys of an Orbax checkpoint. ValueError if they cannot be read."""
    _must_be_there(path)
    try:
        with _quiet():
            metadata = _checkpointer("restore").metadata(path.absolute()).item_metadata
            tree = metadata.tree  # pyright: ignore[reportOptionalMemberAccess]  never None where there is one
            found = [leaf(tree, keys) for keys in wanted]
    except Exception as error:  # as in restore
        raise ValueError(f"{path} cannot be read ({first_line(error)}){AGAIN}") from error
    return [(np.dtype(one.dtype), tuple(one.shape)) for one in found]


def _must_be_there(path: Path) -> None:
    if not (path / TREE).is_file():
        raise ValueError(f"{path} is missing{AGAIN}")


def first_line(error: Exception) -> str:
    """The first line of an error of the storage libraries; of a long one its end, where the cause is."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) <= 200 else "..." + text[-200:]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what Orbax writes to standard error about a failure from it: the exception says the same.

    Reads that end after another one failed call into an event loop that is closed by then, so that the filter of those
    complaints stays once something has failed.
    """
    logger, hook = logging.getLogger("absl"), sys.unraisablehook

    def filtered(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    def nothing(_: logging.LogRecord) -> bool:
        return False

    logger.addFilter(nothing)
    sys.unraisablehook = filtered
    try:
        yield
        sys.unraisablehook = hook
    finally:
        logger.removeFilter(nothing)


def is_converted(directory: Path) -> bool:
    return (directory / MANIFEST).is_file()


def read_manifest(directory: Path) -> dict[str, Any]:
    """The parsed manifest of a converted directory. ValueError if it is none, or of another version."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no manifest of a converted model ({error!r}); convert again") from None
    if version != VERSION:
        raise ValueError(f"{path} has version {version!r}; this package reads version {VERSION}: convert again")
    return manifest


def open_converted(directory: Path, config: Config, verify: bool) -> OrbaxFiles:
    """The tensors of a converted directory by their parameters' names. verify: read() compares checksums."""
    manifest = read_manifest(directory)
    tensors = {}
    for item, entry in manifest["items"].items():
        for name, header in entry["tensors"].items():
            crc32 = header["crc32"] if verify else None
            keys = keys_in_item(name)
            tensors[name] = Stored(directory / WEIGHTS / item, keys, header["dtype"], tuple(header["shape"]), crc32)
    return OrbaxFiles([directory / MANIFEST], tensors, problems=list(_config_problems(config, manifest["config"])))


def keys_in_item(name: str) -> tuple[str, ...]:
    """The keys of a parameter in the tree of its item: without the part that the item's name says."""
    keys = tuple(name.split("/"))
    return keys[{"layers": 2, "vision": 1}.get(keys[0], 0) :]


def config_fields(config: Config) -> dict[str, Any]:
    """A Config as JSON holds it, without what may be chosen anew: dtype, a matter of each tensor, and how images are
    read."""
    fields = json.loads(json.dumps(asdict(config)))
    del fields["dtype"], fields["image_blocks"]
    if fields["vision"]:
        del fields["vision"]["max_soft_tokens"]
    return fields


def _config_problems(config: Config, converted: Mapping[str, Any]) -> Iterator[Problem]:
    for name, value in config_fields(config).items():
        if value != converted.get(name):
            detail = f"{value!r} in config.json, but {converted.get(name)!r} when converted; convert again"
            yield Problem("config", name, detail)


def tree_directory(directory: Path) -> Path | None:
    """Where the one Orbax tree of `directory` lies: itself or a folder in it, None if there is none or several."""
    if (directory / TREE).is_file():
        return directory
    found = [path.parent for path in directory.glob(f"*/{TREE}")]
    return found[0] if len(found) == 1 else None


def open_tree(path: Path, canonical: Callable[[tuple[str, ...]], str], stacked: Callable[[str], bool]) -> OrbaxFiles:
    """The tensors of one Orbax tree, named by `canonical`(keys); those that are `stacked`(name) serve several items.

    ValueError if the tree cannot be read.
    """
    with _quiet():
        metadata = _checkpointer("restore").metadata(path.absolute()).item_metadata
    if metadata is None:
        raise ValueError(f"{path} is no Orbax tree that can be read; download it again")
    tensors: dict[str, Stored] = {}
    problems = []
    for keys, header in _leaves(metadata.tree):
        name = canonical(keys)
        if name in tensors:
            problems.append(Problem("twice", name, "both spellings are in the tree"))
        tensors[name] = Stored(path, keys, np.dtype(header.dtype).name, tuple(header.shape))
    return OrbaxFiles([path / TREE], tensors, frozenset(filter(stacked, tensors)), problems)


def _leaves(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*keys, key))
    elif hasattr(tree, "shape"):
        yield keys, tree
