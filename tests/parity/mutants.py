"""Wrong readings of the masks and of attention, one function each, and what a wrong reading may change."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dgemma_jax.kernels.mixed_attention import reference as attention_reference
from dgemma_jax.model import attention, layers, transformer
from dgemma_jax.model.attention import Attention
from dgemma_jax.model.layers import rms_norm
from dgemma_jax.model.transformer import Transformer

from .ours import Ours

TEMPERATURE = 0.7


@dataclass
class Subject:
    """What a mutant may change: our model, a monkeypatch, and the soft embedding's logits."""

    ours: Ours
    patch: pytest.MonkeyPatch
    temperature: float = TEMPERATURE

    def scale_leaves(self, change) -> None:
        """Replace the params by change(path, leaf); path is a tuple of keys."""
        keys = lambda path: tuple(entry.key for entry in path)  # noqa: E731
        self.ours.params = jax.tree_util.tree_map_with_path(lambda p, x: change(keys(p), x), self.ours.params)

    def each_layer(self, change) -> None:
        """Replace every layer's params by change(layer, its kind)."""
        kinds = [layer.kind for layer in self.ours.config.layers]
        changed = {i: change(dict(layer), kinds[i]) for i, layer in self.ours.params["layers"].items()}
        self.ours.params = self.ours.params | {"layers": changed}


MUTANTS = {}


def mutant(function):
    MUTANTS[function.__name__] = function
    return function


# -- masks and positions ---------------------------------------------------------------------------


def masks(subject: Subject, change) -> None:
    """Replace the mask function by change(original, prefix_length, own_length, causal, slots, tokens, window)."""
    original = attention_reference.visible
    subject.patch.setattr(attention_reference, "visible", functools.partial(change, original))


def canvas_window(offset: int):
    """The denoising rows of sliding layers see ``offset`` more cached keys than they should; causal rows do not."""

    def change(original, prefix_length, own_length, causal, slots, tokens, window):
        cached, own = original(prefix_length, own_length, causal, slots, tokens, window)
        if window is None:
            return cached, own
        wider, _ = original(prefix_length, own_length, causal, slots, tokens, window + offset)
        return jnp.where(causal[:, None, None], cached, wider), own

    return change


@mutant
def canvas_sees_window_cached_keys(subject):
    masks(subject, canvas_window(1))


@mutant
def canvas_sees_one_key_too_few(subject):
    masks(subject, canvas_window(-1))


@mutant
def every_canvas_query_has_its_own_window(subject):
    def change(original, prefix_length, own_length, causal, slots, tokens, window):
        _, own = original(prefix_length, own_length, causal, slots, tokens, window)
        narrowed, _ = original(prefix_length, own_length, jnp.ones_like(causal), slots, tokens, window)
        return narrowed, own

    masks(subject, change)


@mutant
def canvas_is_causal(subject):
    def change(original, prefix_length, own_length, causal, slots, tokens, window):
        cached, _ = original(prefix_length, own_length, causal, slots, tokens, window)
        _, own = original(prefix_length, own_length, jnp.ones_like(causal), slots, tokens, None)
        return cached, own

    masks(subject, change)


def encoder_window(offset: int):
    """The causal rows of sliding layers see ``offset`` more keys than they should; denoising rows do not."""

    def change(original, prefix_length, own_length, causal, slots, tokens, window):
        cached, own = original(prefix_length, own_length, causal, slots, tokens, window)
        if window is None:
            return cached, own
        wrong = original(prefix_length, own_length, causal, slots, tokens, window + offset)
        return tuple(jnp.where(causal[:, None, None], a, b) for a, b in zip(wrong, (cached, own), strict=True))

    return change


@mutant
def encoder_window_is_one_wider(subject):
    masks(subject, encoder_window(1))


@mutant
def encoder_window_is_one_narrower(subject):
    masks(subject, encoder_window(-1))


@mutant
def commit_is_bidirectional(subject):
    original = attention.mixed_attention

    def change(q, k, v, prefix_k, prefix_v, prefix_length, own_length, causal, **how):
        causal = causal & (prefix_length == 0)
        return original(q, k, v, prefix_k, prefix_v, prefix_length, own_length, causal, **how)

    subject.patch.setattr(attention, "mixed_attention", change)


@mutant
def commit_keeps_the_decoders_keys(subject):
    """The finished canvas is cached as the denoising pass computed it."""
    original = Transformer.encode

    def change(self, tokens, lengths, cache):
        if tokens.shape[1] != self.config.canvas_length:
            return original(self, tokens, lengths, cache)
        x = self.self_conditioning(self.embedder(tokens), None)
        return self.run(x, cache, lengths, jnp.zeros(tokens.shape[0], bool), keep=lengths)

    subject.patch.setattr(Transformer, "encode", change)


@mutant
def right_padding_is_seen(subject):
    """Rows count as long as the batch is wide."""
    original = Transformer.encode

    def change(self, tokens, lengths, cache):
        return original(self, tokens, jnp.full_like(lengths, tokens.shape[1]), cache)

    subject.patch.setattr(Transformer, "encode", change)


@mutant
def positions_restart_in_every_pass(subject):
    original = transformer.rotary_table
    change = lambda rope, width, positions: original(rope, width, positions - positions[:, :1])  # noqa: E731
    subject.patch.setattr(transformer, "rotary_table", change)


# -- attention -------------------------------------------------------------------------------------


def projection(subject: Subject, q=None, k=None, v=None) -> None:
    """Replace parts of the projection by functions of (module, x, raw key, right answer, rotary table)."""
    original = Attention.project

    def change(self, x, table):
        right = original(self, x, table)
        raw = jnp.einsum("btd,dkh->btkh", x, self.k[...])
        return tuple(
            answer if part is None else part(self, x, raw, answer, table)
            for part, answer in zip((q, k, v), right, strict=True)
        )

    subject.patch.setattr(Attention, "project", change)


@mutant
def full_layers_value_is_the_normed_key(subject):
    normed = lambda self, x, raw, v, table: v if self.window else rms_norm(self.k_norm(raw), self.eps)  # noqa: E731
    projection(subject, v=normed)


@mutant
def full_layers_value_is_the_rotated_key(subject):
    rotated = lambda self, x, raw, v, table: v if self.window else layers.rotate(v, table)  # noqa: E731
    projection(subject, v=rotated)


@mutant
def value_is_not_normed(subject):
    def unnormed(self, x, raw, v, table):
        return raw if self.window is None else jnp.einsum("btd,dkh->btkh", x, self.v[...])

    projection(subject, v=unnormed)


@mutant
def norm_after_rotation(subject):
    rotated_first = lambda self, x, raw, k, table: self.k_norm(layers.rotate(raw, table))  # noqa: E731
    projection(subject, k=rotated_first)


@mutant
def scores_are_scaled_by_head_width(subject):
    widths = [layer.head_dim for layer in subject.ours.config.layers]

    def change(path, leaf):
        return leaf * widths[path[1]] ** -0.5 if "q_norm" in path else leaf

    subject.scale_leaves(change)


@mutant
def query_heads_read_interleaved_key_heads(subject):
    def change(layer, kind):
        q = layer["attention"]["q"]
        heads = q.shape[1]
        kv = layer["attention"]["k"].shape[1]
        order = np.arange(heads).reshape(heads // kv, kv).T.ravel()
        mixed = {"q": q[:, order], "o": layer["attention"]["o"][order]}
        return layer | {"attention": layer["attention"] | mixed}

    subject.each_layer(change)


def frequencies(subject: Subject, change) -> None:
    """Replace the rotary frequencies of full layers by change(rope, width)."""
    original = layers.inverse_frequencies
    wrong = lambda rope, width: original(rope, width) if rope.rotary_fraction == 1 else change(rope, width)  # noqa: E731
    subject.patch.setattr(layers, "inverse_frequencies", wrong)


@mutant
def proportional_exponent_runs_over_the_turning_channels(subject):
    def change(rope, width):
        turning = int(rope.rotary_fraction * width // 2)
        out = np.zeros(width // 2, np.float32)
        out[:turning] = rope.theta ** -(np.arange(turning) / turning)
        return out

    frequencies(subject, change)


@mutant
def full_layers_turn_every_channel(subject):
    original = layers.inverse_frequencies
    frequencies(subject, lambda rope, width: original(replace(rope, rotary_fraction=1.0), width))


@mutant
def zero_frequencies_come_first(subject):
    original = layers.inverse_frequencies
    turning = lambda rope, width: int(rope.rotary_fraction * width // 2)  # noqa: E731
    frequencies(subject, lambda rope, width: np.roll(original(rope, width), -turning(rope, width)))


@mutant
def neighbouring_channels_turn_together(subject):
    def change(x, table):
        cos, sin = table.astype(x.dtype)[:, :, :, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)

    subject.patch.setattr(attention, "rotate", change)
