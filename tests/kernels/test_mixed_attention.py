"""One suite for every implementation of mixed-causal attention, against a loop over queries and positions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma_jax.kernels.mixed_attention import IMPLEMENTATIONS, mixed_attention, pallas, xla
from dgemma_jax.kernels.mixed_attention.reference import visible

T, N, K, H, W = 6, 4, 2, 16, 8
# Several blocks, of which the last overlaps the one before.
IMPLEMENTATIONS["xla in blocks"] = partial(xla.mixed_attention, block=3)
# Several tiles of queries, several blocks of keys, of which the last is short, and a prefix shared by three programs.
IMPLEMENTATIONS["pallas in tiles"] = partial(pallas.mixed_attention, tile=pallas.Tile(16, 16, 4, 1), splits=3)
# Unoptimised: nearly all of the time goes into compiling, not into these few numbers.
run = jax.jit(
    mixed_attention,
    static_argnames=("window", "implementation"),
    compiler_options={"xla_backend_optimization_level": 0},
)


def by_hand(q, k, v, past_k, past_v, own_length, causal, window):
    """One row, float64: past_k and past_v hold every earlier position, nothing is a ring."""
    length, (tokens, heads, width) = len(past_k), q.shape
    out = np.zeros((tokens, heads, width))
    for t in range(tokens):
        seen = []
        first = 0 if window is None else max(0, length + (t if causal else 0) - window + 1)
        seen += [(past_k[p], past_v[p]) for p in range(first, length)]
        for j in range(own_length):
            if not causal or (j <= t and (window is None or j > t - window)):
                seen.append((k[j], v[j]))
        for head in range(heads):
            pair = head // (heads // k.shape[1])
            scores = np.array([key[pair] @ q[t, head] for key, _ in seen])
            if len(scores):
                weights = np.exp(scores - scores.max())
                out[t, head] = weights @ np.array([value[pair] for _, value in seen]) / weights.sum()
    return out


def case(rng, lengths, own, causal, window, slots, dtype=np.float32, tokens=T, heads=(N, K, H)):
    """Inputs of the op and the answer by hand; slots that were never written hold NaN."""
    draw = lambda *shape: rng.normal(0, 0.5, shape).astype(dtype)  # noqa: E731
    N, K, H = heads
    q, k, v = draw(len(lengths), tokens, N, H), draw(len(lengths), tokens, K, H), draw(len(lengths), tokens, K, H)
    prefix_k, prefix_v = np.full((2, len(lengths), slots, K, H), np.nan, dtype)
    expected = []
    for b, length in enumerate(lengths):
        past_k, past_v = draw(length, K, H), draw(length, K, H)
        for p in range(length):
            prefix_k[b, p % slots], prefix_v[b, p % slots] = past_k[p], past_v[p]
        exact = (x.astype(np.float64) for x in (q[b], k[b], v[b], past_k, past_v))
        expected.append(by_hand(*exact, own[b], causal[b], window))
    rows = (np.array(lengths, np.int32), np.array(own, np.int32), np.array(causal))
    return (q, k, v, prefix_k, prefix_v, *rows), np.stack(expected)


def check(implementation, inputs, expected, window, tolerance):
    got = run(*map(jnp.asarray, inputs), window=window, implementation=implementation)
    own, causal = inputs[6], inputs[7]
    for b in range(len(expected)):
        counted = slice(0, own[b] if causal[b] else None)  # queries of padding mean nothing
        np.testing.assert_allclose(np.asarray(got, np.float64)[b, counted], expected[b, counted], atol=tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, W])
@pytest.mark.parametrize("slots", [W, 5 * W])
def test_every_length_around_the_window(implementation, window, slots):
    lengths = [0, 1, W - 2, W - 1, W, W + 1, W + 2, 3 * W]
    if window is None and slots == W:
        lengths = [n for n in lengths if n <= slots]  # a full buffer never wraps
    for causal in (False, True):
        rng = np.random.default_rng(0)
        inputs, expected = case(rng, lengths, [T] * len(lengths), [causal] * len(lengths), window, slots)
        check(implementation, inputs, expected, window, 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, W])
def test_rows_commit_denoise_and_pad_in_one_pass(implementation, window):
    inputs, expected = case(
        np.random.default_rng(1), [11, 11, 0, 3], [T, T, 2, 1], [True, False, True, True], window, 32
    )
    check(implementation, inputs, expected, window, 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_passes_longer_than_the_window(implementation):
    inputs, expected = case(np.random.default_rng(2), [0, 5, 20], [19, 19, 7], [True] * 3, W, W, tokens=19)
    check(implementation, inputs, expected, W, 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_keeps_a_float32_softmax(implementation):
    inputs, expected = case(
        np.random.default_rng(3), [0, 9, 30], [T, T, T], [False, True, False], W, W, dtype=jnp.bfloat16
    )
    check(implementation, inputs, expected, W, 2e-2)  # the rounding of weights and output to 8 bits


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_that_sees_nothing_gives_zeros(implementation):
    inputs, _ = case(np.random.default_rng(4), [0], [0], [True], W, W)
    got = run(*map(jnp.asarray, inputs), window=W, implementation=implementation)
    assert np.array_equal(got, np.zeros_like(got))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads, window, slots", [((4, 2, 256), 24, 40), ((8, 1, 512), None, 100)])
def test_wide_heads_commit_denoise_and_pad_over_several_tiles(implementation, heads, window, slots):
    """The widths of 26B, its groups of 2 and 8 heads; passes longer than the window and than a tile."""
    lengths = [57, 57, 0, 23, 0, 40] if window else [57, 100, 0, 23, 0, 64]
    rows = [33, 33, 33, 5, 0, 17], [True, False, False, True, True, True]
    inputs, expected = case(np.random.default_rng(5), lengths, *rows, window, slots, tokens=33, heads=heads)
    check(implementation, inputs, expected, window, 1e-4 if heads[2] == 512 else 2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_rings_wrap_at_every_border_of_a_block(implementation, causal):
    lengths = [0, 1, 15, 16, 17, 23, 24, 25, 31, 32, 39, 40, 41, 55, 56, 57, 71, 79, 80, 81, 200]
    rows = [20] * len(lengths), [causal] * len(lengths)
    inputs, expected = case(np.random.default_rng(6), lengths, *rows, 24, 40, tokens=20, heads=(2, 1, H))
    check(implementation, inputs, expected, 24, 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_heads_and_groups_that_are_no_power_of_two(implementation):
    rows = [9, 9], [True, False]
    inputs, expected = case(np.random.default_rng(7), [3, 30], *rows, None, 30, tokens=9, heads=(6, 2, 24))
    check(implementation, inputs, expected, None, 1e-5)


@pytest.mark.parametrize("implementation", ["pallas", "pallas in tiles"])
def test_pallas_bfloat16_with_several_blocks_of_a_long_prefix(implementation):
    """16 heads share one K/V head: a tile of 16 queries is a single token."""
    rows = [9, 9, 9], [True, False, True]
    shape = {"dtype": jnp.bfloat16, "tokens": 9, "heads": (16, 1, 64)}
    inputs, expected = case(np.random.default_rng(8), [500, 512, 0], *rows, None, 512, **shape)
    check(implementation, inputs, expected, None, 3e-2)


def test_pallas_splits_a_long_prefix_only_where_few_programs_run():
    assert pallas.splits_for(programs=128, slots=262144) == 1
    assert pallas.splits_for(programs=200, slots=262144) == 1
    assert pallas.splits_for(programs=32, slots=262144) == 4
    assert pallas.splits_for(programs=1, slots=8192) == 4
    assert pallas.splits_for(programs=1, slots=100) == 1


def test_pallas_refuses_heads_wider_than_its_tiles():
    with pytest.raises(ValueError, match="up to 512 wide, not 1024"):
        pallas.tile_for(1024, itemsize=2)


@settings(max_examples=20, deadline=None)
@given(length=st.integers(0, 40), own=st.integers(0, T), causal=st.booleans(), slots=st.sampled_from([W, 2 * W, 48]))
def test_the_mask_is_the_ring_read_in_order(length, own, causal, slots):
    cached, fresh = visible(jnp.array([length]), jnp.array([own]), jnp.array([causal]), slots, T, W)
    for t in range(T):
        first = length - W + 1 + (t if causal else 0)
        positions = {p for p in range(max(0, length - slots), length) if p >= first}
        assert {p % slots for p in positions} == set(np.flatnonzero(np.asarray(cached)[0, t]))
        keys = {j for j in range(own) if not causal or t - W < j <= t}
        assert keys == set(np.flatnonzero(np.asarray(fresh)[0, t]))


def test_an_unknown_implementation_is_refused():
    inputs, _ = case(np.random.default_rng(4), [1], [T], [True], W, W)
    with pytest.raises(ValueError, match="'flash_attn' is unknown; choose from auto, reference, xla, pallas"):
        mixed_attention(*map(jnp.asarray, inputs), window=W, implementation="flash_attn")
