"""Opens a model by name: its Config, params on the device, tokenizer and sampling defaults."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from dgemma_jax.config import DTYPES, Config, check
from dgemma_jax.config_hf import RELEASE
from dgemma_jax.convert.destination import unfinished
from dgemma_jax.convert.orbax_files import tree_directory
from dgemma_jax.convert.parts import load_parts
from dgemma_jax.convert.weights import Weights, load, open_weights
from dgemma_jax.model.transformer import build
from dgemma_jax.sampling import Resolved, Sampling
from dgemma_jax.text.tokenizer import Tokenizer

BUNDLED = Path(__file__).parent / "assets"
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
HUB_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")


def open_checkpoint(
    name: str | Path, dtype: Any = None, tokenizer: Any = None
) -> tuple[Config, dict, Tokenizer | None, Resolved]:
    """Reads a model from a directory, "tiny" (bundled) or a hub name in the local Hugging Face cache.

    dtype: of the weights, by name or as a numpy type; None is as stored, which Config.dtype then says.
    tokenizer: a Tokenizer, an object of transformers or the path of a tokenizer.json, instead of the directory's.
    Returns (config, params, tokenizer, defaults); tokenizer is None where the directory has none.
    Raises ValueError, with one line on what is wrong and what to do.
    """
    return read_checkpoint(open_directory(name), dtype, tokenizer)


def read_checkpoint(
    opened: Opened, dtype: Any = None, tokenizer: Any = None, mesh: Mesh | None = None
) -> tuple[Config, dict, Tokenizer | None, Resolved]:
    """`open_checkpoint` of a directory that is open already: reads the weights, on a mesh each device its part."""
    dtype = dtype_name(dtype)
    text = _tokenizer(opened.directory, tokenizer)
    defaults = _defaults(opened, text)
    if mesh is None:
        params, stored = load(opened.weights, opened.abstract, dtype, place=jax.device_put)
    else:
        params, stored = load_parts(opened.weights, opened.abstract, dtype, build(opened.config, mesh=mesh)[1])
    return replace(opened.config, dtype=stored), params, text, defaults


class Opened(NamedTuple):
    """A model directory before its weights are read.

    fields: the parsed config.json. abstract: the nested dict of shapes that params must match.
    """

    directory: Path
    fields: dict
    config: Config
    abstract: dict
    weights: Weights


def open_directory(name: str | Path, verify: bool = False) -> Opened:
    """Opens a model by name and reads only what is small. verify: see `open_weights`. Raises ValueError."""
    directory = resolve(name)
    fields, config = read_config(directory / "config.json")
    _, abstract = build(config)
    return Opened(directory, fields, config, abstract, open_weights(directory, config, verify))


def read_config(path: Path) -> tuple[dict, Config]:
    """A config.json, parsed and as a Config, with the budget of images that lies beside it. ValueError or OSError."""
    fields = _read_json(path)
    return fields, _with_budget(Config.from_hf(fields), path.parent)


def _with_budget(config: Config, directory: Path) -> Config:
    """The config with the soft tokens per image of the processor's file, if there is one; ValueError if it cuts images
    into other patches than the model reads.
    """
    path = next((path for name in PROCESSORS if (path := directory / name).is_file()), None)
    if config.vision is None or path is None:
        return config
    fields = _read_json(path)
    fields = fields.get("image_processor", fields) if isinstance(fields, dict) else None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no settings of an image processor; expected a JSON object")
    for name in ("patch_size", "pooling_kernel_size"):
        ours = getattr(config.vision, name)
        if (theirs := fields.get(name, ours)) != ours:
            raise ValueError(f"{path}: {name} is {theirs!r:.60}, vision_config has {ours}; they must be the same")
    budget = fields.get("max_soft_tokens", config.vision.max_soft_tokens)
    return replace(config, vision=replace(config.vision, max_soft_tokens=budget))


def resolve(name: str | Path) -> Path:
    """The model directory that `name` means. Uses no network."""
    if not isinstance(name, str | Path):
        raise ValueError(f"model is {name!r:.60}; expected a directory, 'tiny' or a hub name")
    if str(name) == "tiny":
        return _model_directory(BUNDLED / "tiny")
    path = Path(os.path.expanduser(name))  # as it stands where there is no such user
    if path.suffix == ".gguf":
        raise ValueError(f"{path}: GGUF files cannot be read; use a safetensors checkpoint, for instance {RELEASE}")
    if path.is_file():
        raise ValueError(f"{path} is a file; expected the directory that holds config.json and the weights")
    if path.is_dir():
        return _model_directory(path)
    match = HUB_NAME.fullmatch(str(name))
    if match is None:
        raise ValueError(f"there is no model directory {str(path)!r}; expected a directory, 'tiny' or a hub name")
    return _model_directory(_snapshot(match["repo"], match["revision"] or "main"))


def _model_directory(path: Path) -> Path:
    if (journal := unfinished(path)) is not None:
        source, count = journal["source"]["directory"], len(journal["items"])
        raise ValueError(
            f"{path} is an unfinished conversion, {count} items are written; run `dgemma convert {source} {path}` "
            "with the same options again"
        )
    if not (path / "config.json").is_file():
        ggufs = ", ".join(sorted(file.name for file in path.glob("*.gguf")))
        found = f" (only {ggufs}, and GGUF files cannot be read)" if ggufs else ""
        if tree_directory(path) is not None:
            raise ValueError(
                f"{path} is an Orbax tree without config.json; put the config.json, generation_config.json and "
                f"tokenizer.json of {RELEASE} beside it"
            )
        raise ValueError(f"{path} has no config.json{found}; a model directory holds config.json and safetensors files")
    return path


def _hub_cache() -> Path:
    """Where Hugging Face tools keep downloaded repositories."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.path.expanduser(os.environ[variable]))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.path.expanduser(os.environ.get("HF_HOME") or cache)) / "hub"


def _snapshot(repo: str, revision: str) -> Path:
    """The downloaded files of a hub repository at a branch, tag or commit."""
    cache = _hub_cache()
    folder = cache / f"models--{repo.replace('/', '--')}"
    ref = folder / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        command = f"hf download {repo}" + ("" if revision == "main" else f" --revision {revision}")
        raise ValueError(
            f"{repo}@{revision} is neither a directory nor in the cache {cache}; run `{command}`, "
            "point HF_HOME to the cache that has it, or give the model's directory"
        )
    return snapshot


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def dtype_name(dtype: Any) -> str | None:
    """A dtype of weights by its name in config.json, None for None. Raises ValueError for others."""
    if dtype is None:
        return None
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = dtype
    check(name in DTYPES, "dtype", name, "one of " + ", ".join(DTYPES))
    return name


def text_of(opened: Opened) -> tuple[Tokenizer | None, Resolved]:
    """The tokenizer of a directory, None without one, and the sampling defaults."""
    tokenizer = _tokenizer(opened.directory, None)
    return tokenizer, _defaults(opened, tokenizer)


def _tokenizer(directory: Path, given: Any) -> Tokenizer | None:
    if isinstance(given, Tokenizer):
        return given
    if isinstance(given, str | Path):
        return Tokenizer.from_file(given)
    if given is not None:
        known = hasattr(getattr(given, "backend_tokenizer", given), "get_added_tokens_decoder")
        check(known, "tokenizer", given, "the path of a tokenizer.json, or a tokenizer of tokenizers or transformers")
        return Tokenizer(given)
    path = directory / "tokenizer.json"
    return Tokenizer.from_file(path) if path.is_file() else None


def _defaults(opened: Opened, tokenizer: Tokenizer | None) -> Resolved:
    """generation_config.json over the built-ins; stop ids from config.json if it names none.

    Ids beyond the model's vocabulary can never be produced and are left out; the placeholder of images never is, also
    where no tokenizer names it.
    """
    config, path = opened.config, opened.directory / "generation_config.json"
    stops = [part.get("eos_token_id") for part in (opened.fields, opened.fields["text_config"])]
    result = Sampling.from_generation_config(
        _read_json(path) if path.is_file() else None,
        eos_token_id=next((ids for ids in stops if ids is not None), None),
        special_ids=tokenizer.special_ids if tokenizer else None,
    )
    kept = {
        name: [id for id in getattr(result, name) if id < config.vocab_size] for name in ("stop_token_ids", "suppress")
    }
    if config.vision is not None and config.image_token_id is not None:
        kept["suppress"] = sorted({*kept["suppress"], config.image_token_id})
    return replace(result, **kept)
