"""The tower's memory, its gradients, and what `encode` refuses; its numbers are compared in tests/parity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dgemma_jax as dg
from dgemma_jax.functional import image_features
from dgemma_jax.model.transformer import DIFFERENTIABLE, build
from tests.images.vision_models import CONFIG
from tests.random_models import SMALL, random_params

PARAMS = random_params(CONFIG)
QUICK = {"xla_backend_optimization_level": 0}  # the same memory, half the time
GRAPH, _ = build(CONFIG, implementations=DIFFERENTIABLE)


def batch(*grids: tuple[int, int], patches: int) -> dg.ImageBatch:
    """Images of rows x columns patches."""
    rng, n = np.random.default_rng(0), len(grids)
    positions = np.full((n, patches, 2), -1, np.int32)
    for row, (height, width) in enumerate(grids):
        y, x = np.divmod(np.arange(height * width), width)
        positions[row, : height * width] = np.stack([x, y], axis=1)
    counts = np.array([height * width // 4 for height, width in grids], np.int32)
    return dg.ImageBatch(rng.random((n, patches, 48), np.float32), positions, counts)


def temporaries(images: int, patches: int) -> int:
    """Bytes that the tower takes beside its inputs and outputs."""
    graph, _ = build(CONFIG)
    shapes = jax.eval_shape(lambda: batch(*[(8, 8)] * images, patches=patches))
    program = jax.jit(lambda params, images: image_features(graph, params, images), compiler_options=QUICK)
    return program.lower(PARAMS, shapes).compile().memory_analysis().temp_size_in_bytes


def test_eight_images_take_the_memory_of_one(abstract_arrays):
    """And that does not grow with the square of the patches."""
    one = temporaries(1, 640)
    assert temporaries(8, 640) <= 1.2 * one
    assert temporaries(1, 2560) <= 6 * one


def test_gradients_reach_every_parameter_of_the_tower():
    images = batch((4, 6), (2, 2), patches=24)
    tokens = np.array([[5, 91, *[90] * 6, 92, 7], [91, 90, 92, 6, *[0] * 6]], np.int32)
    lengths = np.array([10, 4], np.int32)

    def loss(vision: dict, *prompt: jax.Array) -> jax.Array:
        cache, params = dg.init_cache(CONFIG, 2, 16), PARAMS | {"vision": vision}
        _, hidden = dg.encode(GRAPH, params, *prompt, cache, images)
        return jnp.sum(jnp.sin(3 * hidden[0, 9]) + jnp.sin(3 * hidden[1, 3]))

    run = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)
    before, gradient = run(PARAMS["vision"], tokens, lengths)
    for path, leaf in jax.tree.leaves_with_path(gradient):
        assert float(jnp.abs(leaf).max()) > 0, path
    slope = float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))))
    moved = jax.tree.map(lambda value, way: value + 1e-3 / slope * way, PARAMS["vision"], gradient)
    after, _ = run(moved, tokens, lengths)
    assert float(after - before) == pytest.approx(1e-3 * slope, rel=0.1)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (batch((2, 2), patches=4), "the tokens hold 2 placeholders of images, which are 1 soft tokens together"),
        (batch(patches=4), "images hold no image; expected at least one, or None"),
    ],
)
def test_images_must_fit_their_places(images, message):
    tokens, lengths = np.array([[90, 90, 90, 5]], np.int32), np.array([2], np.int32)
    with pytest.raises(ValueError, match=message):
        dg.encode(GRAPH, PARAMS, tokens, lengths, dg.init_cache(CONFIG, 1, 8), images)


def test_a_model_without_tower_takes_no_images():
    graph, _ = build(SMALL)
    tokens, lengths = np.array([[5]], np.int32), np.array([1], np.int32)
    with pytest.raises(ValueError, match=r"this model reads no images: its config.json has no vision_config"):
        dg.encode(graph, random_params(SMALL), tokens, lengths, dg.init_cache(SMALL, 1, 8), batch((2, 2), patches=4))
