"""One suite for every implementation of the vocabulary head, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgemma_jax.diffusion.random import key_from_seed, proposal_uniforms
from dgemma_jax.kernels.vocab_head import IMPLEMENTATIONS, TILE, likeliest, vocab_head, xla

V, D, CAP = TILE + 300, 24, 30.0
# One tile at a time: with V above a tile, chunks and a tail are merged.
IMPLEMENTATIONS["xla in chunks"] = partial(xla.vocab_head, chunk=TILE)
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
run = jax.jit(vocab_head, static_argnames=("softcap", "scale", "implementation"))


def head(logits, implementation, temperature=1.0, draw=1.0, suppress=None, seed=0, cap=CAP, table=None, **truncate):
    """The head on one row whose logits before the cap are given f64[C,V], by an identity table of width V."""
    logits = np.asarray(logits, np.float64)
    vocab = logits.shape[-1]
    keys = jnp.stack([key_from_seed(seed)])
    return run(
        jnp.asarray(logits[None], jnp.float32),
        jnp.eye(vocab, dtype=jnp.float32) if table is None else table,
        jnp.array([temperature], jnp.float32),
        jnp.array([draw], jnp.float32),
        proposal_uniforms(keys, logits.shape[0], vocab),
        suppress,
        softcap=cap,
        scale=2.0,
        implementation=implementation,
        **truncate,
    )


def exact(logits, temperature=1.0, cap=CAP):
    """p and entropy of softmax(cap(logits) / T) in float64."""
    z = cap * np.tanh(np.asarray(logits, np.float64) / cap) / temperature
    z -= z.max(-1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    return p, -np.sum(np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0), -1)


@each
@pytest.mark.parametrize("temperature", [0.8, 0.4, 0.1, 0.01])
@pytest.mark.parametrize("top", [25.0, 5.0, 0.0, -5.0])
def test_entropy_to_1e_4_of_float64(implementation, temperature, top):
    logits = np.random.default_rng(0).normal(top - 6, 1.5, (4, 500))
    logits[:, 7] = top
    got = head(logits, implementation, temperature)
    np.testing.assert_allclose(got.entropy[0], exact(logits.astype(np.float32), temperature)[1], atol=1e-4)


@each
def test_ties_go_to_the_lowest_id_and_close_logits_stay_apart(implementation):
    logits = np.zeros((4, 4196))
    logits[0, :4] = [28.00, 28.05, 28.10, 27.9]
    logits[1, [9, 3000, 5]] = 4.0
    logits[3, :] = -50.0
    got = head(logits, implementation)
    assert got.argmax[0].tolist() == [2, 5, 0, 0]
    np.testing.assert_allclose(got.entropy[0], exact(logits.astype(np.float32))[1], atol=1e-4)


@each
def test_suppressed_ids_never_come_out_and_do_not_touch_the_log_probability(implementation):
    logits = np.random.default_rng(1).normal(0, 3, (8, V))
    suppress = np.zeros((1, V), bool)
    suppress[0, logits.argmax(-1)] = True
    suppress[0, :1000] = True
    got = head(logits, implementation, temperature=0.7, suppress=jnp.asarray(suppress))
    assert not suppress[0, np.asarray(got.argmax)].any()
    assert not suppress[0, np.asarray(got.sample)].any()
    z = CAP * np.tanh(logits / CAP)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    np.testing.assert_allclose(got.logprob[0], log_p[range(8), np.asarray(got.argmax[0])], atol=1e-4)
    p, entropy = exact(np.where(suppress, -1e9, logits), 0.7)
    p = np.where(suppress, 0, p)
    np.testing.assert_allclose(got.entropy[0], -np.sum(p * np.log(np.maximum(p, 1e-300)), -1), atol=1e-4)
    assert entropy.shape == (8,)


@each
def test_soft_embedding_is_the_scaled_mean_of_the_table(implementation):
    rng = np.random.default_rng(2)
    table = rng.normal(0, 1, (V, D)).astype(np.float32)
    hidden = rng.normal(0, 1, (1, 5, D)).astype(np.float32)
    got = run(
        jnp.asarray(hidden),
        jnp.asarray(table),
        jnp.array([0.5]),
        jnp.array([1.0]),
        proposal_uniforms(jnp.stack([key_from_seed(0)]), 5, V),
        None,
        softcap=CAP,
        scale=3.0,
        implementation=implementation,
    )
    p, _ = exact(hidden[0].astype(np.float64) @ table.T.astype(np.float64), 0.5)
    np.testing.assert_allclose(got.soft[0], p @ table * 3.0, atol=1e-4)


@each
@pytest.mark.parametrize("draw", [1.0, 0.5])
def test_proposals_follow_the_distribution(implementation, draw):
    """Chi-square over 12 likely ids of two tiles and the rest, 20,000 draws; the bound is its 99.9 % quantile."""
    positions, ids = 20_000, [0, 5, 17, 99, 2047, 2048, 2049, 2100, 2200, 2300, 2346, 2347]
    logits = np.full(V, -9.0)
    logits[ids] = np.linspace(1, 3, len(ids))
    table = np.zeros((V, 1), np.float32)
    table[:, 0] = logits
    got = run(
        jnp.ones((1, positions, 1), jnp.float32),
        jnp.asarray(table),
        jnp.array([0.8]),
        jnp.array([draw]),
        proposal_uniforms(jnp.stack([key_from_seed(5)]), positions, V),
        None,
        softcap=CAP,
        scale=1.0,
        implementation=implementation,
    )
    p, _ = exact(table[:, 0].astype(np.float64), 0.8 * draw)
    counts = np.bincount(np.asarray(got.sample[0]), minlength=V)
    expected = np.append(p[ids], 1 - p[ids].sum()) * positions
    observed = np.append(counts[ids], positions - counts[ids].sum())
    assert np.sum((observed - expected) ** 2 / expected) < 32.9


@each
def test_a_draw_temperature_of_zero_proposes_the_argmax(implementation):
    logits = np.random.default_rng(3).normal(0, 0.1, (16, 700))
    got = head(logits, implementation, draw=0.0)
    assert np.array_equal(got.sample, got.argmax)
    for name in ("entropy", "logprob", "soft"):
        assert np.array_equal(getattr(got, name), getattr(head(logits, implementation), name)), name


@each
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_two_temperatures_whose_product_float32_cannot_hold(implementation, size):
    """Both tiny: the proposal is the argmax. Both huge: any id but a suppressed one."""
    logits = np.random.default_rng(4).normal(0, 1, (16, 700))
    suppress = np.zeros((1, 700), bool)
    suppress[0, :600] = True
    got = head(logits, implementation, temperature=size, draw=size, suppress=jnp.asarray(suppress))
    sample = np.asarray(got.sample)
    assert np.isfinite(got.entropy).all() and sample.min() >= 600
    assert np.array_equal(sample, got.argmax) if size < 1 else len(np.unique(sample)) > 8


@each
@pytest.mark.parametrize("u", [0.0, float(np.nextafter(np.float32(1), np.float32(0)))])
def test_extreme_uniforms_choose_an_id_that_can_be_chosen(implementation, u):
    logits = np.full((1, V), -np.inf)
    logits[0, [3, 2050, V - 2]] = 1.0
    suppress = jnp.asarray(np.isneginf(logits))
    got = run(
        jnp.ones((1, 1, 1), jnp.float32),
        jnp.ones((V, 1), jnp.float32),
        jnp.array([0.5]),
        jnp.array([1.0]),
        jnp.full((1, 3, 1), u, jnp.float32),
        suppress,
        softcap=CAP,
        scale=1.0,
        implementation=implementation,
    )
    assert got.sample[0, 0] == (3 if u == 0 else V - 2)


@each
def test_bfloat16_accumulates_and_caps_in_float32(implementation):
    rng = np.random.default_rng(4)
    hidden, table = (jnp.asarray(rng.normal(0, 1, s), jnp.bfloat16) for s in ((1, 6, D), (V, D)))
    got = run(
        hidden,
        table,
        jnp.array([0.8]),
        jnp.array([1.0]),
        proposal_uniforms(jnp.stack([key_from_seed(0)]), 6, V),
        None,
        softcap=CAP,
        scale=1.0,
        implementation=implementation,
    )
    wide = np.asarray(hidden[0], np.float64) @ np.asarray(table, np.float64).T
    p, entropy = exact(wide, 0.8)
    np.testing.assert_allclose(got.entropy[0], entropy, atol=1e-4)
    assert np.array_equal(got.argmax[0], wide.argmax(-1))
    assert got.soft.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got.soft[0], np.float64), p @ np.asarray(table, np.float64), atol=2e-2)
    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), got))


def test_all_implementations_choose_the_same_ids():
    logits = np.random.default_rng(6).normal(0, 4, (400, V))
    for chosen in ({}, {"draw": 0.6}, {"temperature": 0.05}):
        expected = head(logits, "reference", **{"temperature": 0.7} | chosen)
        for implementation in IMPLEMENTATIONS:
            got = head(logits, implementation, **{"temperature": 0.7} | chosen)
            assert np.array_equal(got.argmax, expected.argmax)
            assert np.mean(np.asarray(got.sample) == np.asarray(expected.sample)) >= 0.995  # else at rounding's mercy
            np.testing.assert_allclose(got.entropy, expected.entropy, atol=1e-4)
            np.testing.assert_allclose(got.logprob, expected.logprob, atol=1e-4)


def kept_by_hand(z, k, p):
    """bool[C,V]: what top_k and top_p leave of soft-capped logits, float64, by the sorted list."""
    kept = np.zeros(z.shape, bool)
    for row, mask in zip(z, kept, strict=True):
        order = np.argsort(-row, kind="stable")
        if k:
            order = order[: sum(row >= row[order[min(k, len(row)) - 1]])]
        chances = np.exp(row[order] - row[order[0]])
        chances /= chances.sum()
        likelier = np.array([chances[row[order] > value].sum() for value in row[order]])
        mask[order[likelier < p] if p < 1 else order] = True
    return kept


@each
@pytest.mark.parametrize("k, p", [(5, 1.0), (1, 1.0), (0, 0.6), (0, 1e-6), (40, 0.9), (V, 1.0), (2 * V, 0.99)])
def test_top_k_and_top_p_cut_before_the_temperature(implementation, k, p):
    logits = np.random.default_rng(7).normal(0, 6, (9, V)).astype(np.float32)
    suppress = np.zeros((1, V), bool)
    suppress[0, logits.argmax(-1)[:4]] = True
    z = np.where(suppress, -np.inf, CAP * np.tanh(logits.astype(np.float64) / CAP))
    kept = kept_by_hand(z, k, p)
    got = head(logits, implementation, 0.5, suppress=jnp.asarray(suppress), **truncation(k, p))
    whole = head(logits, implementation, 0.5, suppress=jnp.asarray(suppress))
    assert kept[range(9), np.asarray(got.sample[0])].all()
    assert np.array_equal(got.argmax, whole.argmax)
    np.testing.assert_allclose(got.logprob, whole.logprob, atol=1e-5)
    weights = np.where(kept, np.exp((z - z.max(-1, keepdims=True)) / 0.5), 0)
    weights /= weights.sum(-1, keepdims=True)
    entropy = -np.sum(weights * np.log(np.maximum(weights, 1e-300)), -1)
    np.testing.assert_allclose(got.entropy[0], entropy, atol=1e-4)
    np.testing.assert_allclose(got.soft[0], 2 * weights, atol=1e-4)  # the table is the identity


def truncation(k, p):
    return {"top_k": jnp.array([k], jnp.int32), "top_p": jnp.array([p], jnp.float32)}


@each
def test_logits_that_tie_are_cut_together(implementation):
    logits = np.zeros((3, 40))
    logits[0, [3, 9, 30]] = 8.0, 5.0, 5.0
    logits[1, 5:11] = 8.0
    logits[2] = -40.0
    for k, p, kept in ((2, 1.0, [3, 6, 40]), (0, 0.2, [1, 6, 40]), (1, 1.0, [1, 6, 40])):
        got = head(logits, implementation, **truncation(k, p))
        assert [int(np.sum(soft > 1e-9)) for soft in np.asarray(got.soft[0])] == kept


@each
def test_proposals_follow_what_top_k_and_top_p_leave(implementation):
    """Chi-square over the seven ids left of twelve, 4,000 draws; the bound is its 99.9 % quantile."""
    positions, ids = 4_000, np.array([0, 17, 99, 2047, 2048, 2050, 2100, 2200, 2300, 2346, 5, 9])
    table = np.full((V, 1), -9.0, np.float32)
    table[ids, 0] = np.linspace(1, 3, 12)
    got = run(
        jnp.ones((1, positions, 1), jnp.float32),
        jnp.asarray(table),
        jnp.array([0.8]),
        jnp.array([1.0]),
        proposal_uniforms(jnp.stack([key_from_seed(6)]), positions, V),
        None,
        softcap=CAP,
        scale=1.0,
        implementation=implementation,
        **truncation(7, 1.0),
    )
    p, _ = exact(table[ids[5:], 0].astype(np.float64), 0.8)
    counts = np.bincount(np.asarray(got.sample[0]), minlength=V)
    assert counts[ids[5:]].sum() == positions
    assert np.sum((counts[ids[5:]] - p * positions) ** 2 / (p * positions)) < 22.5


@each
def test_rows_that_do_not_ask_keep_every_bit(implementation):
    rng = np.random.default_rng(8)
    hidden, table = (jnp.asarray(rng.normal(0, 1, shape), jnp.float32) for shape in ((4, 10, D), (V, D)))
    uniforms = proposal_uniforms(jnp.stack([key_from_seed(seed) for seed in range(4)]), 10, V)

    def stats(k, p):
        rows = {"top_k": jnp.array(k, jnp.int32), "top_p": jnp.array(p, jnp.float32)}
        rows |= {"softcap": CAP, "scale": 1.0, "implementation": implementation}
        ones = jnp.ones(4)
        return run(hidden, table, ones, ones, uniforms, None, **rows)

    whole, some = stats([0] * 4, [1] * 4), stats([0, 3, 0, 0], [1, 1, 1, 0.5])
    for name in ("argmax", "sample", "entropy", "logprob", "soft"):
        before, after = np.asarray(getattr(whole, name)), np.asarray(getattr(some, name))
        assert np.array_equal(before[[0, 2]], after[[0, 2]]), name
        if name in ("entropy", "soft"):
            assert all(not np.array_equal(before[b], after[b]) for b in (1, 3))
    both = stats([0, 3, 7, 0], [1, 1, 1, 0.5])
    assert np.array_equal(np.asarray(both.soft)[[0, 1, 3]], np.asarray(some.soft)[[0, 1, 3]])


@pytest.mark.parametrize("chunk", [None, TILE])
def test_rows_at_rest_are_not_computed(chunk):
    """The others keep every bit, whatever stands in those at rest."""
    rng, keys = np.random.default_rng(3), jnp.stack([key_from_seed(seed) for seed in range(5)])
    hidden = rng.normal(size=(5, 3, D)).astype(np.float32)
    table = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)
    cut = {"top_k": jnp.array([0, 4, 9, 0, 0]), "top_p": jnp.array([1, 1, 0.5, 1, 0.3], jnp.float32)}

    def stats(hidden, active):
        arguments = (table, jnp.full(5, 0.7), jnp.ones(5), proposal_uniforms(keys, 3, V), None, *cut.values())
        return xla.vocab_head(hidden, *arguments, softcap=CAP, scale=2.0, active=active, chunk=chunk)

    active = np.array([False, True, False, True, True])
    everyone = jax.jit(stats)(hidden, None)
    some = jax.jit(stats)(np.where(active[:, None, None], hidden, np.nan), active)
    for whole, part in zip(jax.tree.leaves(everyone), jax.tree.leaves(some), strict=True):
        np.testing.assert_array_equal(part[active], whole[active])
        assert not np.any(part[~active])


def test_logits_of_all_ids_exist_for_a_few_positions_only():
    assert xla.positions_at_once(256, 32768) == 64
    assert xla.positions_at_once(256, 262144) == 32
    assert [xla.positions_at_once(C, 96) for C in (1, 2, 9, 16)] == [1, 1, 2, 4]


@pytest.mark.parametrize(
    ("positions", "width", "dtype", "tiles"),
    [(256, 2816, "bfloat16", 3), (256, 2816, "float32", 2), (64, 2816, "bfloat16", 4), (16, 64, "bfloat16", 73)],
)
def test_a_chunk_is_the_longest_whose_temporaries_fit(positions, width, dtype, tiles):
    """Five fp32 numbers per position and id, and a copy of the ids' rows of the table: at most 64 MiB together."""
    chunk = xla.chunk_size(positions, (262144, width), jnp.dtype(dtype))
    of_an_id = 5 * 4 * positions + width * jnp.dtype(dtype).itemsize
    assert chunk == tiles * TILE and chunk * of_an_id <= 64 * 2**20 < (chunk + TILE) * of_an_id


def test_a_chunk_is_no_less_than_a_tile_and_no_more_than_the_vocabulary():
    sizes = [(10**6, 262144), (16, 96), (16, TILE), (16, TILE + 1)]
    chunks = [xla.chunk_size(positions, (vocab, 64), jnp.dtype("bfloat16")) for positions, vocab in sizes]
    assert chunks == [TILE, TILE, TILE, 2 * TILE]


@each
def test_log_probabilities_of_given_ids(implementation):
    """Without temperature, mask or cut, whatever these are."""
    rng = np.random.default_rng(9)
    logits = rng.normal(0, 3, (7, V)).astype(np.float32)
    ids = rng.integers(0, V, (1, 7)).astype(np.int32)
    asked = {"ids": jnp.asarray(ids)} | truncation(3, 0.5)
    suppress = jnp.zeros((1, V), bool).at[0, 40].set(True)
    got = head(logits, implementation, temperature=0.6, suppress=suppress, **asked)
    z = CAP * np.tanh(logits.astype(np.float64) / CAP)
    logprobs = z - np.log(np.exp(z).sum(-1, keepdims=True))
    np.testing.assert_allclose(got.id_logprob[0], logprobs[range(7), ids[0]], atol=1e-4)


@pytest.mark.parametrize("chunk", [None, TILE])
@pytest.mark.parametrize("n", [1, 5])
def test_the_likeliest_ids(n, chunk):
    """Three ids tie, two of them in the second tile."""
    logits = np.random.default_rng(9).normal(0, 3, (7, V)).astype(np.float32)
    logits[:, [2300, 40, 2100]] = 20.0
    got = jax.jit(likeliest, static_argnums=(2, 3, 4))(jnp.eye(7)[None], jnp.asarray(logits.T), n, CAP, chunk)
    z = CAP * np.tanh(logits.astype(np.float64) / CAP)
    order = np.argsort(-z, axis=-1, kind="stable")[:, :n]
    assert np.array_equal(got.ids[0], order)
    expected = np.take_along_axis(z - np.log(np.exp(z).sum(-1, keepdims=True)), order, -1)
    np.testing.assert_allclose(got.logprobs[0], expected, atol=1e-4)
    with pytest.raises(ValueError, match=r"n is 8; expected 1 .. 7, the size of the vocabulary"):
        likeliest(jnp.zeros((1, 1, 2)), jnp.zeros((7, 2)), 8, CAP)
