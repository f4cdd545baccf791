"""The directory that a conversion writes: whether it may, what of an interrupted run it keeps, and how it is finished.

While the journal lies there the directory is unfinished, whatever else it holds. It says what is converted and, item by
item, what is already written; it is replaced whole after each item and goes once the last file is in place.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dgemma_jax.config_hf import QUANTIZATION_FIELDS
from dgemma_jax.convert.orbax_files import MANIFEST, WEIGHTS
from dgemma_jax.convert.safetensors_files import INDEX

JOURNAL = "dgemma-unfinished.json"
CONFIG = "config.json"
CARRIED = (  # what makes a model directory complete, besides its weights
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "README.md",
    "LICENSE",
)
DTYPE_FIELDS = {"dtype", "torch_dtype"}
Items = dict[str, dict[str, Any]]


class Destination:
    """An output directory, locked for this process until `release`.

    job: what is converted: to, dtype, quantize, source. items: what the journal says is written, with each tensor's
    record.
    """

    def __init__(self, path: Path, source: Path, job: Mapping[str, Any], overwrite: bool) -> None:
        """Makes or opens the directory. ValueError if it may not be written to, OSError if it cannot."""
        self.path, self.job = path.resolve(), dict(job)
        _check_apart(self.path, source.resolve())
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{path} is a file; expected a directory that is new or empty")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path)
        try:
            self.items = self._resumed(overwrite)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets other processes convert into the directory."""
        os.close(self._lock)

    def _resumed(self, overwrite: bool) -> Items:
        """The items of an interrupted run of the same job; with overwrite anything else is cleared first."""
        journal = unfinished(self.path)
        same = journal is not None and all(journal.get(name) == value for name, value in self.job.items())
        if same and journal is not None and journal["items"]:
            return journal["items"]
        first = temporary(self.path / JOURNAL)  # all there is if the very first write was interrupted
        if not same and any(path != first for path in self.path.iterdir()):
            self._check_replaceable(journal, overwrite)
        self.record({})
        self._clear()
        return {}

    def _check_replaceable(self, journal: Mapping[str, Any] | None, overwrite: bool) -> None:
        if journal is not None and not overwrite:
            former, current = _words(journal), _words(self.job)
            changed = ", whose files have changed since" if former == current else "; run that one again"
            raise ValueError(
                f"{self.path} holds an unfinished conversion of {former}{changed}, or add --overwrite to start afresh"
            )
        if not overwrite:
            raise ValueError(f"{self.path} exists and is not empty; choose another directory, or add --overwrite")
        if journal is None and not any((self.path / name).is_file() for name in (CONFIG, MANIFEST)):
            raise ValueError(f"{self.path} holds no model, and nothing else is overwritten; choose another directory")

    def _clear(self) -> None:
        """Removes what conversions write and models consist of; what makes a model look finished goes first."""
        for path in (self.path / MANIFEST, self.path / INDEX, *self.path.glob("*.safetensors")):
            path.unlink(missing_ok=True)
        for name in CARRIED:
            (self.path / name).unlink(missing_ok=True)
        if (self.path / WEIGHTS).exists():
            shutil.rmtree(self.path / WEIGHTS)

    def record(self, items: Items) -> None:
        """Writes the journal, in one line: it grows with each item, and indenting takes json five times as long."""
        write_json(self.path / JOURNAL, self.job | {"items": items}, indent=None)

    def check_room(self, wanted: int) -> None:
        """OSError unless `wanted` bytes are free."""
        free = shutil.disk_usage(self.path).free
        if free < wanted:
            raise OSError(
                f"{self.path} needs {wanted / 1e6:,.1f} MB more, {free / 1e6:,.1f} MB are free; make room there"
            )

    def carry(self, source: Path, dtype: str | None, quantize: str | None) -> None:
        """Copies the files that belong to the model; config.json gets the weights' new dtype and bits, if any."""
        for name in CARRIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, self.path / name)
        if dtype is not None:
            fields = with_dtype(json.loads((source / CONFIG).read_text(encoding="utf-8")), dtype)
            if quantize is not None:
                fields["quantization_config"] = QUANTIZATION_FIELDS[quantize]
            write_json(self.path / CONFIG, fields)

    def finish(self, marker: str, content: Mapping[str, Any]) -> None:
        """Puts the file in place that makes the directory a model, then drops the journal."""
        write_json(self.path / marker, content)
        (self.path / JOURNAL).unlink()


def unfinished(directory: Path) -> dict[str, Any] | None:
    """The journal of an interrupted conversion into `directory`, None if there is none."""
    path = directory / JOURNAL
    if not path.is_file():
        return None
    try:
        journal = json.loads(path.read_text(encoding="utf-8"))
        journal["items"].items()
        _words(journal)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no journal of a conversion ({error!r}); remove {directory} and convert again"
        ) from None
    return journal


def with_dtype(fields: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A config.json that says `dtype` wherever it says one, and at the top."""
    changed = {
        name: with_dtype(value, dtype) if isinstance(value, Mapping) and DTYPE_FIELDS & value.keys() else value
        for name, value in fields.items()
    }
    changed.pop("torch_dtype", None)
    return changed | {"dtype": dtype}


def temporary(path: Path) -> Path:
    """Where a file lies until it is whole."""
    return path.with_name(path.name + ".tmp")


def write_json(path: Path, content: Mapping[str, Any], indent: int | None = 1) -> None:
    """Writes `content` beside `path` and renames it, so that the file is whole or absent, also after a power cut."""
    with open(temporary(path), "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=indent) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary(path).replace(path)


def file_sizes(paths: Iterable[Path]) -> dict[str, list[int]]:
    """Bytes and time of change (ns) of files by name: what tells whether a source is still the same."""
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}


def _check_apart(path: Path, source: Path) -> None:
    if path == source:
        raise ValueError(f"{path} is the source itself; choose another directory")
    for inner, outer in ((path, source), (source, path)):
        if outer in inner.parents:
            raise ValueError(f"{inner} lies inside {outer}; source and target must be apart: choose another directory")


def _words(job: Mapping[str, Any]) -> str:
    """A job for a message."""
    bits = f", quantised to {job['quantize']}" if job.get("quantize") else ""
    return f"{job['source']['directory']} to {job['to']} in {job['dtype'] or 'its own dtype'}{bits}"


def _lock(directory: Path) -> int:
    """A locked descriptor of the directory. File systems without locks go without."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"{directory} is being written by another conversion; wait for it") from None
    except OSError:
        pass
    return descriptor
