"""A whole conversion, item by item: read, cast, checked, written, recorded; what an interrupted run wrote is kept.

One item is written while the next is read, so that two of them are in memory at most, with Orbax's own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError

from dgemma_jax.config import QUANTIZATIONS, Config, check
from dgemma_jax.convert.destination import CARRIED, Destination, Items, file_sizes
from dgemma_jax.convert.orbax_files import first_line, is_converted, record
from dgemma_jax.convert.safetensors_files import Problem
from dgemma_jax.convert.table import STORED, ParamPath, Rows, by_item, leaf
from dgemma_jax.convert.targets import Arrays, OrbaxTarget, SafetensorsTarget, Target
from dgemma_jax.convert.weights import Weights, WeightsError
from dgemma_jax.quantization import is_part, quantized_spec
from dgemma_jax.quantization import quantize as quantized

TARGETS = {"orbax": OrbaxTarget, "hf": SafetensorsTarget}
CHOICES = ("bfloat16", "float32")
Progress = Callable[[int, int], None]  # bytes that are done, bytes in all


class Form(NamedTuple):
    """How tensors are written. abstract: the shapes of all params. dtype, quantize: see `convert`."""

    abstract: Mapping
    dtype: str | None
    quantize: str | None


class Summary(NamedTuple):
    """What a conversion did. kept: items of an interrupted run. damaged: those of them that were written again."""

    directory: Path
    items: int
    bytes: int
    kept: int
    damaged: list[str]


def convert(
    weights: Weights,
    path: Path,
    config: Config,
    abstract: Mapping,
    *,
    dtype: str | None = None,
    to: str = "orbax",
    quantize: str | None = None,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> Summary:
    """Writes the model of `weights` to the directory `path`, which is a model only when everything is in place.

    abstract: the nested dict of shapes that params must match. dtype: "bfloat16", "float32", or None for each tensor
    as stored. to: "orbax" or "hf". quantize: "int8" or "int4", see `dgemma_jax.quantization`; dtype is then that of the
    other weights and of the computation. overwrite: replace the model that lies at `path`. progress: called with bytes
    done and bytes in all.
    Raises ValueError (WeightsError with everything that does not fit) or OSError; the source is only read.
    """
    check(dtype in (None, *CHOICES), "dtype", dtype, "one of " + ", ".join(CHOICES))
    check(to in TARGETS, "to", to, "one of " + ", ".join(TARGETS))
    check(quantize in (None, *QUANTIZATIONS), "quantize", quantize, "one of " + ", ".join(QUANTIZATIONS))
    if config.quantization is not None:
        raise ValueError(
            f"{weights.directory} is quantised to {config.quantization}; convert the model it was made from"
        )
    if quantize is not None and to != "orbax":
        raise ValueError(f"quantize is {quantize!r} and to {to!r}; quantised weights are only written as Orbax items")
    if problems := weights.problems(abstract):
        raise WeightsError(weights.directory, problems)
    form, becomes = Form(abstract, dtype, quantize), replace(config, quantization=quantize)
    destination = Destination(path, weights.directory, _job(weights, to, form), overwrite)
    try:
        target = TARGETS[to](destination.path, becomes)
        sizes = {item: _bytes(weights, rows, form) for item, rows in by_item(weights.rows).items()}
        found = len(destination.items)
        damaged = _drop_damaged(destination.items, target)
        target.remove_others(destination.items)
        total = sum(sizes.values())
        destination.check_room(total - sum(sizes[item] for item in destination.items))
        _write_items(weights, destination, target, form, sizes, progress)
        destination.carry(weights.directory, dtype if quantize is None else dtype or weights.dtype, quantize)
        destination.finish(target.marker, target.summary(destination.items))
    finally:
        destination.release()
    return Summary(destination.path, len(sizes), total, found - len(damaged), damaged)


def verify(weights: Weights, abstract: Mapping, progress: Progress = lambda done, total: None) -> int:
    """Reads every tensor of a converted directory that was opened to be verified, and returns how many there are.

    weights, abstract, progress: see `convert`.
    ValueError naming each item whose values are not those that were written.
    """
    if not is_converted(weights.directory):
        raise ValueError(f"{weights.directory} has no checksums; only directories written by dgemma convert have")
    if problems := weights.problems(abstract):
        raise WeightsError(weights.directory, problems)
    damaged, done = [], 0
    items = by_item(weights.rows)
    sizes = {item: _bytes(weights, rows, Form(abstract, None, None)) for item, rows in items.items()}
    for item, rows in items.items():
        try:
            for _ in weights.files.read([name for name, _ in rows]):
                pass
        except ValueError as error:
            damaged.append(str(error))
        progress(done := done + sizes[item], sum(sizes.values()))
    if damaged:
        raise ValueError(f"{len(damaged)} of {len(items)} items are damaged: " + "\n  ".join(damaged))
    return len(weights.rows)


def _job(weights: Weights, to: str, form: Form) -> dict[str, Any]:
    """What tells one conversion from another: the source's files, the layout, the dtype and the bits."""
    carried = [path for name in CARRIED if (path := weights.directory / name).is_file()]
    source = {"directory": str(weights.directory.resolve()), "files": file_sizes([*weights.files.paths, *carried])}
    return {"to": to, "dtype": form.dtype, "quantize": form.quantize, "source": source}


def _bytes(weights: Weights, rows: Rows, form: Form) -> int:
    """Of an item as it will be written."""
    total = 0
    for name, entry in rows:
        weight = leaf(form.abstract, entry.path)
        spec = form.quantize and quantized_spec(entry.path, weight.shape, form.quantize)
        if spec:
            total += sum(part.size * part.dtype.itemsize for part in (spec.values, spec.scales))
        else:
            own = weights.files.dtype(name)
            dtype = own if form.dtype is None or is_part(entry.path) else form.dtype
            total += weight.size * np.dtype(STORED[dtype]).itemsize
    return total


def _drop_damaged(items: Items, target: Target) -> list[str]:
    """Reads back what the journal names and forgets the items that are not what was written."""
    damaged = [item for item, entry in items.items() if not _is_intact(item, entry["tensors"], target)]
    for item in damaged:
        del items[item]
    return damaged


def _is_intact(item: str, records: Mapping[str, Any], target: Target) -> bool:
    try:
        return all(record(array) == records[name] for name, array in target.read(item, records))
    except (ValueError, OSError, KeyError, SafetensorError):
        return False


def _write_items(
    weights: Weights,
    destination: Destination,
    target: Target,
    form: Form,
    sizes: Mapping[str, int],
    progress: Progress,
) -> None:
    """Reads the items that are missing and writes each while the next one is read; WeightsError once all are read."""

    def write(item: str, arrays: Arrays, records: dict[str, Any]) -> None:
        try:
            target.write(item, arrays)
        except Exception as error:  # Orbax and safetensors pass on whatever their libraries raise
            kept = "what is written is kept: run the same command again to go on"
            raise OSError(f"{item} cannot be written to {destination.path} ({first_line(error)}); {kept}") from error
        destination.items[item] = {"bytes": sizes[item], "tensors": records}
        destination.record(destination.items)
        progress(sum(sizes[item] for item in destination.items), sum(sizes.values()))

    problems: list[Problem] = []
    missing = {item: rows for item, rows in by_item(weights.rows).items() if item not in destination.items}
    progress(sum(sizes[item] for item in destination.items), sum(sizes.values()))
    with ThreadPoolExecutor(1) as writer:
        pending: Future | None = None
        for item, rows in missing.items():
            params, found = _read(weights, rows, form)
            problems += found
            if problems:  # nothing more is written, but the rest is read for what else is wrong
                continue
            arrays = target.stored(item, params)
            records = {name: record(array) for name, array in arrays.items()}
            if pending is not None:
                pending.result()
            pending = writer.submit(write, item, arrays, records)
            del arrays  # the writer's alone from here on, so that they go once they are written
        if pending is not None:
            pending.result()
    if problems:
        raise WeightsError(weights.directory, problems)


def _read(weights: Weights, rows: Rows, form: Form) -> tuple[dict[ParamPath, np.ndarray], list[Problem]]:
    """The parameters of one item as they will be written, and what is wrong with their values."""
    params: dict[ParamPath, np.ndarray] = {}
    problems: list[Problem] = []
    for path, array, problem in weights.read(rows, form.abstract, form.dtype):
        problems += [problem] if problem else []
        if form.quantize is None:
            params[path] = array
        elif not problems:  # there is nothing to choose a scale from
            params |= quantized(array, path, form.quantize)
    return params, problems
