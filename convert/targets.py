"""What a conversion writes: Orbax items with a manifest, or safetensors shards with an index."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors.numpy import save_file

from dgemma_jax.config import Config
from dgemma_jax.convert import hf, orbax_files
from dgemma_jax.convert.safetensors_files import INDEX, open_file, read_mapped
from dgemma_jax.convert.table import ParamPath, by_item, insert, name_of, owned

Arrays = dict[str, np.ndarray]


class Target(Protocol):
    """A layout to write. marker: the file that is put in place last."""

    marker: str

    def stored(self, item: str, params: dict[ParamPath, np.ndarray]) -> Arrays:
        """The item's tensors as they will lie on disk, C-contiguous; takes them out of `params`."""
        ...

    def write(self, item: str, arrays: Arrays) -> None:
        """Writes an item, which is absent until it is whole. OSError if it cannot."""

    def read(self, item: str, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Reads a written item back. ValueError or OSError if it is damaged."""
        ...

    def remove_others(self, items: Iterable[str]) -> None:
        """Removes everything written that does not belong to these items."""

    def summary(self, items: Mapping[str, Any]) -> dict[str, Any]:
        """The content of the marker for the records of all items."""
        ...


class OrbaxTarget:
    """One Orbax checkpoint per item, as the params lie in memory."""

    marker = orbax_files.MANIFEST

    def __init__(self, root: Path, config: Config) -> None:
        self.root, self.config = root / orbax_files.WEIGHTS, config

    def stored(self, item: str, params: dict[ParamPath, np.ndarray]) -> Arrays:
        return {name_of(path): params.pop(path) for path in list(params)}

    def write(self, item: str, arrays: Arrays) -> None:
        tree: dict[str, Any] = {}
        for name, array in arrays.items():
            insert(tree, orbax_files.keys_in_item(name), array)
        self.root.mkdir(exist_ok=True)
        orbax_files.save(self.root / item, tree)

    def read(self, item: str, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        names = list(names)
        arrays = orbax_files.restore(self.root / item, [orbax_files.keys_in_item(name) for name in names])
        yield from zip(names, arrays, strict=True)

    def remove_others(self, items: Iterable[str]) -> None:
        for path in self.root.glob("*"):
            if path.name not in items:
                shutil.rmtree(path)

    def summary(self, items: Mapping[str, Any]) -> dict[str, Any]:
        config = orbax_files.config_fields(self.config)
        return {"version": orbax_files.VERSION, "config": config, "items": dict(sorted(items.items()))}


class SafetensorsTarget:
    """One shard per item under the names of Hugging Face, each shared tensor once."""

    marker = INDEX

    def __init__(self, root: Path, config: Config) -> None:
        self.root = root
        self.rows = by_item(list(hf.table(config).items()))
        count = len(self.rows)
        self.files = {
            item: f"model-{number:05}-of-{count:05}.safetensors" for number, item in enumerate(sorted(self.rows), 1)
        }

    def stored(self, item: str, params: dict[ParamPath, np.ndarray]) -> Arrays:
        arrays = {}
        for name, entry in self.rows[item]:
            array = params.pop(entry.path)
            arrays[name] = owned(entry.layout.to_file(array), array.dtype)
        return arrays

    def write(self, item: str, arrays: Arrays) -> None:
        temporary = self.root / (self.files[item] + ".tmp")
        save_file(arrays, temporary, metadata={"format": "pt"})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(self.root / self.files[item])

    def read(self, item: str, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        return read_mapped(open_file(self.root / self.files[item]), names)

    def remove_others(self, items: Iterable[str]) -> None:
        kept = {self.files[item] for item in items}
        for path in (*self.root.glob("*.safetensors"), *self.root.glob("*.safetensors.tmp")):
            if path.name not in kept:
                path.unlink()

    def summary(self, items: Mapping[str, Any]) -> dict[str, Any]:
        where = {name: self.files[item] for item, entry in items.items() for name in entry["tensors"]}
        size = sum(entry["bytes"] for entry in items.values())
        return {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
