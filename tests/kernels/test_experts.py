"""One suite for every implementation of the expert layer, against a loop over tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgemma_jax.kernels.grouped_matmul import IMPLEMENTATIONS, experts, pallas

E, D, WIDTH, A = 6, 20, 12, 2
# Several blocks per expert, several columns and terms at a time, of which the last are not full.
IMPLEMENTATIONS["pallas in tiles"] = partial(pallas.experts, tile=pallas.Tile(16, 16, 16, 4, 1))
# Unoptimised: nearly all of the time goes into compiling, not into these few numbers.
run = jax.jit(experts, static_argnames="implementation", compiler_options={"xla_backend_optimization_level": 0})


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def case(rows, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x, gate_up, down = (
        rng.normal(0, 1, shape).astype(dtype) for shape in ((rows, D), (E, D, 2 * WIDTH), (E, WIDTH, D))
    )
    ids = np.stack([rng.permutation(E)[:A] for _ in range(rows)]).astype(np.int32)
    weights = rng.uniform(0.2, 1.5, (rows, A)).astype(np.float32)
    return x, gate_up, down, weights, ids


def by_hand(x, gate_up, down, weights, ids):
    out, width = np.zeros(x.shape), down.shape[1]
    for row, (chosen, share) in enumerate(zip(ids, weights, strict=True)):
        for expert, weight in zip(chosen, share, strict=True):
            inner = x[row].astype(np.float64) @ gate_up[expert].astype(np.float64)
            out[row] += weight * (gelu(inner[:width]) * inner[width:]) @ down[expert].astype(np.float64)
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [1, 3, 9, 33, 63, 99, 256])
def test_any_number_of_tokens(implementation, rows):
    inputs = case(rows)
    got = run(*map(jnp.asarray, inputs), implementation=implementation)
    expected = by_hand(*inputs)
    assert np.abs(np.asarray(got) - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("implementation", ["reference", "xla"])  # 2,048 would keep the interpreter busy for long
def test_a_chunk_of_a_long_prompt(implementation):
    inputs = case(2048)
    got = run(*map(jnp.asarray, inputs), implementation=implementation)
    expected = by_hand(*inputs)
    assert np.abs(np.asarray(got) - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_token_may_choose_the_same_experts(implementation):
    x, gate_up, down, weights, ids = case(40)
    ids[:] = [4, 1]
    got = run(*map(jnp.asarray, (x, gate_up, down, weights, ids)), implementation=implementation)
    expected = by_hand(x, gate_up, down, weights, ids)
    assert np.abs(np.asarray(got) - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_is_rounded_once_after_the_sum(implementation):
    inputs = case(16, dtype=jnp.bfloat16)
    got = run(*map(jnp.asarray, inputs), implementation=implementation)
    expected = by_hand(*inputs)
    assert got.dtype == jnp.bfloat16
    assert np.abs(np.asarray(got, np.float64) - expected).max() <= 2e-2 * np.abs(expected).max()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_token_gets_the_same_bits_wherever_it_stands(implementation):
    x, gate_up, down, weights, ids = map(jnp.asarray, case(64))
    order = np.random.default_rng(9).permutation(64)
    straight = run(x, gate_up, down, weights, ids, implementation=implementation)
    mixed = run(x[order], gate_up, down, weights[order], ids[order], implementation=implementation)
    assert np.array_equal(np.asarray(straight)[order], mixed)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="'megablox' is unknown; choose from auto, reference, xla, pallas"):
        experts(*map(jnp.asarray, case(1)), implementation="megablox")
