"""The pictures that the bundled model is asked about, and how its image tower learns to see them."""

import random
from functools import partial
from math import log

import jax
import numpy as np
import optax
import pytest

import dgemma_jax as dg
from dgemma_jax.images import open_image
from dgemma_jax.model.transformer import DIFFERENTIABLE, build
from dgemma_jax.train import sight, trainer
from dgemma_jax.train.data import draw
from dgemma_jax.train.init import initial_params
from dgemma_jax.train.skills.pictures import COLOURS


def shown(skill: str, count: int) -> list[tuple[np.ndarray, str]]:
    """Pictures i32[64,64,3] and what is said of them."""
    examples = draw({skill: count}, random.Random(5))
    return [
        (np.asarray(open_image(example.images[0]), np.int32), example.answer.removesuffix("<turn|>"))
        for example in examples
    ]


def inside(picture: np.ndarray) -> np.ndarray:
    """bool[64,64]: what is not the ground, which all corners show."""
    assert picture.shape == (64, 64, 3)
    return (picture != picture[0, 0]).any(-1)


def test_a_shape_has_the_colour_and_the_corners_it_is_said_to_have():
    said = set()
    for picture, answer in shown("shape", 150):
        article, colour, name = answer.removesuffix(".").split()
        area = inside(picture)
        rows, columns = np.flatnonzero(area.any(1)), np.flatnonzero(area.any(0))
        filled = area.sum() / (len(rows) * len(columns))
        ink = picture[area].mean(0)
        assert article == "A"
        assert np.abs(ink - COLOURS[colour]).max() <= 16
        assert {"square": filled == 1, "circle": 0.7 < filled < 0.9, "triangle": 0.4 < filled < 0.65}[name]
        said.add((colour, name))
    assert len(said) == 24


def test_dots_are_as_many_as_is_said_and_do_not_touch():
    seen = set()
    for picture, answer in shown("dots", 100):
        area, islands = inside(picture), 0
        while area.any():
            islands += 1
            stack = [tuple(np.argwhere(area)[0])]
            while stack:
                y, x = stack.pop()
                if 0 <= y < 64 and 0 <= x < 64 and area[y, x]:
                    area[y, x] = False
                    stack += [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
        assert answer == str(islands)
        seen.add(islands)
    assert seen == {1, 2, 3, 4}


@pytest.fixture(scope="module")
def config():
    return dg.tiny()


def test_labels_are_the_words_of_the_answers(config):
    batch = sight.pictures({"shape": 3, "dots": 2}, config, random.Random(0))
    examples = draw({"shape": 3, "dots": 2}, random.Random(0))
    for label, example in zip(batch.labels, examples, strict=True):
        words = [group[i] for group, i in zip(sight.GROUPS, label, strict=True) if i >= 0]
        answer = example.answer.removesuffix("<turn|>")
        assert answer == (f"A {words[0]} {words[1]}." if len(words) == 2 else words[0])
    assert batch.images.patches.shape[0] == 5


@pytest.mark.usefixtures("quick_compiles")
def test_the_tower_learns_and_the_rest_stays(config):
    graph, abstract = build(config, "float32", DIFFERENTIABLE)
    params = initial_params(abstract, 0)
    tower = {"vision": params.pop("vision"), "probe": sight.initial_probe(config.hidden_size)}
    rule = optax.adam(3e-3)
    update = trainer.make_update(partial(sight.sight_loss, graph, params), rule, seed=0)
    batch = sight.pictures({"shape": 4, "dots": 2}, config, random.Random(0))
    before = jax.tree.map(np.asarray, params)
    losses = [float(m.loss) for _, m in trainer.train(trainer.start(tower, rule), 12, update, lambda _: batch)]
    assert losses[0] == pytest.approx((4 * log(8) + 4 * log(3) + 2 * log(4)) / 10), "the probe says nothing yet"
    assert losses[-1] < 0.8 * losses[0]
    jax.tree.map(np.testing.assert_array_equal, before, params)
