"""The tensors of a directory's safetensors files, one file or shards with an index, and how to say what is wrong."""

from __future__ import annotations

import json
import math
import mmap
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from dgemma_jax.convert.table import DTYPES

FILE_DTYPES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Problem(NamedTuple):
    """One finding: its kind, the tensor or file, and what was found and expected."""

    kind: str
    name: str
    detail: str


class Tensor(NamedTuple):
    """Where a tensor lies: dtype (as the format spells it where the project does not read it), shape, mapped bytes."""

    dtype: str
    shape: tuple[int, ...]
    file: mmap.mmap
    begin: int


class TensorFiles:
    """Names, shapes, dtypes and contents of all tensors in a directory; iterates over the names.

    problems: files that are absent, unreadable or overlap. lost: names that only such a file would hold.
    Raises ValueError where there is nothing to read.
    """

    def __init__(self, directory: Path) -> None:
        self.problems: list[Problem] = []
        self.lost: set[str] = set()
        self.paths: list[Path] = []
        self._tensors: dict[str, Tensor] = {}
        for file_name, names in _files_of(directory).items():
            path = directory / file_name
            try:
                tensors = open_file(path)
            except (SafetensorError, OSError) as error:
                if not names:
                    raise ValueError(f"{path} cannot be read: {error}; download it again") from None
                detail = f"cannot be read: {error}" if path.exists() else "missing"
                self.problems.append(Problem("file", file_name, f"{detail} ({len(names)} tensors); download it again"))
                self.lost |= names
                continue
            self.problems += [Problem("twice", name, f"also in {file_name}") for name in tensors.keys() & self._tensors]
            self._tensors |= tensors
            self.paths.append(path)
        self.lost -= self._tensors.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        return self._tensors[name].dtype

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors as views of the mapped files: they cost no memory of the process, and cannot be written."""
        return read_mapped(self._tensors, names)


def read_mapped(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Some of the tensors, as views of their mapped files."""
    for name in names:
        dtype, shape, file, begin = tensors[name]
        yield name, np.frombuffer(file, DTYPES[dtype], math.prod(shape), begin).reshape(shape)


def open_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one file. SafetensorError unless the header is right and as long as the file."""
    with safe_open(path, "numpy"):
        pass
    with open(path, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
        file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    header.pop("__metadata__", None)
    return {
        name: Tensor(
            FILE_DTYPES.get(entry["dtype"]) or entry["dtype"],
            tuple(entry["shape"]),
            file,
            8 + length + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }


def has_safetensors(directory: Path) -> bool:
    """Whether weights lie there in this format."""
    return (directory / SINGLE).exists() or (directory / INDEX).exists()


def _files_of(directory: Path) -> dict[str, set[str]]:
    """File name -> the tensors that the index puts there (none known for a single file)."""
    if (directory / SINGLE).exists():
        return {SINGLE: set()}
    if not (directory / INDEX).exists():
        suffixes = (".safetensors", ".bin", ".gguf", ".pt", ".npz")
        others = sorted(path.name for path in directory.iterdir() if path.suffix in suffixes)
        found = f"only {', '.join(others)}" if others else "no weights at all"
        raise ValueError(
            f"{directory} has neither {SINGLE} nor {INDEX}, {found}; save the model with transformers' save_pretrained"
        )
    files: dict[str, set[str]] = defaultdict(set)
    try:
        for name, file_name in json.loads((directory / INDEX).read_text())["weight_map"].items():
            if Path(file_name).name != file_name:
                raise ValueError(f"{file_name!r} is no plain file name")
            files[file_name].add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{directory / INDEX} is no index of safetensors files: {error}; download it again") from None
    return files


def report(directory: Path, problems: list[Problem]) -> str:
    """One line per kind of problem; tensors that differ only in the layer number share a line."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for kind, name, detail in problems:
        found = re.fullmatch(r"(.*?layers\.|)(\d*)(.*)", name, re.DOTALL)  # anything does
        before, number, after = found.groups() if found else ("", "", name)
        detail = detail.replace(f"layers.{number}.", "layers.N.") if number else detail
        groups[kind, before, after, detail].append(int(number or -1))
    lines = [
        f"{kind}: {before}{_ranges(numbers) if numbers[0] >= 0 else ''}{after}: {detail}"
        for (kind, before, after, detail), numbers in groups.items()
    ]
    count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
    return f"{directory}: the weights do not fit, {count}: " + "\n  ".join(lines)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "{0-2,5}", one number as itself."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return text if len(numbers) == 1 else "{" + text + "}"
