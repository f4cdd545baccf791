"""The bundled model in transformers, which reads its directory as it is."""

from pathlib import Path

import numpy as np
import pytest

import dgemma_jax as dg
from dgemma_jax.images import image_batch, prepare
from dgemma_jax.images.placement import expand

from .oracle import Oracle
from .ours import Ours
from .test_forward import assert_close, assert_logits

pytestmark = pytest.mark.parity

DIRECTORY = Path(dg.__file__).parent / "assets" / "tiny"


@pytest.fixture(scope="module")
def oracle():
    return Oracle(DIRECTORY)


@pytest.fixture
def unpooled(monkeypatch, oracle):
    """Where a patch is a soft token, transformers drops the patches and keeps the padding: its mask is the wrong way
    round."""
    pooler = oracle.model.model.encoder.vision_tower.pooler
    forward = pooler.forward

    def mended(*args, **kwargs):
        states, padding = forward(*args, **kwargs)
        return states, ~padding

    monkeypatch.setattr(pooler, "forward", mended)


@pytest.fixture(scope="module")
def ours():
    model = dg.load(DIRECTORY, dtype="float32")
    bundled = Ours(model.graph, model.params, model.config)
    bundled.model = model
    return bundled


@pytest.mark.parametrize("sees", [False, True])
def test_the_same_logits(ours, oracle, unpooled, sees):
    """With a question in words, and with one about a picture."""
    config, rng = ours.model.config, np.random.default_rng(7)
    question = ours.model.tokenizer.encode("<bos><|turn>user\nReverse this list: 12 7 93 4<turn|>\n<|turn>model\n")
    seen = [prepare(rng.integers(0, 256, (64, 64, 3), np.uint8), config.vision)] if sees else []
    ids = expand([*question[:3], *[config.image_token_id] * sees, *question[3:]], seen, config)
    batch = image_batch(seen, config.vision) if sees else None
    cache, hidden = ours.prompt([ids], len(ids), images=batch)
    expected, prefix = oracle.encode(np.array([ids]), images=batch)
    assert_close(hidden[0], expected[0], "hidden states")
    canvas = rng.integers(0, config.vocab_size, (1, config.canvas_length))
    ours_first, expected_first = ours.logits(canvas, cache), oracle.logits(canvas, prefix)
    assert_logits(ours_first, expected_first, "logits")
    assert_logits(
        ours.logits(canvas, cache, ours.soft(ours_first)), oracle.logits(canvas, prefix, expected_first), "next logits"
    )
