"""The training loop: a loss, a source of batches and an optimizer, from any step on.

What a step does depends on the state, the seed and the number of the step alone, so a resumed run repeats the
uninterrupted one exactly.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Metrics = Any  # a NamedTuple of the loss
Loss = Callable[..., tuple[Any, Metrics]]


class State(NamedTuple):
    """Everything a run needs to go on. step: i32[], the number of steps done."""

    params: Any
    optimizer: Any
    step: jax.Array


Update = Callable[[State, Any, bool], tuple[State, Metrics]]


def start(params: dict, optimizer: optax.GradientTransformation) -> State:
    return State(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def make_update(loss: Loss, optimizer: optax.GradientTransformation, seed: int) -> Update:
    """One step as a jitted function: update(state, batch, self_condition) -> (state, metrics); the state is donated.

    loss(params, batch, key, self_condition) -> (scalar, metrics). self_condition is static: two programs instead of a
    branch inside one, because on CPU lax.cond around the draft pass costs more than the pass.
    """

    def update(state: State, batch: Any, self_condition: bool) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), state.step)
        gradient, metrics = jax.grad(loss, has_aux=True)(state.params, batch, key, self_condition)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), optimizer_state, state.step + 1), metrics

    return jax.jit(update, static_argnums=2, donate_argnums=0)


def train(state: State, steps: int, update: Update, batches: Callable[[int], Any]) -> Iterator[tuple[State, Metrics]]:
    """Goes on from `state` to `steps` steps in all; yields the state and the metrics after each.

    Every second step trains with self-conditioning. A yielded state is gone once the next one is asked for.
    """
    for step in range(int(state.step), steps):
        state, metrics = update(state, batches(step), bool(step % 2))
        yield state, metrics
