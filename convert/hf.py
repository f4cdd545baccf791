"""Weights of a Hugging Face DiffusionGemma directory, through one table: tensor name -> (path in params, layout).

Source of the names: transformers' DiffusionGemmaForBlockDiffusion as it saves them; the release holds 1,047 tensors.
The encoder's text stack is the decoder's except for its layer scalars, and the vocabulary head is the embedding table:
copies of those, which some files carry, are compared and dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dgemma_jax.config import Config
from dgemma_jax.convert.safetensors_files import Problem, TensorFiles, report

ParamPath = tuple[str | int, ...]

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}
FILE_DTYPES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}


class WeightsError(ValueError):
    """The files and the config do not fit. The message holds one line per finding, `problems` every single one."""

    def __init__(self, directory: Path, problems: list[Problem]) -> None:
        super().__init__(report(directory, problems))
        self.problems = problems


class Layout(NamedTuple):
    """How a parameter lies in the file: axes merged, merged + 1 as one axis, then the last two axes swapped."""

    merged: int | None = None
    swapped: bool = False

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The file's shape of a parameter of `shape`."""
        merged = self._merged(shape)
        return (*merged[:-2], merged[-1], merged[-2]) if self.swapped else merged

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """The parameter as it lies in the file."""
        array = array.reshape(self._merged(array.shape))
        return array.swapaxes(-1, -2) if self.swapped else array

    def from_file(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The inverse of to_file for a parameter of `shape`; a view of the file's array."""
        return (array.swapaxes(-1, -2) if self.swapped else array).reshape(shape)

    def _merged(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.merged is None:
            return shape
        at = self.merged
        return (*shape[:at], math.prod(shape[at : at + 2]), *shape[at + 2 :])


SAME = Layout()
SCALAR = Layout(merged=0)  # [] <-> [1]: the product of no axes
MATRIX = Layout(swapped=True)  # [..., in, out] <-> [..., out, in]
HEADS_OUT = Layout(merged=1, swapped=True)  # [D, N, H] <-> [N*H, D]
HEADS_IN = Layout(merged=0, swapped=True)  # [N, H, D] <-> [D, N*H]


class Entry(NamedTuple):
    path: ParamPath
    layout: Layout


def table(config: Config) -> dict[str, Entry]:
    """Every tensor of the file by name, in the order of the model."""
    return dict(_text(config)) | (dict(_vision(config)) if config.vision else {})


LAYER_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm_1",
    "pre_experts_norm": "pre_feedforward_layernorm_2",
    "post_experts_norm": "post_feedforward_layernorm_2",
    "post_feedforward_norm": "post_feedforward_layernorm",
}
VISION_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
ATTENTION = {"q": HEADS_OUT, "k": HEADS_OUT, "v": HEADS_OUT, "o": HEADS_IN}
MLP = {"gate": MATRIX, "up": MATRIX, "down": MATRIX}
CLIP_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def _text(config: Config) -> Iterator[tuple[str, Entry]]:
    root = "model.decoder."
    yield root + "embed_tokens.weight", Entry(("embedder", "table"), SAME)
    yield root + "norm.weight", Entry(("final_norm", "scale"), SAME)
    yield root + "self_conditioning.pre_norm.weight", Entry(("self_conditioning", "pre_norm", "scale"), SAME)
    for name, layout in MLP.items():
        yield f"{root}self_conditioning.{name}_proj.weight", Entry(("self_conditioning", "mlp", name), layout)
    for index, layer in enumerate(config.layers):
        for name, entry in _text_layer(has_values=layer.kind == "sliding"):
            yield f"{root}layers.{index}.{name}", Entry(("layers", index, *entry.path), entry.layout)
        scalar = f"model.encoder.language_model.layers.{index}.layer_scalar"
        yield scalar, Entry(("layers", index, "encoder_scalar"), SCALAR)


def _text_layer(has_values: bool) -> Iterator[tuple[str, Entry]]:
    """One layer, names and paths relative to it."""
    for ours, name in LAYER_NORMS.items():
        yield f"{name}.weight", Entry((ours, "scale"), SAME)
    for name, layout in ATTENTION.items():
        if name != "v" or has_values:
            yield f"self_attn.{name}_proj.weight", Entry(("attention", name), layout)
    for name in ("q_norm", "k_norm"):
        yield f"self_attn.{name}.weight", Entry(("attention", name, "scale"), SAME)
    for name, layout in MLP.items():
        yield f"mlp.{name}_proj.weight", Entry(("mlp", name), layout)
    yield "router.proj.weight", Entry(("router", "proj"), MATRIX)
    yield "router.scale", Entry(("router", "scale"), SAME)
    yield "router.per_expert_scale", Entry(("router", "per_expert_scale"), SAME)
    yield "experts.gate_up_proj", Entry(("experts", "gate_up"), MATRIX)
    yield "experts.down_proj", Entry(("experts", "down"), MATRIX)
    yield "layer_scalar", Entry(("decoder_scalar",), SCALAR)


def _vision(config: Config) -> Iterator[tuple[str, Entry]]:
    vision, root = config.vision, "model.encoder.vision_tower."
    yield root + "patch_embedder.input_proj.weight", Entry(("vision", "patch_embedder", "input_proj"), MATRIX)
    position = root + "patch_embedder.position_embedding_table"
    yield position, Entry(("vision", "patch_embedder", "position_table"), SAME)
    for index in range(vision.num_hidden_layers):
        for name, entry in _vision_layer(vision.use_clipped_linears):
            yield f"{root}encoder.layers.{index}.{name}", Entry(("vision", "layers", index, *entry.path), entry.layout)
    for name in ("std_bias", "std_scale") if vision.standardize else ():
        yield root + name, Entry(("vision", name), SAME)
    yield "model.encoder.embed_vision.embedding_projection.weight", Entry(("vision", "projection"), MATRIX)


def _vision_layer(clipped: bool) -> Iterator[tuple[str, Entry]]:
    for ours, name in VISION_NORMS.items():
        yield f"{name}.weight", Entry((ours, "scale"), SAME)
    for name in ("q_norm", "k_norm"):
        yield f"self_attn.{name}.weight", Entry(("attention", name, "scale"), SAME)
    for ours, theirs, layouts in (("attention", "self_attn", ATTENTION), ("mlp", "mlp", MLP)):
        for name, layout in layouts.items():
            yield f"{theirs}.{name}_proj.linear.weight", Entry((ours, name), layout)
            for bound in CLIP_BOUNDS if clipped else ():
                yield f"{theirs}.{name}_proj.{bound}", Entry((ours, f"{name}_clip", bound), SAME)


def original_of(name: str) -> str | None:
    """The tensor that `name` repeats in files with copies of tied weights, None if it can be no copy."""
    if name == "lm_head.weight":
        return "model.decoder.embed_tokens.weight"
    encoder = "model.encoder.language_model."
    return "model.decoder." + name.removeprefix(encoder) if name.startswith(encoder) else None


def to_hf(params: Mapping, config: Config) -> dict[str, np.ndarray]:
    """Name -> array as the file holds it, dtypes kept: the inverse of `load`."""
    return {name: entry.layout.to_file(np.asarray(leaf(params, entry.path))) for name, entry in table(config).items()}


def load(
    directory: Path,
    config: Config,
    abstract: Mapping,
    dtype: str | None = None,
    place: Callable[[np.ndarray], Any] = np.array,
) -> tuple[dict, str]:
    """Reads params from `directory`, one tensor at a time.

    abstract: the nested dict of shapes that params must match. dtype: of the result; None is that of the stored
    embedding table. place: what becomes of each array, for instance a copy to a device.
    Returns (params, dtype). Raises WeightsError with everything that is wrong.
    """
    files = TensorFiles(Path(directory))
    entries = table(config)
    dtype = dtype or FILE_DTYPES.get(files.dtype("model.decoder.embed_tokens.weight"), config.dtype)
    problems = list(files.problems)
    params: dict = {}
    for name, entry in entries.items():
        if name in files.lost:
            continue
        shape = leaf(abstract, entry.path).shape
        problem = _header_problem(files, name, entry.layout.file_shape(shape))
        if problem is None:
            array = _cast(files.read(name), dtype)
            problem = _value_problem(name, array)
            if not problems and problem is None:  # nothing is placed once the load has failed
                _insert(params, entry.path, place(entry.layout.from_file(array, shape)))
        if problem is not None:
            problems.append(problem)
    problems += _extra_problems(files, entries)
    if problems:
        raise WeightsError(Path(directory), problems)
    return params, dtype


def _header_problem(files: TensorFiles, name: str, shape: tuple[int, ...]) -> Problem | None:
    if name not in files:
        return Problem("missing", name, f"expected {list(shape)}")
    if files.shape(name) != shape:
        return Problem("wrong shape", name, f"{list(files.shape(name))}, the config asks for {list(shape)}")
    if files.dtype(name) not in FILE_DTYPES:
        return Problem("wrong dtype", name, f"{files.dtype(name)}, expected one of {', '.join(FILE_DTYPES)}")
    return None


def _cast(array: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):  # what does not fit float16 is found by the check of values
        return array.astype(DTYPES[dtype], copy=False)


def _value_problem(name: str, array: np.ndarray) -> Problem | None:
    """Infinite clip bounds mean no bound; nothing else may be infinite, and nothing NaN."""
    if all_finite(array):
        return None
    bound = name.rsplit(".", 1)[-1] in CLIP_BOUNDS
    bad = np.isnan(array) if bound else ~np.isfinite(array)
    if not bad.any():
        return None
    first = [int(axis) for axis in np.argwhere(bad)[0]]
    return Problem(
        "not finite", name, f"{int(bad.sum())} of {array.size} values as {array.dtype}, the first at {first}"
    )


def all_finite(array: np.ndarray) -> bool:
    """No infinity and no NaN, by their exponent bits: several times faster than np.isfinite on bfloat16."""
    infinity = np.array(np.inf, array.dtype).view(f"u{array.itemsize}")
    return bool(((array.view(infinity.dtype) & infinity) < infinity).all())


def _extra_problems(files: TensorFiles, entries: Mapping[str, Entry]) -> Iterator[Problem]:
    for name in files:
        original = original_of(name)
        if name in entries:
            continue
        if original not in entries:
            yield Problem("unexpected", name, f"{list(files.shape(name))}, the config has no such weight")
        elif original in files and not np.array_equal(files.read(name), files.read(original)):
            yield Problem("disagrees", name, f"expected a copy of {original}")


def leaf(tree: Mapping, path: ParamPath) -> Any:
    """What lies at `path` of a nested dict."""
    for key in path:
        tree = tree[key]
    return tree


def _insert(tree: dict, path: ParamPath, value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
