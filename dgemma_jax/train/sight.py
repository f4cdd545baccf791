"""What the image tower learns before the model sees through it: each soft token alone tells what a picture shows.

A linear probe reads every soft token, so that what counts is everywhere and lies open; the language model then has to
learn words for it and nothing about pixels. The probe is thrown away.
"""

import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Key

from dgemma_jax.config import Config
from dgemma_jax.functional import image_features
from dgemma_jax.image_batch import ImageBatch
from dgemma_jax.images import image_batch, prepare
from dgemma_jax.images.placement import vision_of
from dgemma_jax.shapes import Array
from dgemma_jax.train.data import draw
from dgemma_jax.train.skills.pictures import COLOURS, MOST_DOTS, SHAPES

# What an answer may say: of each group one word, or none.
GROUPS = (tuple(COLOURS), SHAPES, tuple(map(str, range(1, MOST_DOTS + 1))))


class Pictures(NamedTuple):
    """images: N, one per label; labels i32[N,G]: which word of each group is in the answer, -1 for none."""

    images: ImageBatch
    labels: np.ndarray


class Metrics(NamedTuple):
    """Scalars of a batch. told: share of the soft tokens, of the words asked for, whose probe finds the word."""

    loss: Array
    told: Array


def pictures(skills: dict[str, int], config: Config, rng: random.Random) -> Pictures:
    """`skills[name]` training examples of each skill with pictures."""
    examples = draw(skills, rng)
    vision = vision_of(config)
    images = image_batch([prepare(example.images[0], vision) for example in examples], vision)
    words = [set(example.answer.removesuffix("<turn|>").removesuffix(".").split()) for example in examples]
    labels = [[next((i for i, word in enumerate(group) if word in said), -1) for group in GROUPS] for said in words]
    return Pictures(images, np.array(labels, np.int32))


def initial_probe(width: int) -> Float32[Array, "D words"]:
    """It says nothing yet."""
    return jnp.zeros((width, sum(map(len, GROUPS))))


def sight_loss(
    graph, rest: dict, params: dict, batch: Pictures, _key: Key[Array, ""], _self_condition: bool
) -> tuple[Float32[Array, ""], Metrics]:
    """Mean cross-entropy (nats) of the words over soft tokens; a loss of `trainer.make_update`.

    params: those of the tower, and `probe`; rest: those of the model, which stay as they are.
    """
    tower = {name: part for name, part in params.items() if name != "probe"}
    see = lambda image: image_features(graph, rest | tower, jax.tree.map(lambda part: part[None], image))[0]  # noqa: E731
    soft = jax.vmap(see)(batch.images)  # side by side; the model itself takes them one after the other
    there = jnp.arange(soft.shape[1]) < batch.images.counts[:, None]
    logits, at = soft @ params["probe"], 0
    losses = right = total = jnp.zeros(())
    for group, label in zip(GROUPS, batch.labels.T, strict=True):
        own, at = logits[..., at : at + len(group)], at + len(group)
        weight = there & (label >= 0)[:, None]
        found = -jnp.take_along_axis(jax.nn.log_softmax(own), label[:, None, None], axis=-1)[..., 0]
        losses += jnp.sum(found * weight)
        right += jnp.sum((own.argmax(-1) == label[:, None]) & weight)
        total += jnp.sum(weight)
    return losses / total, Metrics(losses / total, right / total)
