"""DiffusionGemma in JAX: `import dgemma_jax as dg; dg.load("tiny").generate("...")`.

Names are imported when first used, so that importing the package stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dgemma_jax import viz
    from dgemma_jax.api import Model, load
    from dgemma_jax.cache import KVCache, init_cache
    from dgemma_jax.config import Config, gemma_26b_a4b, tiny
    from dgemma_jax.diffusion.policy import Knobs, Policy, accept
    from dgemma_jax.engine.engine import Engine
    from dgemma_jax.engine.handle import Handle
    from dgemma_jax.events import Canvas, ChatMessage, Completion, Draft, Failed, Finished, Timings, Usage
    from dgemma_jax.functional import denoise, denoise_logits, encode, soft_embedding
    from dgemma_jax.image_batch import ImageBatch
    from dgemma_jax.sampling import UNSET, Sampling
    from dgemma_jax.sharding import make_mesh
    from dgemma_jax.tools import ToolRun, run_tools

_HOME = {
    "UNSET": "sampling",
    "Canvas": "events",
    "ChatMessage": "events",
    "Completion": "events",
    "Config": "config",
    "Draft": "events",
    "Engine": "engine.engine",
    "Failed": "events",
    "Finished": "events",
    "Handle": "engine.handle",
    "ImageBatch": "image_batch",
    "KVCache": "cache",
    "Knobs": "diffusion.policy",
    "Model": "api",
    "Policy": "diffusion.policy",
    "Sampling": "sampling",
    "Timings": "events",
    "ToolRun": "tools",
    "Usage": "events",
    "accept": "diffusion.policy",
    "denoise": "functional",
    "denoise_logits": "functional",
    "encode": "functional",
    "gemma_26b_a4b": "config",
    "init_cache": "cache",
    "load": "api",
    "make_mesh": "sharding",
    "run_tools": "tools",
    "soft_embedding": "functional",
    "tiny": "config",
}

__version__ = "0.1.0"
__all__ = [*_HOME, "__version__", "viz"]


def __getattr__(name: str):
    if name == "viz":
        return import_module("dgemma_jax.viz")
    if name not in _HOME:
        raise AttributeError(f"module 'dgemma_jax' has no attribute {name!r}")
    value = getattr(import_module(f"dgemma_jax.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
