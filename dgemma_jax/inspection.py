"""What a model directory holds, as plain data: from its headers and small files, without reading the weights."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dgemma_jax.checkpoint import Opened, text_of
from dgemma_jax.config import Config
from dgemma_jax.convert.table import STORED, ParamPath, leaf, name_of
from dgemma_jax.convert.weights import WeightsError

TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")  # the last two by a field


def describe(opened: Opened) -> dict[str, Any]:
    """Everything `dgemma inspect` tells of an opened model, ready for JSON.

    parts: parameters and bytes as stored of each part of the model. tensors: the parameters one by one, with the tensor
    that holds each. active_parameters: those of the text model that one token uses. WeightsError if files, tensors and
    config do not fit.
    """
    weights, config = opened.weights, opened.config
    if problems := weights.problems(opened.abstract):
        raise WeightsError(opened.directory, problems)
    tensors = [_tensor(opened, name, entry.path) for name, entry in weights.rows]
    tokenizer, defaults = text_of(opened)
    names = {id: token for token, id in tokenizer.special_ids.items()} if tokenizer else {}
    return {
        "directory": str(opened.directory),
        "kind": weights.kind,
        "note": weights.note or None,
        "dtype": weights.dtype,
        "dtypes": dict(Counter(tensor["dtype"] for tensor in tensors)),
        "parameters": sum(tensor["parameters"] for tensor in tensors),
        "active_parameters": _active(tensors, config),
        "bytes": sum(tensor["bytes"] for tensor in tensors),
        "parts": _parts(tensors),
        "config": asdict(config),
        "stop_ids": [{"id": id, "token": names.get(id)} for id in defaults.stop_token_ids],
        "tokenizer": tokenizer is not None,
        "template": _template(opened.directory),
        "tensors": tensors,
    }


def _tensor(opened: Opened, name: str, path: ParamPath) -> dict[str, Any]:
    """One parameter and where it is stored."""
    dtype, shape = opened.weights.files.dtype(name), leaf(opened.abstract, path).shape
    count = int(np.prod(shape, dtype=np.int64))
    return {
        "parameter": name_of(path),
        "part": part_of(path),
        "tensor": name,
        "dtype": dtype,
        "shape": list(shape),
        "parameters": count * (0 if path[-1] == "scales" else 2 if dtype == "uint8" else 1),  # two to a byte
        "bytes": count * np.dtype(STORED[dtype]).itemsize,
    }


def part_of(path: ParamPath) -> str:
    """The part of the model that a parameter is counted with."""
    outside = {"embedder": "embedding", "self_conditioning": "self-conditioning", "vision": "vision"}
    inside = {"attention": "attention", "mlp": "dense MLP", "experts": "experts", "router": "router"}
    part = inside.get(str(path[2])) if path[0] == "layers" else outside.get(str(path[0]))
    return part or "norms and scalars"


def _parts(tensors: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    parts: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        part = parts.setdefault(tensor["part"], {"parameters": 0, "bytes": 0})
        for unit in part:
            part[unit] += tensor[unit]
    return dict(sorted(parts.items(), key=lambda part: -part[1]["bytes"]))


def _active(tensors: list[dict[str, Any]], config: Config) -> int:
    """Parameters of the text model with top_k_experts of its experts."""
    text = sum(tensor["parameters"] for tensor in tensors if tensor["part"] not in ("experts", "vision"))
    experts = sum(tensor["parameters"] for tensor in tensors if tensor["part"] == "experts")
    return text + experts * config.top_k_experts // config.num_experts


def _template(directory: Path) -> dict[str, Any] | None:
    """The chat template that the directory brings along, None if it has none."""
    for name in TEMPLATES:
        path = directory / name
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        template = text if path.suffix == ".jinja" else json.loads(text).get("chat_template")
        if template:
            text = template if isinstance(template, str) else json.dumps(template)
            sha256 = hashlib.sha256(text.encode()).hexdigest()
            return {"file": name, "characters": len(text), "sha256": sha256}
    return None
