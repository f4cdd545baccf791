"""Products with weights of 8 and 4 bits: every implementation against the numbers that the bits stand for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgemma_jax.diffusion.random import key_from_seed, proposal_uniforms
from dgemma_jax.kernels import grouped_matmul, matmul, vocab_head
from dgemma_jax.kernels.grouped_matmul import pallas
from dgemma_jax.kernels.quantized import Quantized, as_matrix, dequantized
from dgemma_jax.quantization import quantize
from tests.kernels.test_experts import by_hand

FORMATS = ("int8", "int4")
TILE = pallas.Tile(16, 16, 16, 4, 1)  # several of them, of which the last are not full
EXPERTS = {name: partial(grouped_matmul.experts, implementation=name) for name in grouped_matmul.IMPLEMENTATIONS} | {
    "pallas in tiles": lambda x, *rest: pallas.experts(x, *rest, tile=TILE).astype(x.dtype)
}
PRODUCTS = {name: partial(matmul.matmul, implementation=name) for name in matmul.IMPLEMENTATIONS} | {
    "xla in tiles": lambda x, matrix: matmul.xla.matmul(x, matrix, x.dtype, columns=48)
}
# Unoptimised: nearly all of the time goes into compiling, not into these few numbers.
compiled = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def quantized(weight: np.ndarray, path: tuple, fmt: str) -> Quantized:
    return Quantized(*map(jnp.asarray, quantize(weight, path, fmt).values()))


def numbers(weight: Quantized) -> np.ndarray:
    return np.asarray(dequantized(weight, jnp.float32))


def normal(*shape: int, seed: int = 0, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(dtype)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("path", "shape", "summed"),
    [
        (("layers", 0, "attention", "q"), (64, 3, 5), (0,)),
        (("layers", 0, "attention", "o"), (3, 32, 7), (0, 1)),
        (("layers", 0, "mlp", "down"), (96, 10), (0,)),
        (("layers", 0, "experts", "gate_up"), (5, 64, 6), (1,)),
        (("embedder", "table"), (9, 64), (1,)),
    ],
)
def test_the_numbers_by_hand(path, shape, summed, fmt):
    """Scale by scale, byte by byte; no number is farther from the weight than its step allows."""
    weight = normal(*shape)
    found = quantized(weight, path, fmt)
    got, values, scales = numbers(found), np.asarray(found.values), np.asarray(found.scales, np.float32)
    assert found.shape == got.shape == shape
    if fmt == "int8" or path[0] == "embedder":
        assert scales.shape == tuple(1 if axis in summed else n for axis, n in enumerate(shape))
        np.testing.assert_array_equal(got, values.astype(np.float32) * scales)
        assert (np.abs(got - weight) <= 0.5001 * scales).all()
        return
    axis = summed[-1]
    values, scales, got, weight = (np.moveaxis(a, axis, 0) for a in (values, scales, got, weight))
    assert values.dtype == np.uint8 and len(values) == len(got) // 2 and len(scales) == len(got) // 32
    for k in range(len(got)):
        byte = values[k // 32 * 16 + k % 16]
        half = byte >> 4 if k % 32 >= 16 else byte & 15
        np.testing.assert_array_equal(got[k], (half.astype(np.float32) - 8) * scales[k // 32])
    assert np.sqrt(np.mean((got - weight) ** 2)) < 0.09
    assert (np.abs(got - weight) <= 1.6 * np.abs(np.repeat(scales, 32, axis=0))).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_zero_and_tiny_weights_have_scales_that_are_not_zero(fmt):
    for size in (0.0, 1e-42, 1e-38):
        found = quantized(np.full((32, 2), size, np.float32), ("layers", 0, "mlp", "up"), fmt)
        assert (np.asarray(found.scales, np.float32) != 0).all()
        np.testing.assert_allclose(numbers(found), size, atol=1.2e-38)


def expert_case(rows: int, fmt: str, dtype=np.float32) -> tuple:
    E, D, width, A = 6, 64, 32, 2
    rng = np.random.default_rng(rows)
    gate_up = quantized(normal(E, D, 2 * width, seed=1), ("layers", 0, "experts", "gate_up"), fmt)
    down = quantized(normal(E, width, D, seed=2), ("layers", 0, "experts", "down"), fmt)
    ids = np.stack([rng.permutation(E)[:A] for _ in range(rows)]).astype(np.int32)
    return normal(rows, D, dtype=dtype), gate_up, down, rng.uniform(0.2, 1.5, (rows, A)).astype(np.float32), ids


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("implementation", EXPERTS)
def test_experts(implementation, fmt):
    for rows, dtype, tolerance in ((63, np.float32, 1e-5), (40, jnp.bfloat16, 2e-2)):
        x, gate_up, down, weights, ids = expert_case(rows, fmt, dtype)
        got = compiled(EXPERTS[implementation])(jnp.asarray(x), gate_up, down, jnp.asarray(weights), jnp.asarray(ids))
        expected = by_hand(x, numbers(gate_up), numbers(down), weights, ids)
        assert got.dtype == dtype
        assert np.abs(np.asarray(got, np.float64) - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("implementation", PRODUCTS)
def test_dense_products(implementation, fmt):
    """To heads and back: whole tiles, and a last one that is not full."""
    to_heads = as_matrix(quantized(normal(64, 4, 50), ("layers", 0, "attention", "q"), fmt), inputs=1)
    from_heads = as_matrix(quantized(normal(2, 32, 40), ("layers", 0, "attention", "o"), fmt), inputs=2)
    for matrix, dtype, tolerance in ((to_heads, np.float32, 1e-5), (from_heads, jnp.bfloat16, 2e-2)):
        x = normal(37, 64, dtype=dtype)
        got = compiled(PRODUCTS[implementation])(jnp.asarray(x), matrix)
        expected = x.astype(np.float64) @ numbers(matrix).astype(np.float64)
        assert got.dtype == dtype
        assert np.abs(np.asarray(got, np.float64) - expected).max() <= tolerance * np.abs(expected).max()


def test_an_unknown_implementation_of_a_dense_product_is_refused():
    matrix = quantized(normal(32, 4), ("layers", 0, "mlp", "up"), "int8")
    with pytest.raises(ValueError, match="'cublas' is unknown; choose from auto, reference, xla, pallas"):
        matmul.matmul(jnp.ones((1, 32)), matrix, implementation="cublas")


HEADS = vocab_head.IMPLEMENTATIONS | {"xla in chunks": partial(vocab_head.xla.vocab_head, chunk=vocab_head.TILE)}
HEAD = {"softcap": 30.0, "scale": 5.0}


@pytest.fixture(scope="module")
def head_case() -> tuple:
    """A quantised table, all arguments of the head, of which the second row asks for a cut, and what its numbers give,
    as an array, by the definition."""
    V, D, C = vocab_head.TILE + 300, 32, 6
    table, hidden = quantized(0.5 * normal(V, D), ("embedder", "table"), "int8"), jnp.asarray(normal(2, C, D, seed=1))
    uniforms = proposal_uniforms(jnp.stack([key_from_seed(seed) for seed in (0, 1)]), C, V)
    suppress = jnp.zeros((2, V), bool).at[:, 40].set(True)
    rows = (jnp.array([0.6, 0.8]), jnp.array([1.0, 0.7]), uniforms, suppress, jnp.array([0, 20]), jnp.array([1, 0.9]))
    head, array = compiled(partial(HEADS["reference"], **HEAD)), jnp.asarray(numbers(table))
    return hidden, table, rows, head(hidden, array, *rows), likeliest(hidden, array)


@compiled
def likeliest(hidden, table):
    return vocab_head.likeliest(hidden, table, 3, HEAD["softcap"], vocab_head.TILE)


@pytest.mark.parametrize("implementation", HEADS)
def test_the_head_of_a_quantised_table(implementation, head_case):
    hidden, table, rows, expected, _ = head_case
    got = compiled(partial(HEADS[implementation], **HEAD))(hidden, table, *rows)
    assert np.array_equal(got.argmax, expected.argmax)
    assert np.array_equal(got.sample, expected.sample)
    for name in ("entropy", "logprob", "soft"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), atol=1e-4)


def test_the_likeliest_ids_of_a_quantised_table(head_case):
    hidden, table, _, _, expected = head_case
    np.testing.assert_array_equal(likeliest(hidden, table).ids, expected.ids)
