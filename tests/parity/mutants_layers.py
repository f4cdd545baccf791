"""Wrong readings of norms, layer scalars, experts, self-conditioning and the head, one function each."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dgemma_jax import functional
from dgemma_jax.model.layers import Embedder, rms_norm
from dgemma_jax.model.transformer import Layer, SelfConditioning, Transformer

from .mutants import Subject, mutant

# -- norms, scalars, experts -----------------------------------------------------------------------


@mutant
def norm_weights_are_one_plus_w(subject):
    def change(path, leaf):
        return leaf + 1 if path[-1] == "scale" and "router" not in path else leaf

    subject.scale_leaves(change)


@mutant
def scalars_are_swapped(subject):
    def change(layer, kind):
        return layer | {"encoder_scalar": layer["decoder_scalar"], "decoder_scalar": layer["encoder_scalar"]}

    subject.each_layer(change)


@mutant
def decoder_scalars_everywhere(subject):
    subject.each_layer(lambda layer, kind: layer | {"encoder_scalar": layer["decoder_scalar"]})


@mutant
def encoder_scalars_everywhere(subject):
    subject.each_layer(lambda layer, kind: layer | {"decoder_scalar": layer["encoder_scalar"]})


@dataclass
class Branch:
    """A residual and its branch, kept apart until the layer's scalar arrives."""

    residual: jax.Array
    branch: jax.Array

    def __mul__(self, scalar):
        return self.residual + self.branch * scalar


@mutant
def scalar_applies_to_the_branch_only(subject):
    original = Layer.feed_forward
    subject.patch.setattr(Layer, "feed_forward", lambda self, h, used: Branch(h, original(self, h, used) - h))


def feed_forward(subject: Subject, change) -> None:
    """Replace the router's input, the experts' input and the last norm: change(layer, h) -> the three."""

    def wrong(self, h, used):
        tokens = h.reshape(-1, h.shape[-1])
        routed, last_norm = change(self, tokens)
        mixed = self.experts(self.pre_experts_norm(tokens), *self.router(routed)).reshape(h.shape)
        return h + last_norm(self.post_mlp_norm(self.mlp(self.pre_mlp_norm(h))) + self.post_experts_norm(mixed))

    subject.patch.setattr(Layer, "feed_forward", wrong)


@mutant
def router_reads_the_experts_normed_input(subject):
    feed_forward(subject, lambda self, x: (self.pre_experts_norm(x), self.post_feedforward_norm))


@mutant
def sum_of_branches_is_not_normed(subject):
    feed_forward(subject, lambda self, x: (x, lambda y: y))


@mutant
def experts_read_the_dense_branchs_input(subject):
    subject.each_layer(lambda layer, kind: layer | {"pre_experts_norm": layer["pre_mlp_norm"]})


@mutant
def router_without_scale(subject):
    subject.scale_leaves(lambda path, leaf: jnp.ones_like(leaf) if path[-2:] == ("router", "scale") else leaf)


@mutant
def router_without_width_factor(subject):
    width = subject.ours.config.hidden_size
    subject.scale_leaves(lambda path, leaf: leaf * width**0.5 if path[-2:] == ("router", "scale") else leaf)


@mutant
def per_expert_scale_is_dropped(subject):
    subject.scale_leaves(lambda path, leaf: jnp.ones_like(leaf) if path[-1] == "per_expert_scale" else leaf)


def expert_columns(subject: Subject, order) -> None:
    subject.scale_leaves(lambda path, leaf: leaf[:, :, order(leaf.shape[2])] if path[-1] == "gate_up" else leaf)


@mutant
def gate_and_up_are_swapped(subject):
    expert_columns(subject, lambda width: np.roll(np.arange(width), width // 2))


@mutant
def gate_and_up_are_interleaved(subject):
    expert_columns(subject, lambda width: np.arange(width).reshape(-1, 2).T.ravel())


@mutant
def sigmoid_gelu(subject):
    subject.patch.setattr(jax.nn, "gelu", lambda x, approximate=True: x * jax.nn.sigmoid(1.702 * x))


# -- embedding, self-conditioning, head ------------------------------------------------------------


@mutant
def embedding_is_not_scaled(subject):
    scaled = Embedder.__call__
    subject.patch.setattr(Embedder, "__call__", lambda self, ids: scaled(self, ids) / self.scale)


def self_conditioning(subject: Subject, change) -> None:
    subject.patch.setattr(SelfConditioning, "__call__", change)


@mutant
def self_conditioning_norm_is_skipped(subject):
    def change(self, embedded, soft):
        return embedded if soft is None else embedded + self.mlp(self.pre_norm(soft))

    self_conditioning(subject, change)


@mutant
def self_conditioning_is_skipped_in_the_first_step(subject):
    original = SelfConditioning.__call__
    self_conditioning(subject, lambda self, e, soft: e if soft is None else original(self, e, soft))


@mutant
def self_conditioning_input_is_not_normed(subject):
    change = lambda self, e, soft: rms_norm(e if soft is None else e + self.mlp(soft), self.eps)  # noqa: E731
    self_conditioning(subject, change)


@mutant
def self_conditioning_is_ignored(subject):
    self_conditioning(subject, lambda self, e, soft: rms_norm(e, self.eps))


@mutant
def encoder_runs_the_self_conditioning_module(subject):
    original = Transformer.encode

    def change(self, tokens, lengths, cache):
        embedder = self.embedder
        self.embedder = lambda ids: self.self_conditioning(embedder(ids), None)
        return original(self, tokens, lengths, cache)

    subject.patch.setattr(Transformer, "encode", change)


@mutant
def conditioning_is_not_tempered(subject):
    subject.temperature = 1.0


@mutant
def logits_are_not_capped(subject):
    change = lambda hidden, table, softcap: jnp.einsum("bcd,vd->bcv", hidden, table)  # noqa: E731
    subject.patch.setattr(functional.head_reference, "capped_logits", change)
