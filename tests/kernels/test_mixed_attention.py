"""One suite for every implementation of mixed-causal attention, against a loop over queries and positions."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma_jax.kernels.mixed_attention import IMPLEMENTATIONS, mixed_attention, pallas, xla
from dgemma_jax.kernels.mixed_attention.launch import Tile, launch_for, merge, splits_for, tile_for
from dgemma_jax.kernels.mixed_attention.ranges import key_ranges
from dgemma_jax.kernels.mixed_attention.reference import same_block, visible
from tests.kernels.attention_cases import case, errors

T, H, W = 6, 16, 8
BF16 = jnp.bfloat16
UNDER_TEST = {
    "reference": IMPLEMENTATIONS["reference"],
    "xla": IMPLEMENTATIONS["xla"],
    # Several blocks, of which the last is not full.
    "xla in blocks": partial(xla.mixed_attention, canvas=3, block=3),
    "pallas": IMPLEMENTATIONS["pallas"],
    # Several tiles of queries, several blocks of keys, of which the last is short, and a prefix shared by 3 programs.
    "pallas in tiles": partial(pallas.mixed_attention, tile=Tile(16, 16, 4, 1), splits=3),
}
every_implementation = pytest.mark.parametrize("implementation", UNDER_TEST)
# Unoptimised: nearly all of the time goes into compiling, not into these few numbers.
compiled = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
STATIC = ("window", "clip_blocks")
RUN = {name: compiled(function, static_argnames=STATIC) for name, function in UNDER_TEST.items()}


def run(implementation, inputs, window, clip_blocks=False):
    return RUN[implementation](*jax.tree.map(jnp.asarray, inputs), window=window, clip_blocks=clip_blocks)


def check(implementation, inputs, expected, window, tolerance, clip_blocks=False):
    out, log_sums = run(implementation, inputs, window, clip_blocks)
    assert out.dtype == inputs[0].dtype
    assert log_sums.dtype == jnp.float32
    worst = errors((out, log_sums), inputs, expected)
    assert worst[0] <= tolerance, f"output is off by {worst[0]}"
    assert worst[1] <= 1e-4, f"log-sum-exp is off by {worst[1]}"  # scores are summed in fp32 whatever the inputs


@every_implementation
@pytest.mark.parametrize("window", [None, W])
@pytest.mark.parametrize("slots", [W, 5 * W])
def test_every_length_around_the_window(implementation, window, slots):
    lengths = [0, 1, W - 2, W - 1, W, W + 1, W + 2, 3 * W]
    if window is None and slots == W:
        lengths = [n for n in lengths if n <= slots]  # a full buffer never wraps
    for causal in (False, True):
        inputs, expected = case(0, lengths, [T] * len(lengths), [causal] * len(lengths), window, slots)
        check(implementation, inputs, expected, window, 1e-5)


@every_implementation
@pytest.mark.parametrize("window", [None, W])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_rows_commit_denoise_and_pad_in_one_pass(implementation, window, dtype):
    rows = [T, T, 2, 1, 0, 0], [True, False, True, True, True, False]
    inputs, expected = case(1, [11, 11, 0, 3, 0, 20], *rows, window, 32, dtype=dtype)
    # In bf16 the rounding of weights and output to 8 bits, and no more: the softmax is in fp32.
    check(implementation, inputs, expected, window, 2e-2 if dtype == BF16 else 1e-5)


@every_implementation
def test_passes_longer_than_the_window(implementation):
    inputs, expected = case(2, [0, 5, 20], [19, 19, 7], [True] * 3, W, W, tokens=19)
    check(implementation, inputs, expected, W, 1e-5)


@every_implementation
def test_a_row_that_sees_nothing_gives_zeros(implementation):
    inputs, _ = case(4, [0], [0], [True], W, W)
    out, log_sums = run(implementation, inputs, W)
    assert np.array_equal(out, np.zeros_like(out))
    assert np.isneginf(log_sums).all()


@every_implementation
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("heads, window, slots", [((4, 2, 256), 24, 40), ((8, 1, 512), None, 100)])
def test_wide_heads_commit_denoise_and_pad_over_several_tiles(implementation, dtype, heads, window, slots):
    """The widths of 26B, its groups of 2 and 8 heads; passes longer than the window and than a tile."""
    lengths = [57, 57, 0, 23, 0, 40] if window else [57, 100, 0, 23, 0, 64]
    rows = [33, 33, 33, 5, 0, 17], [True, False, False, True, True, True]
    inputs, expected = case(5, lengths, *rows, window, slots, tokens=33, heads=heads, dtype=dtype)
    exact = 1e-4 if heads[2] == 512 else 2e-5
    check(implementation, inputs, expected, window, 3e-2 if dtype == BF16 else exact)


@every_implementation
@pytest.mark.parametrize("causal", [False, True])
def test_rings_wrap_at_every_border_of_a_block(implementation, causal):
    lengths = [0, 1, 15, 16, 17, 23, 24, 25, 31, 32, 39, 40, 41, 55, 56, 57, 71, 79, 80, 81, 200]
    rows = [20] * len(lengths), [causal] * len(lengths)
    inputs, expected = case(6, lengths, *rows, 24, 40, tokens=20, heads=(2, 1, H))
    check(implementation, inputs, expected, 24, 1e-5)


@every_implementation
def test_heads_and_groups_that_are_no_power_of_two(implementation):
    inputs, expected = case(7, [3, 30], [9, 9], [True, False], None, 30, tokens=9, heads=(6, 2, 24))
    check(implementation, inputs, expected, None, 1e-5)


@every_implementation
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("heads, window, slots", [((4, 4, 128), 100, 128), ((8, 2, 128), None, 256)])
def test_the_grid_of_vllms_mixed_causal_test(implementation, dtype, heads, window, slots):
    """Its sequences (1, 128), (5, 64), (1, 256) of own and all keys, its flags and heads; and with a window."""
    for causal in ([True, False, True], [False, True, False], [True, True, False]):
        shape = {"tokens": 5, "heads": heads, "dtype": dtype}
        inputs, expected = case(42, [127, 59, 255], [1, 5, 1], causal, window, slots, **shape)
        check(implementation, inputs, expected, window, 1e-2 if dtype == BF16 else 1e-5)


# Text before and after, two images side by side, one at each end, one longer than the window, and a row that denoises,
# where ids mean nothing; the last row's image ends in its padding.
IMAGES = [
    [0, 0, 1, 1, 1, 2, 2, 0, 0, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3],
    [5, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 7],
    [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 0],
    [0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 0, 0],
    [0, 0, 0, 0, 0, 9, 9, 9, 9, 9, 9, 9, 9, 9, 0, 0, 0, 0, 0],
]


@every_implementation
@pytest.mark.parametrize(("window", "clip"), [(None, False), (W, False), (W, True)])
def test_the_tokens_of_an_image_see_each_other(implementation, window, clip):
    rows = [19, 19, 19, 19, 12], [True, True, True, False, True]
    shape = {"tokens": 19, "blocks": IMAGES, "clip_blocks": clip}
    inputs, expected = case(9, [0, 5, 20, 20, 3], *rows, window, 24, **shape)
    check(implementation, inputs, expected, window, 1e-5, clip)


@every_implementation
def test_two_parts_are_merged_by_their_log_sums(implementation):
    """Attention over the prefix alone and over the own keys alone, put together, is attention over both."""
    inputs, (out, log_sums) = case(10, [11, 0, 20], [T, T, 0], [True, False, False], W, 32)
    nothing = np.zeros(3, np.int32)
    old = run(implementation, (*inputs[:6], nothing, *inputs[7:]), W)
    own = run(implementation, (*inputs[:5], nothing, *inputs[6:]), W)
    got = merge(*(jnp.stack(pair) for pair in zip(old, own, strict=True)))
    assert errors(got, inputs, (out, log_sums)).max() <= 1e-5


@pytest.mark.parametrize("implementation", ["pallas", "pallas in tiles"])
def test_pallas_bfloat16_with_several_blocks_of_a_long_prefix(implementation):
    """16 heads share one K/V head: a tile of 16 queries is a single token."""
    shape = {"dtype": BF16, "tokens": 9, "heads": (16, 1, 64)}
    inputs, expected = case(8, [500, 512, 0], [9, 9, 9], [True, False, True], None, 512, **shape)
    check(implementation, inputs, expected, None, 3e-2)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_an_image_over_the_tiles_that_a_gpu_uses(dtype):
    """An image of two tiles and more, which a window of a quarter tile would cut."""
    ids = np.zeros((2, 64), np.int32)
    ids[:, 7:50] = 1
    shape = {"dtype": dtype, "tokens": 64, "heads": (8, 2, 128), "blocks": ids}
    inputs, expected = case(11, [30, 90], [64, 45], [True, True], 16, 40, **shape)
    check("pallas", inputs, expected, 16, 3e-2 if dtype == BF16 else 1e-5)


def test_a_long_prefix_is_split_only_where_few_programs_run():
    assert splits_for(programs=128, slots=262144) == 1
    assert splits_for(programs=200, slots=262144) == 1
    assert splits_for(programs=32, slots=262144) == 4
    assert splits_for(programs=1, slots=8192) == 4
    assert splits_for(programs=1, slots=100) == 1
    assert launch_for(B=1, T=256, N=16, K=2, H=512, S=262144, itemsize=2).grid == (64, 2, 1)
    assert launch_for(B=1, T=256, N=8, K=1, H=512, S=262144, itemsize=2).grid == (64, 1, 2)  # half the heads of 26B


@pytest.mark.parametrize("tokens", [16, 300])
@pytest.mark.parametrize("capacities", [(40, 128, 700), (300, 384, 700)])
def test_room_for_more_changes_no_bit(tokens, capacities):
    """Requests grow the cache for their own ends; XLA multiplies the same blocks whatever the capacity."""
    rows = [capacities[0], capacities[0] - 7, 7], [tokens, 2, 0], [False, True, False]
    inputs, _ = case(8, *rows, None, capacities[-1], tokens=tokens, heads=(8, 2, 64))
    q, k, v, prefix_k, prefix_v, *rows = inputs
    optimised = jax.jit(xla.mixed_attention, static_argnames=STATIC)
    found = [optimised(q, k, v, prefix_k[:, :S], prefix_v[:, :S], *rows, window=None) for S in capacities]
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], other)


def test_heads_wider_than_the_tiles_are_refused():
    with pytest.raises(ValueError, match="up to 512 wide, not 1024"):
        tile_for(1024, itemsize=2)


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


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            *(st.integers(0, 40), st.integers(0, T), st.booleans()), st.lists(st.integers(0, 2), min_size=T, max_size=T)
        ),
        min_size=3,
        max_size=3,
    ),
    slots=st.sampled_from([W, 40]),
    window=st.sampled_from([None, 1, 3, W]),
    clip=st.booleans(),
)
def test_ranges_are_the_mask(rows, slots, window, clip):
    length, own, causal, ids = map(jnp.array, zip(*rows, strict=True))
    length = length if window else jnp.minimum(length, slots)
    cached, fresh = visible(length, own, causal, slots, T, window)
    key = jnp.arange(T)
    inside = key > key[:, None] - window if window and clip else key >= 0
    fresh |= same_block(ids) & (key < own[:, None])[:, None] & causal[:, None, None] & inside
    ranges = key_ranges(length, own, causal, ids, slots=slots, tokens=T, window=window, clip_blocks=clip)
    age = ((length[:, None] - 1 - jnp.arange(slots)) % slots)[:, None]
    assert np.array_equal(cached, age < ranges.cached[..., None])
    assert np.array_equal(fresh, (key >= ranges.first[..., None]) & (key < ranges.last[..., None]))


@pytest.mark.parity
@pytest.mark.parametrize("window", [None, 3])
def test_images_are_masked_as_in_transformers(window):
    torch = pytest.importorskip("torch", reason="the parity tests need torch; pip install '.[test]'")
    from transformers import masking_utils
    from transformers.models.diffusion_gemma.modeling_diffusion_gemma import get_block_sequence_ids_for_mask

    types = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0], [1, 1, 0, 2, 0, 0, 0, 1, 1, 1, 1]])
    rows, tokens = types.shape
    images = get_block_sequence_ids_for_mask(types, device="cpu")
    plain = masking_utils.sliding_window_causal_mask_function(window) if window else masking_utils.causal_mask_function
    mask = masking_utils.or_masks(plain, masking_utils.blockwise_overlay(images))
    index = (torch.arange(rows)[:, None, None], None, torch.arange(tokens)[:, None], torch.arange(tokens)[None, :])
    expected = mask(*index).broadcast_to(rows, tokens, tokens).numpy()
    ones = jnp.ones(rows, jnp.int32)
    _, own = visible(0 * ones, tokens * ones, ones == 1, W, tokens, window)
    assert np.array_equal(own | same_block(jnp.array(images.numpy() + 1)), expected)


def test_the_log_sums_come_only_when_asked_for():
    inputs, (out, log_sums) = case(4, [3], [T], [True], W, W)
    arrays = tuple(map(jnp.asarray, inputs[:8]))
    alone = mixed_attention(*arrays, window=W)
    both = mixed_attention(*arrays, window=W, blocks=jnp.zeros((1, T), jnp.int32), return_lse=True)
    assert errors((alone, log_sums), inputs, (out, log_sums)).max() <= 1e-5
    assert errors(both, inputs, (out, log_sums)).max() <= 1e-5


def test_an_unknown_implementation_is_refused():
    inputs, _ = case(4, [1], [T], [True], W, W)
    with pytest.raises(ValueError, match="'flash_attn' is unknown; choose from auto, reference, xla, pallas, triton"):
        mixed_attention(*map(jnp.asarray, inputs[:8]), window=W, implementation="flash_attn")


@pytest.mark.parametrize("package", ["triton", "jax_triton"])
def test_triton_without_its_packages_says_what_to_install(monkeypatch, package):
    monkeypatch.delitem(sys.modules, "dgemma_jax.kernels.mixed_attention.triton", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    inputs, _ = case(4, [1], [T], [True], W, W)
    with pytest.raises(ValueError, match=r"needs jax-triton .*; pip install 'dgemma-jax\[triton,cuda13\]'") as error:
        mixed_attention(*map(jnp.asarray, inputs[:8]), window=W, implementation="triton")
    assert "\n" not in str(error.value)
