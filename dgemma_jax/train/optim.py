"""The optimizer: Muon for the matrices inside the layers, Adam for everything else, one schedule for both."""

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

# Which axes of a weight are its inputs and which its outputs; axes in neither (the experts) are matrices side by side.
# Embedding table and router are left to Adam: their rows are looked up or compared, not multiplied through.
MATRICES = {
    "q": MuonDimensionNumbers(0, (1, 2)),
    "k": MuonDimensionNumbers(0, (1, 2)),
    "v": MuonDimensionNumbers(0, (1, 2)),
    "o": MuonDimensionNumbers((0, 1), 2),
    "gate": MuonDimensionNumbers(0, 1),
    "up": MuonDimensionNumbers(0, 1),
    "down": MuonDimensionNumbers(-2, -1),
    "gate_up": MuonDimensionNumbers(1, 2),
}


def matrix_axes(params: Any) -> Any:
    """The params tree with each leaf replaced by its Muon axes, or by None where Adam is used."""
    return jax.tree.map_with_path(lambda path, _: MATRICES.get(path[-1].key), params)


def schedule(steps: int, rate: float) -> optax.Schedule:
    """Warm-up over 2 % of the steps, constant until 30 %, then half a cosine down to 2 % of `rate`.

    The decay is where a model this small gains most, so it takes most of the steps.
    """
    warm_up, hold = max(1, steps // 50), int(0.3 * steps)
    return optax.join_schedules(
        [
            optax.linear_schedule(rate / warm_up, rate, warm_up),
            optax.constant_schedule(rate),
            optax.cosine_decay_schedule(rate, steps - hold, alpha=0.02),
        ],
        [warm_up, hold],
    )


def optimizer(steps: int, scale: float = 1.0) -> optax.GradientTransformation:
    """Gradients clipped to global norm 1; weight decay on the matrices only. scale: of both learning rates."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            schedule(steps, 0.015 * scale),
            weight_decay=0.01,
            adam_b1=0.9,
            adam_b2=0.98,
            adam_learning_rate=schedule(steps, 3e-3 * scale),
            muon_weight_dimension_numbers=matrix_axes,
        ),
    )
