"""Our side of the comparison: the functional layer of one loaded model, jitted, at the highest matmul precision.

The passes work on all rows of a batch at once, right-padded to one fixed width, so that a session compiles few
programs.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dgemma_jax as dg
from dgemma_jax.functional import image_features

CAPACITY = 160
# Compiling takes most of the time here; unoptimised code computes the same, and `generate` is tested as it is.
QUICK = {"xla_backend_optimization_level": 0}


def rel(ours, reference) -> float:
    """max|a - b| / max|b|; infinite where ours is not finite."""
    ours, reference = np.asarray(ours, np.float64), np.asarray(reference, np.float64)
    assert ours.shape == reference.shape, (ours.shape, reference.shape)
    if not np.isfinite(ours).all():
        return np.inf
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


def right_pad(rows: list[list[int]], width: int, fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(tokens i32[B, width], lengths i32[B])."""
    tokens = np.full((len(rows), width), fill, np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)


def dirty(cache):
    """The same empty cache in buffers full of NaN."""
    spoil = lambda buffers: tuple(jnp.full_like(buffer, jnp.nan) for buffer in buffers)  # noqa: E731
    return replace(cache, k=spoil(cache.k), v=spoil(cache.v))


class Ours:
    """The functional layer over one graph; ``params`` can be replaced per call."""

    def __init__(self, graph, params: dict, config, compiled: bool = True):
        """Not compiled: operation by operation, so that patched functions act at once."""
        self.graph, self.params, self.config = graph, params, config

        def bind(function):
            bound = lambda params, *args: function(graph, params, *args)  # noqa: E731
            return jax.jit(bound, compiler_options=QUICK) if compiled else bound

        self._encode, self._logits = bind(dg.encode), bind(dg.denoise_logits)
        self._soft, self._denoise = bind(dg.soft_embedding), bind(dg.denoise)
        self._features = bind(image_features)

    @classmethod
    def load(cls, directory: Path) -> "Ours":
        model = dg.load(directory)
        ours = cls(model.graph, model.params, model.config)
        ours.model = model
        return ours

    def empty(self, batch: int, capacity: int = CAPACITY):
        return dg.init_cache(self.config, batch, capacity)

    def encode(self, tokens, lengths, cache, images=None):
        with jax.default_matmul_precision("highest"):
            tokens, lengths = jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
            return self._encode(self.params, tokens, lengths, cache, images)

    def prompt(self, rows: list[list[int]], width: int, cache=None, images=None):
        """(cache, hidden) of prompts of any lengths."""
        return self.encode(*right_pad(rows, width), self.empty(len(rows)) if cache is None else cache, images)

    def chunks(self, rows: list[list[int]], size: int, cache=None):
        """(cache, hidden of all chunks [B, T, D]) of the same prompts, read ``size`` tokens at a time."""
        tokens, lengths = right_pad(rows, -(-max(map(len, rows)) // size) * size)
        cache, states = self.empty(len(rows)) if cache is None else cache, []
        for start in range(0, tokens.shape[1], size):
            count = np.clip(lengths - start, 0, size)
            cache, hidden = self.encode(tokens[:, start : start + size], count, cache)
            states.append(hidden)
        return cache, jnp.concatenate(states, axis=1)

    def features(self, images):
        with jax.default_matmul_precision("highest"):
            return self._features(self.params, images)

    def logits(self, canvas, cache, soft=None):
        with jax.default_matmul_precision("highest"):
            return self._logits(self.params, jnp.asarray(canvas, jnp.int32), cache, soft)

    def soft(self, logits):
        with jax.default_matmul_precision("highest"):
            return self._soft(self.params, jnp.asarray(logits))

    def denoise(self, canvas, cache, soft, temperature, keys):
        with jax.default_matmul_precision("highest"):
            return self._denoise(self.params, jnp.asarray(canvas, jnp.int32), cache, soft, temperature, keys)

    def unroll(self, cache, layer: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [S, K, H] of a row in order of position; the last W - 1 positions of a sliding layer."""
        length = int(cache.lengths[row])
        sliding = self.config.layers[layer].kind == "sliding"
        first = max(0, length - self.config.sliding_window + 1) if sliding else 0
        slots = np.arange(first, length) % cache.k[layer].shape[1]
        return np.asarray(cache.k[layer][row])[slots], np.asarray(cache.v[layer][row])[slots]
