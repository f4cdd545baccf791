"""One random model on both sides, and what the reference says about a fixed set of prompts and canvases."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from .checkpoints import Shape
from .oracle import Oracle, left_pad
from .ours import Ours

WIDTH = 64  # every prompt batch is right-padded to this
TEMPERATURE = 0.7
COMMITS = 3


def prompt_lengths(window: int) -> list[int]:
    """1, around the window, and several windows; at most WIDTH."""
    return [1, *range(window - 2, window + 3), 2 * window, 3 * window + 1, 5 * window + 3]


@dataclass
class Answers:
    """The reference on one batch of rows: [B, ...] arrays of each denoising pass."""

    plain: np.ndarray
    conditioned: np.ndarray


@dataclass
class Pair:
    """``ours`` and ``oracle`` loaded from the same checkpoint; prompts, canvases and commits are [row][token]."""

    shape: Shape
    oracle: Oracle
    ours: Ours
    directory: Path
    saved: Path

    @classmethod
    def make(cls, shape: Shape, written: Path, ours: Ours) -> "Pair":
        """``ours`` reads the spelling of the release; with a vision tower, what transformers saves is read instead."""
        oracle = Oracle(written)
        saved = oracle.save(written.with_name(f"{shape.name}_saved"))
        return cls(shape, oracle, Ours.load(saved) if shape.vision else ours, written, saved)

    @cached_property
    def prompts(self) -> list[list[int]]:
        rng = np.random.default_rng(1)
        return [rng.integers(3, self.shape.vocab, n).tolist() for n in prompt_lengths(self.shape.window)]

    @cached_property
    def canvases(self) -> np.ndarray:
        """[1 + COMMITS, B, C]: noise to denoise behind the prompt and behind each commit."""
        size = (1 + COMMITS, len(self.prompts), self.shape.canvas)
        return np.random.default_rng(2).integers(0, self.shape.vocab, size)

    @cached_property
    def commits(self) -> np.ndarray:
        """[COMMITS, B, C]: finished canvases."""
        size = (COMMITS, len(self.prompts), self.shape.canvas)
        return np.random.default_rng(3).integers(0, self.shape.vocab, size)

    def answers(self, canvas: np.ndarray, prefix) -> Answers:
        plain = self.oracle.logits(canvas, prefix)
        return Answers(plain, self.oracle.logits(canvas, prefix, plain / np.float32(TEMPERATURE)))

    @cached_property
    def single(self) -> list[dict]:
        """Each prompt alone, without any padding: hidden [T, D], keys and values per layer, answers [C, V]."""
        rows = []
        for index, row in enumerate(self.prompts):
            hidden, prefix = self.oracle.encode(np.array([row]))
            layers = [[x[0] for x in prefix.layer(i)] for i in range(len(self.shape.layers))]
            answers = self.answers(self.canvases[0, index : index + 1], prefix)
            rows.append({"hidden": hidden[0], "layers": layers, "answers": answers})
        return rows

    @cached_property
    def ragged(self) -> dict:
        """All prompts as one left-padded batch, then COMMITS canvases: hidden states and answers at each depth."""
        ids, mask = left_pad(self.prompts)
        hidden, prefix = self.oracle.encode(ids, mask)
        out = {"hidden": hidden, "mask": mask, "answers": [self.answers(self.canvases[0], prefix)], "committed": []}
        for depth, commit in enumerate(self.commits):
            hidden, prefix = self.oracle.encode(commit, prefix=prefix)
            out["committed"].append(hidden)
            out["answers"].append(self.answers(self.canvases[depth + 1], prefix))
        return out

    @cached_property
    def deep(self) -> dict:
        """The longest prompt alone, COMMITS canvases deep: keys and values per layer after each commit."""
        _, prefix = self.oracle.encode(np.array([self.prompts[-1]]))
        layers = []
        for commit in self.commits:
            _, prefix = self.oracle.encode(commit[-1:], prefix=prefix)
            layers.append([[x[0].copy() for x in prefix.layer(i)] for i in range(len(self.shape.layers))])
        return {"layers": layers}
