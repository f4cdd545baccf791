"""Pictures of a canvas while it is denoised, for notebooks: `dg.viz`. Needs matplotlib (extra `viz`).

    drafts = dg.viz.drafts(model.stream(prompt, seed=1))
    dg.viz.canvas(drafts[0], model.tokenizer)

What is drawn are drafts: the Draft events of one canvas, in their order. Colours run from sure to unsure (entropy in
nats). ax: matplotlib's, to draw into; None makes a figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from dgemma_jax.events import Canvas, Draft, Finished

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

    from dgemma_jax.api import Model
    from dgemma_jax.diffusion.policy import Policy
    from dgemma_jax.sampling import Sampling
    from dgemma_jax.text import Tokenizer

SURE, UNSURE, ACCENT = "#bfe9df", "#ffc48a", "#0b6b5e"  # as on the server's canvas page
MOST_NATS = 2.0  # drawn as fully unsure
LONGEST = 8  # characters of a token in a cell
SIGNS = str.maketrans({"\n": "↵", " ": "·", "\t": "→"})


def drafts(events: Iterable[Draft | Canvas | Finished], canvas: int = 0) -> list[Draft]:
    """The drafts of one canvas, counted from 0, among the events of a stream. ValueError if it has fewer canvases."""
    found: list[list[Draft]] = [[]]
    for event in events:
        if isinstance(event, Draft):
            found[-1].append(event)
        elif isinstance(event, Canvas):
            found.append([])
    if not 0 <= canvas < len(found) - 1:
        raise ValueError(f"canvas is {canvas}; expected 0 .. {len(found) - 2}, the canvases of this stream")
    return found[canvas]


def canvas(draft: Draft, tokenizer: Tokenizer, columns: int = 16, ax: Axes | None = None) -> Axes:
    """One draft: a cell per position with its likeliest token, bold where the step kept its proposal.

    columns: cells in a row.
    """
    ax = _axes(ax, (0.62 * columns, 0.42 * _rows(draft, columns)))
    _Grid(draft, tokenizer, columns, ax)
    return ax


def film(drafts: Sequence[Draft], tokenizer: Tokenizer, columns: int = 16, interval: int = 700) -> FuncAnimation:
    """All drafts one after the other, each shown for `interval` milliseconds; columns: cells in a row.

    In a notebook show `IPython.display.HTML(film.to_jshtml())`; `film.save("canvas.gif")` writes a file.
    """
    _check_installed()
    from matplotlib.animation import FuncAnimation
    from matplotlib.figure import Figure

    size = (0.62 * columns, 0.42 * _rows(drafts[0], columns) + 0.4)
    figure = Figure(size, layout="constrained")  # unknown to pyplot, so that a notebook does not show it twice
    grid = _Grid(drafts[0], tokenizer, columns, figure.subplots())
    return FuncAnimation(figure, lambda i: grid.show(drafts[i]), frames=len(drafts), interval=interval)


def entropy(drafts: Sequence[Draft], tokenizer: Tokenizer | None = None, ax: Axes | None = None) -> Axes:
    """Entropy of every position in all drafts, a row per step; a dot where the step kept its proposal.

    tokenizer: writes the tokens of the last step under their positions.
    """
    C = len(drafts[-1].tokens)
    ax = _axes(ax, (0.3 * C + 1, 0.3 * len(drafts) + 1.2))
    image = ax.imshow([d.entropies for d in drafts], cmap=_colours(), vmin=0, vmax=MOST_NATS, aspect="auto")
    step, position = np.nonzero(np.array([draft.accepted for draft in drafts]))
    ax.plot(position, step, ".", color=ACCENT, markersize=3)
    ax.set(xlabel="position", ylabel="step", yticks=range(len(drafts)), yticklabels=[d.step for d in drafts])
    if tokenizer is not None:
        labels = [_label(tokenizer, token) for token in drafts[-1].tokens]
        ax.set_xticks(range(C), labels, rotation=90, fontsize=7, parse_math=False)
    ax.figure.colorbar(image, ax=ax, label="entropy (nats)", pad=0.01)
    return ax


def progress(drafts: Sequence[Draft], temperatures: Sequence[float] | None = None, ax: Axes | None = None) -> Axes:
    """Positions that each of the drafts kept, and on a second scale the temperature of the step, see `temperatures`."""
    ax = _axes(ax, (6, 2.5))
    steps = [draft.step for draft in drafts]
    ax.bar(steps, [sum(draft.accepted) for draft in drafts], color=SURE, edgecolor=ACCENT)
    ax.set(xlabel="step", ylabel="positions kept", xticks=steps, ylim=(0, len(drafts[0].tokens)))
    if temperatures is not None:
        right = ax.twinx()
        right.plot(steps, temperatures, color="#a3261b", marker="o", markersize=3)
        right.set_ylabel("temperature", color="#a3261b")
    return ax


def temperatures(model: Model, steps: int, sampling: Sampling | None = None, policy: Policy | None = None) -> list:
    """Temperature of each of the first `steps` steps under a sampling and a policy, the model's defaults if None."""
    from dgemma_jax.diffusion.policy import Knobs, Policy
    from dgemma_jax.sampling import Sampling

    resolved = (sampling or Sampling()).merged(model.defaults)
    found = (policy or Policy()).schedule(np.arange(steps, dtype=np.int32), Knobs.of([resolved] * steps))
    return np.asarray(found).tolist()


class _Grid:
    """Cells that are made once and shown anew for every step."""

    def __init__(self, draft: Draft, tokenizer: Tokenizer, columns: int, ax: Axes):
        self.tokenizer, self.columns, self.ax = tokenizer, columns, ax
        rows = _rows(draft, columns)
        self.image = ax.imshow(np.zeros((rows, columns)), cmap=_colours(), vmin=0, vmax=MOST_NATS, aspect="auto")
        ax.set(xticks=np.arange(0.5, columns), yticks=np.arange(0.5, rows), xticklabels=[], yticklabels=[])
        ax.grid(color="white", linewidth=2)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        where = {"ha": "center", "va": "center", "parse_math": False, "clip_on": True}
        self.cells = [ax.text(i % columns, i // columns, "", **where) for i in range(len(draft.tokens))]
        self.show(draft)

    def show(self, draft: Draft) -> None:
        rows = _rows(draft, self.columns)
        nats = np.full(rows * self.columns, np.nan)
        nats[: len(draft.entropies)] = draft.entropies
        self.image.set_data(nats.reshape(rows, self.columns))
        for cell, token, kept in zip(self.cells, draft.tokens, draft.accepted, strict=True):
            text = _label(self.tokenizer, token)
            cell.set(text=text, fontsize=9 if len(text) < 5 else 6, weight="bold" if kept else "normal")
            cell.set(style="normal" if kept else "italic", color="#1c2024" if kept else "#5a626b")
        mean, total = draft.entropy, len(draft.tokens)
        self.ax.set_title(
            f"step {draft.step}: {sum(draft.accepted)} of {total} kept, mean entropy {mean:.3f} nats", fontsize=9
        )


def _rows(draft: Draft, columns: int) -> int:
    return -(-len(draft.tokens) // columns)


def _label(tokenizer: Tokenizer, token: int) -> str:
    """A token as it fits a cell, blanks made visible."""
    text = tokenizer.decode([token]).translate(SIGNS)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _colours() -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("sure", [SURE, UNSURE])


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    if ax is not None:
        return ax
    _check_installed()
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")[1]


def _check_installed() -> None:
    if find_spec("matplotlib") is None:
        raise ImportError("dg.viz draws with matplotlib; pip install 'dgemma-jax[viz]'")
