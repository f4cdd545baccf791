"""The weights of a model directory, whatever its kind: their table checked against the model, and read part by part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from dgemma_jax.config import Config
from dgemma_jax.convert import google, hf, orbax_files
from dgemma_jax.convert.foreign import refuse_foreign
from dgemma_jax.convert.safetensors_files import Problem, TensorFiles, has_safetensors, report
from dgemma_jax.convert.table import (
    DTYPES,
    SAME,
    Entry,
    ParamPath,
    Rows,
    by_item,
    insert,
    leaf,
    name_of,
    owned,
    stacked_shape,
)
from dgemma_jax.quantization import is_part, stored_paths
from dgemma_jax.shapes import Array

CHUNK = 1 << 17  # values checked together: what fits in a cache
TABLE = ("embedder", "table")
A = TypeVar("A", np.ndarray, jax.Array)


class WeightsError(ValueError):
    """The files and the config do not fit. The message holds one line per finding, `problems` every single one."""

    def __init__(self, directory: Path, problems: list[Problem]) -> None:
        super().__init__(report(directory, problems))
        self.problems = problems


class Files(Protocol):
    """Stored tensors by name: `safetensors_files.TensorFiles` and `orbax_files.OrbaxFiles`.

    problems: what is wrong with the files. lost: names that only such a file would hold. paths: what was opened.
    """

    problems: list[Problem]
    lost: set[str]
    paths: list[Path]

    def __contains__(self, name: str) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def read(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]: ...


class Parameter(NamedTuple, Generic[A]):
    """One parameter as it was read: its place in params, the array in the params' layout, what is wrong with it."""

    path: ParamPath
    array: A
    problem: Problem | None


@dataclass(frozen=True)
class Weights:
    """An opened directory.

    kind: the layout, in words. rows: the parameters of the model and where they are stored, in reading order.
    note: what to know about this layout, or "". numbers: the dtype of what quantised weights stand for, None without.
    in_place: whether the files hold every parameter as it lies in params.
    """

    kind: str
    directory: Path
    files: Files
    rows: Rows
    note: str = ""
    numbers: str | None = None
    in_place: bool = False

    @property
    def dtype(self) -> str | None:
        """Of the stored embedding table or of what it stands for, None if there is none that can be read."""
        if self.numbers is not None:
            return self.numbers
        name = next(name for name, entry in self.rows if entry.path == TABLE)
        dtype = self.files.dtype(name) if name in self.files else None
        return dtype if dtype in DTYPES else None

    def problems(self, abstract: Mapping) -> list[Problem]:
        """Everything that headers tell: files and tensors missing, unexpected, or of another shape or dtype."""
        entries: dict[str, list[Entry]] = defaultdict(list)
        for name, entry in self.rows:
            entries[name].append(entry)
        found = list(self.files.problems)
        for name, parts in entries.items():
            shape = stacked_shape(parts) + parts[0].layout.file_shape(leaf(abstract, parts[0].path).shape)
            dtypes = (leaf(abstract, parts[0].path).dtype.name,) if is_part(parts[0].path) else tuple(DTYPES)
            if name not in self.files.lost and (problem := self._misfit(name, shape, dtypes)):
                found.append(problem)
        return found + list(self._extras(entries))

    def _misfit(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Problem | None:
        if name not in self.files:
            return Problem("missing", name, f"expected {list(shape)}")
        if self.files.shape(name) != shape:
            return Problem("wrong shape", name, f"{list(self.files.shape(name))}, the config asks for {list(shape)}")
        if self.files.dtype(name) not in dtypes:
            expected = dtypes[0] if len(dtypes) == 1 else f"one of {', '.join(dtypes)}"
            return Problem("wrong dtype", name, f"{self.files.dtype(name)}, expected {expected}")
        return None

    def _extras(self, entries: Mapping[str, list[Entry]]) -> Iterator[Problem]:
        for name in self.files:
            original = hf.original_of(name)
            if name in entries:
                continue
            if original is None or original not in entries:
                yield Problem("unexpected", name, f"{list(self.files.shape(name))}, the config has no such weight")
            elif original in self.files and not self._equal(name, original):
                yield Problem("disagrees", name, f"expected a copy of {original}")

    def _equal(self, name: str, other: str) -> bool:
        if not {self.files.dtype(name), self.files.dtype(other)} <= DTYPES.keys():
            return False
        (_, first), (_, second) = self.files.read([name, other])
        return np.array_equal(first, second)

    def read(self, rows: Rows, abstract: Mapping, dtype: str | None) -> Iterator[Parameter[np.ndarray]]:
        """The parameters of some rows, in memory of their own; dtype None is as stored, and the parts of quantised
        weights always are. The headers must fit."""
        for name, entry, stored in self.stored(rows):
            shape = leaf(abstract, entry.path).shape
            with np.errstate(over="ignore"):  # what does not fit float16 is found by the check of values
                wanted = stored.dtype if dtype is None or is_part(entry.path) else DTYPES[dtype]
                array = owned(entry.layout.from_file(stored, shape), wanted)
            problem = part_problem(name, array) if is_part(entry.path) else value_problem(name, stored, array)
            yield Parameter(entry.path, array, problem)

    def stored(self, rows: Rows) -> Iterator[tuple[str, Entry, np.ndarray]]:
        """The tensor's name, the parameter's entry and its values as they are stored, for each of some rows."""
        entries: dict[str, list[Entry]] = defaultdict(list)
        for name, entry in rows:
            entries[name].append(entry)
        for name, stored in self.files.read(entries):
            for entry in entries[name]:
                yield name, entry, stored[(*entry.at, ...)]  # with the dots also a single value stays an array


def open_weights(directory: Path, config: Config, verify: bool = False) -> Weights:
    """The weights in `directory`: a converted one, safetensors files, or Google's Orbax tree.

    verify: compare each tensor with its checksum when it is read, where there are checksums: in a converted one.
    Raises ValueError where there are no weights.
    """
    if orbax_files.is_converted(directory):
        paths = [path for entry in hf.table(config).values() for path in stored_paths(entry.path, config.quantization)]
        rows = [(name_of(path), Entry(path, SAME)) for path in paths]
        files = orbax_files.open_converted(directory, config, verify)
        if config.quantization is None:
            return Weights("converted (Orbax)", directory, files, rows, in_place=True)
        kind = f"converted (Orbax), quantised to {config.quantization}"
        return Weights(kind, directory, files, rows, numbers=config.dtype, in_place=True)
    if config.quantization is not None:
        raise ValueError(
            f"{directory}/config.json says {config.quantization} as dgemma convert --quantize writes it, but the "
            "weights are none of a converted model; remove quantization_config if they are not quantised"
        )
    tree = None if has_safetensors(directory) else orbax_files.tree_directory(directory)
    if tree is not None:
        files = orbax_files.open_tree(tree, google.canonical, google.is_stacked)
        return Weights("Google's Orbax tree", directory, files, google.table(config, files), google.NOTE)
    files = TensorFiles(directory)
    refuse_foreign(directory, files)
    return Weights("Hugging Face (safetensors)", directory, files, list(hf.table(config).items()))


def load(
    weights: Weights,
    abstract: Mapping,
    dtype: str | None = None,
    place: Callable[[Array], Any] = np.asarray,
    read: Callable[[Rows, Mapping, str], Iterator[Parameter[jax.Array]]] | None = None,
) -> tuple[dict, str]:
    """Reads all params, one tensor at a time.

    abstract: the nested dict of shapes that params must match. dtype: of the result; None is that of the stored
    embedding table. place: what becomes of each array, for instance a copy to a device. read: in place of
    `Weights.read`. Returns (params, dtype). Raises WeightsError with everything that is wrong.
    """
    problems = weights.problems(abstract)
    dtype = dtype or weights.dtype or "float32"
    broken = {problem.name for problem in problems} | weights.files.lost
    params: dict = {}
    for rows in by_item(weights.rows).values():
        sound = [(name, entry) for name, entry in rows if name not in broken]
        for path, array, problem in (read or weights.read)(sound, abstract, dtype):
            if problem is not None:
                problems.append(problem)
            if not problems:  # nothing is placed once the load has failed
                insert(params, path, place(array))
    if problems:
        raise WeightsError(weights.directory, problems)
    return params, dtype


def value_problem(name: str, stored: np.ndarray, array: np.ndarray) -> Problem | None:
    """What is not finite in `array`, told by its place in `stored`.

    Infinite clip bounds mean no bound; nothing else may be infinite, and nothing NaN.
    """
    if all_finite(array):
        return None
    with np.errstate(over="ignore"):
        values = stored.astype(array.dtype)
    bound = name.rsplit(".", 1)[-1] in hf.CLIP_BOUNDS
    bad = np.isnan(values) if bound else ~np.isfinite(values)
    if not bad.any():
        return None
    first = [int(axis) for axis in np.argwhere(bad)[0]]
    detail = f"{int(bad.sum())} of {values.size} values as {values.dtype}, the first at {first}"
    return Problem("not finite", name, detail)


def part_problem(name: str, array: np.ndarray) -> Problem | None:
    """Scales that cannot be: of experts by their numbers, else by the first one's place."""
    if not name.endswith("scales"):
        return None
    scales = array.astype(np.float32)
    bad = ~np.isfinite(scales) | (scales == 0)
    if not bad.any():
        return None
    found = np.argwhere(bad)
    experts = ", ".join(str(expert) for expert in np.unique(found[:, 0]))
    where = f"of experts {experts}" if "/experts/" in name else f"the first at {found[0].tolist()}"
    zero, count = int((scales == 0).sum()), len(found)
    return Problem("bad scale", name, f"{zero} zero and {count - zero} not finite, {where}; convert the model again")


def all_finite(array: np.ndarray) -> bool:
    """No infinity and no NaN in a C-contiguous array, by the exponents' bits: far quicker than np.isfinite."""
    infinity = np.array(np.inf, array.dtype).view(f"u{array.itemsize}")
    bits = array.reshape(-1).view(infinity.dtype)
    return all((bits[at : at + CHUNK] & infinity).max() < infinity for at in range(0, bits.size, CHUNK))
