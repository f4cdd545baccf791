"""Saving and resuming a training run: one file, replaced whole, so that an interruption never costs more than a write.

The file holds every array of the state and the settings of the run; nothing in it is executable.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

_SETTINGS = "settings"


def save(path: Path, state: Any, settings: dict) -> None:
    """Writes a pytree of arrays beside its settings under a temporary name, then renames it to `path`."""
    named = jax.tree.leaves_with_path(state)
    arrays: dict[str, Any] = {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in named}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        np.savez(file, **{_SETTINGS: np.array(json.dumps(settings))}, **arrays)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load(path: Path, like: Any, settings: dict) -> Any:
    """The state saved at `path`, in the structure of `like`.

    Raises ValueError if it was saved under other settings or has other arrays: such a run cannot be continued.
    """
    with np.load(path) as file:
        saved = json.loads(str(file[_SETTINGS]))
        if saved != settings:
            raise ValueError(f"{path} was written with {saved}; this run has {settings}. Remove it to start anew")
        leaves, treedef = jax.tree.flatten_with_path(like)
        names = [jax.tree_util.keystr(key) for key, _ in leaves]
        if {*names, _SETTINGS} != set(file.files):
            raise ValueError(f"{path} holds other arrays than this model and optimizer have. Remove it to start anew")
        return jax.tree.unflatten(treedef, [jax.numpy.asarray(file[name]) for name in names])
