"""Faults that users of other implementations reported, as tests: numerics, cache, windows, padding. No torch needed."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dgemma_jax as dg
from dgemma_jax.kernels.grouped_matmul import experts
from dgemma_jax.kernels.mixed_attention.reference import visible
from dgemma_jax.kernels.vocab_head import TILE, vocab_head
from dgemma_jax.model.experts import Router
from dgemma_jax.model.transformer import Layer

from .ours import QUICK, Ours, dirty, rel, right_pad

WIDTH = 64
LENGTHS = (1, 5, 15, 16, 17, 31, 32, 33, 47)


@pytest.fixture
def narrow(loaded) -> Ours:
    return loaded("narrow")[1]


@pytest.fixture
def rows(narrow) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, narrow.config.vocab_size, length).tolist() for length in LENGTHS]


@pytest.fixture
def canvas(narrow) -> np.ndarray:
    size = (len(LENGTHS), narrow.config.canvas_length)
    return np.random.default_rng(6).integers(0, narrow.config.vocab_size, size)


def states(ours: Ours, cache, rows: list[list[int]], hidden=None) -> list[np.ndarray]:
    """All that later passes can read of a cache, row by row, and the valid hidden states."""
    out = [np.asarray(hidden[row])[: len(ids)] for row, ids in enumerate(rows)] if hidden is not None else []
    for layer in range(len(ours.config.layers)):
        for row in range(len(rows)):
            out += ours.unroll(cache, layer, row)
    return out


def identical(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def two_canvases(ours: Ours, rows, canvas, cache):
    """Logits behind the prompt, and behind a committed canvas with self-conditioning."""
    cache, hidden = ours.prompt(rows, WIDTH, cache)
    read = states(ours, cache, rows, hidden)
    first = ours.logits(canvas, cache)
    cache, _ = ours.encode(canvas, np.full(len(rows), canvas.shape[1]), cache)
    return [*read, first, ours.logits(canvas[::-1], cache, ours.soft(first / 0.8))]


def test_buffers_full_of_nan_change_nothing(narrow, rows, canvas):
    """What a cache held before its first use must not matter: masking by multiplication would let NaN through."""
    clean = narrow.empty(len(rows))
    assert identical(two_canvases(narrow, rows, canvas, clean), two_canvases(narrow, rows, canvas, dirty(clean)))


def test_empty_rows_are_finite(narrow, canvas):
    """Rows without a single token: unused slots, and a prompt that has not begun."""
    batch = len(LENGTHS)
    cache, hidden = narrow.encode(np.zeros((batch, WIDTH)), np.zeros(batch), dirty(narrow.empty(batch)))
    assert cache.lengths.tolist() == [0] * batch
    assert np.isfinite(hidden).all()
    logits = narrow.logits(canvas, cache)
    assert np.isfinite(logits).all()
    assert identical([logits], [narrow.logits(canvas, narrow.empty(batch))])


def test_content_of_padding_does_not_matter(narrow, rows, canvas):
    clean, garbage = [], []
    for fill, out in ((0, clean), (77, garbage)):
        tokens, lengths = right_pad(rows, WIDTH, fill)
        cache, hidden = narrow.encode(tokens, lengths, narrow.empty(len(rows)))
        out += [*states(narrow, cache, rows, hidden), narrow.logits(canvas, cache)]
    assert identical(clean, garbage)


@pytest.mark.parametrize("width", [max(LENGTHS), 96])
def test_width_of_padding_does_not_matter(narrow, rows, canvas, width):
    """The longest prompt's own length, a multiple of 32 and of 64, and a multiple of 32 above: prompt and commit."""
    results = []
    for padded in (WIDTH, width):
        cache, hidden = narrow.prompt(rows, padded)
        logits = narrow.logits(canvas, cache)
        read = states(narrow, cache, rows, hidden)
        cache, _ = narrow.encode(canvas, np.full(len(rows), canvas.shape[1]), cache)
        results.append([*read, logits, narrow.logits(canvas, cache)])
    assert max(rel(a, b) for a, b in zip(*results, strict=True)) <= 2e-5
    for index in (-2, -1):
        assert np.array_equal(np.argmax(results[0][index], -1), np.argmax(results[1][index], -1))


def test_rows_do_not_see_each_other(narrow, rows, canvas):
    """A row in another slot beside other rows: the same numbers."""
    order = np.random.default_rng(8).permutation(len(rows))
    cache, _ = narrow.prompt(rows, WIDTH)
    moved, _ = narrow.prompt([rows[index] for index in order], WIDTH)
    first, second = narrow.logits(canvas, cache), narrow.logits(canvas[order], moved)
    assert rel(second, np.asarray(first)[order]) <= 1e-6
    assert np.array_equal(np.argmax(second, -1), np.argmax(first, -1)[order])


def test_window_crossed_token_by_token(narrow, rows, canvas):
    """A prompt that ends before the window and grows by one token at a time equals one pass at every length."""
    first, prompt = narrow.config.sliding_window - 4, rows[-1]
    lengths = first + np.arange(len(LENGTHS))
    whole, _ = narrow.prompt([prompt[:length] for length in lengths], WIDTH)
    cache, _ = narrow.prompt([prompt[:first]] * len(LENGTHS), WIDTH)
    for length in range(first, lengths[-1]):  # a row takes part until it has its length
        token = np.full(canvas.shape, prompt[length])
        cache, _ = narrow.encode(token, length < lengths, cache)
    assert cache.lengths.tolist() == lengths.tolist()
    assert rel(narrow.logits(canvas, cache), narrow.logits(canvas, whole)) <= 2e-5


@pytest.mark.parametrize("full_layers", [True, False])
def test_sliding_layers_forget_what_left_the_window(narrow, rows, canvas, full_layers):
    """With the full layers silenced, a token further back than all windows together has no influence at all."""
    params, window = narrow.params, narrow.config.sliding_window
    sliding = sum(layer.kind == "sliding" for layer in narrow.config.layers)
    far = sliding * (window - 1) + 1
    prompt = rows[-1]
    assert len(prompt) > far

    def silence(path, leaf):
        kind = narrow.config.layers[path[1].key].kind if path[0].key == "layers" else None
        mute = kind == "full" and [entry.key for entry in path[2:]] == ["attention", "o"]
        return jnp.zeros_like(leaf) if mute else leaf

    ours = Ours(narrow.graph, params, narrow.config)
    ours._encode, ours._logits = narrow._encode, narrow._logits
    if not full_layers:
        ours.params = jax.tree_util.tree_map_with_path(silence, params)
    changed = {distance: list(prompt) for distance in (0, far, 2)}
    for distance, ids in changed.items():
        if distance:
            ids[-distance] = 3 + (ids[-distance] + 1) % 100
    batch = [*changed.values()] * 3
    cache, _ = ours.prompt(batch, WIDTH)
    same, distant, near = np.asarray(ours.logits(np.repeat(canvas[:1], len(batch), 0), cache))[:3]
    assert rel(near, same) > 1e-2
    if full_layers:
        assert rel(distant, same) > 1e-3
    else:
        assert np.array_equal(distant, same)


@pytest.mark.parametrize("slots", [8, 64])
def test_keys_that_a_canvas_sees(slots):
    """Exactly the prefix and the canvas, whatever the buffer's size: the last W - 1 cached keys in a sliding layer."""
    window, tokens = (slots, 5) if slots < 64 else (None, 5)
    lengths = jnp.array([0, 1, slots - 2, slots - 1, slots, *([] if window is None else [slots + 1, 3 * slots])])
    batch = len(lengths)
    cached, own = visible(lengths, jnp.full(batch, tokens), jnp.zeros(batch, bool), slots, tokens, window)
    assert own.all()
    expected = np.minimum(lengths, np.inf if window is None else window - 1)
    assert np.array_equal(cached.sum(-1), np.repeat(expected[:, None], tokens, 1))


def test_zero_self_conditioning_is_none(narrow, rows, canvas):
    """No conditioning is a zero embedding, not the embedding of uniform logits; each row by itself."""
    cache, _ = narrow.prompt(rows, WIDTH)
    off = narrow.logits(canvas, cache)
    zero = jnp.zeros((*canvas.shape, narrow.config.hidden_size))
    through_zero = np.asarray(narrow.logits(canvas, cache, zero))
    assert rel(through_zero, off) <= 1e-5  # two programs, so equal up to rounding
    uniform = narrow.soft(np.zeros_like(off))
    assert rel(narrow.logits(canvas, cache, uniform), off) > 1e-2
    on = np.arange(len(rows)) % 2 == 0
    mixed = np.asarray(narrow.logits(canvas, cache, jnp.where(on[:, None, None], narrow.soft(off), zero)))
    assert np.array_equal(mixed[~on], through_zero[~on])
    assert rel(mixed[on], off[on]) > 1e-2


def test_layer_scalars_are_two_sets(narrow, rows, canvas):
    """Encoder and decoder scalars are all loaded and all different; either set changes what it should."""
    layers = narrow.params["layers"]
    values = [float(layer[f"{side}_scalar"]) for layer in layers.values() for side in ("encoder", "decoder")]
    assert len(set(values)) == 2 * len(narrow.config.layers)

    cache, hidden = narrow.prompt(rows, WIDTH)
    logits = narrow.logits(canvas, cache)
    doubled = Ours(narrow.graph, None, narrow.config)
    doubled._encode, doubled._logits = narrow._encode, narrow._logits
    for side, encoder_changes in (("encoder", True), ("decoder", False)):
        other = {i: layer | {f"{side}_scalar": 2 * layer[f"{side}_scalar"]} for i, layer in layers.items()}
        doubled.params = narrow.params | {"layers": other}
        changed, states_now = doubled.prompt(rows, WIDTH)
        assert np.array_equal(states_now, hidden) != encoder_changes
        assert rel(doubled.logits(canvas, changed), logits) > 1e-2


def test_router_reads_the_raw_stream(narrow, rows, monkeypatch):
    """Its input is the layer's un-normed residual; experts and weights agree with float64 at every token."""
    seen, streams, config = [], [], narrow.config
    route, feed = Router.__call__, Layer.feed_forward
    spy = lambda self, x: seen.append((x, *route(self, x))) or seen[-1][1:]  # noqa: E731
    monkeypatch.setattr(Router, "__call__", spy)
    monkeypatch.setattr(Layer, "feed_forward", lambda self, h, used: streams.append(h) or feed(self, h, used))

    def traced(params, tokens, lengths, cache):
        dg.encode(narrow.graph, params, tokens, lengths, cache)
        return list(seen), list(streams)

    with jax.default_matmul_precision("highest"):
        tokens, lengths = right_pad([rows[-1]], WIDTH)
        seen, streams = jax.jit(traced, compiler_options=QUICK)(narrow.params, tokens, lengths, narrow.empty(1))
    assert len(seen) == len(config.layers)
    for index, ((x, weights, ids), stream) in enumerate(zip(seen, streams, strict=True)):
        assert np.array_equal(x, stream.reshape(x.shape))
        router = jax.tree.map(partial(np.asarray, dtype=np.float64), narrow.params["layers"][index]["router"])
        x = np.asarray(x, np.float64)
        normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)
        scores = (normed * router["scale"] * config.hidden_size**-0.5) @ router["proj"]
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        order = np.argsort(-chances, -1)[:, : config.top_k_experts]
        kept = np.take_along_axis(chances, order, -1)
        assert np.mean(np.all(np.asarray(ids) == order, -1)) >= 0.99
        expected = kept / kept.sum(-1, keepdims=True) * router["per_expert_scale"][order]
        assert np.median(np.abs(np.asarray(weights) - expected)) <= 1e-5


@pytest.mark.parametrize("tokens", [1, 3, 9, 33, 63, 99, 256])
def test_experts_at_any_number_of_tokens(tokens):
    """Grouping by expert must not depend on how the tokens divide: against one product per token in float64."""
    rng = np.random.default_rng(tokens)
    x, gate_up, down = rng.normal(size=(tokens, 16)), rng.normal(size=(6, 16, 24)), rng.normal(size=(6, 12, 16))
    ids = np.stack([rng.permutation(6)[:2] for _ in range(tokens)]).astype(np.int32)
    weights = rng.uniform(0.1, 2, (tokens, 2))
    expected = np.zeros_like(x)
    for token in range(tokens):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up = np.split(x[token] @ gate_up[expert], 2)
            gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
            expected[token] += weight * ((gelu * up) @ down[expert])
    arrays = [jnp.asarray(array, jnp.float32) for array in (x, gate_up, down, weights)]
    with jax.default_matmul_precision("highest"):
        assert rel(experts(*arrays, jnp.asarray(ids)), expected) <= 1e-5


def head(raw_columns: np.ndarray, dtype, softcap: float = 30.0):
    """The head of one position whose raw logits are the sums of the columns [V, n]."""
    table = jnp.asarray(raw_columns, dtype)
    uniforms = jnp.full((1, 1 + -(-table.shape[0] // TILE), 1), 0.5)
    one = jnp.ones(1)
    hidden = jnp.ones((1, 1, table.shape[1]), dtype)
    run = jax.jit(partial(vocab_head, softcap=softcap, scale=1.0), compiler_options=QUICK)
    return run(hidden, table, one, one, uniforms, None)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_close_logits_near_the_cap_stay_apart(dtype):
    """Rounded to bf16 the top three would tie, and their order in the vocabulary would decide."""
    columns = np.zeros((262_144, 2), np.float32)
    columns[:4] = [[28.0, 0.0], [28.0, 0.05], [28.0, 0.1], [28.0, -0.1]]
    columns = columns.astype(dtype).astype(np.float64)
    stats = head(columns, dtype)
    assert int(stats.argmax[0, 0]) == 2
    capped = 30 * np.tanh(columns.sum(-1) / 30)
    logs = capped - np.log(np.exp(capped).sum())
    assert float(stats.entropy[0, 0]) == pytest.approx(-(np.exp(logs) * logs).sum(), abs=1e-4)
    assert float(stats.logprob[0, 0]) == pytest.approx(logs.max(), abs=1e-4)


def test_equal_logits_give_the_lowest_id():
    """Also across the tiles of the vocabulary."""
    columns = np.zeros((3 * TILE + 5, 1), np.float32)
    columns[[TILE + 7, 9, 3 * TILE + 1]] = 12.0
    assert int(head(columns, np.float32).argmax[0, 0]) == 9
