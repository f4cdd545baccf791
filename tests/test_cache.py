"""The cache against a plain list of everything that was written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma_jax.cache import grow, init_cache, write
from tests.random_models import SMALL


@settings(max_examples=25, deadline=None)
@given(
    slots=st.sampled_from([1, 5, 8]),
    chunks=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=4),
)
def test_a_ring_holds_the_last_positions_of_every_row(slots, chunks):
    buffer, lengths, written = np.full((2, slots, 1, 1), -1.0, np.float32), np.zeros(2, np.int32), [[], []]
    for counts in chunks:
        new = np.random.default_rng(0).normal(size=(2, 12, 1, 1)).astype(np.float32) + sum(map(len, written))
        buffer = np.asarray(write(jnp.asarray(buffer), new, lengths, np.array(counts, np.int32), ring=True))
        for row, count in enumerate(counts):
            written[row] += new[row, :count, 0, 0].tolist()
        lengths = lengths + np.array(counts, np.int32)
    for row, values in enumerate(written):
        for position in range(max(0, len(values) - slots), len(values)):
            assert buffer[row, position % slots, 0, 0] == np.float32(values[position])


def test_a_full_buffer_drops_what_lies_beyond_it():
    buffer = write(jnp.zeros((1, 4, 1, 1)), jnp.ones((1, 3, 1, 1)), jnp.array([2]), jnp.array([3]), ring=False)
    assert buffer.ravel().tolist() == [0, 0, 1, 1]


def test_growing_keeps_the_contents_and_the_rings():
    cache = init_cache(SMALL, 2, 16)
    cache = jax.tree.map(lambda x: x + 1, cache)
    larger = grow(SMALL, cache, 64)
    assert [k.shape[1] for k in larger.k] == [8, 64]
    assert larger.capacity == 64
    assert np.array_equal(larger.k[0], cache.k[0])
    assert np.array_equal(larger.v[1][:, :16], cache.v[1])
    assert np.array_equal(larger.lengths, cache.lengths)


@pytest.mark.parametrize(("batch", "capacity"), [(0, 8), (1, 0), (1, -5)])
def test_an_empty_cache_is_refused(batch, capacity):
    with pytest.raises(ValueError, match=str(min(batch, capacity))):
        init_cache(SMALL, batch, capacity)


def test_a_cache_does_not_shrink_nor_change_its_rings():
    with pytest.raises(ValueError, match="16"):
        grow(SMALL, init_cache(SMALL, 1, 32), 16)
    with pytest.raises(ValueError, match="4"):
        grow(SMALL, init_cache(SMALL, 1, 4), 16)
