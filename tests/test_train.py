"""The trainer: tokenizer, loss, optimizer, resuming, export."""

import random
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma_jax.checkpoint import open_checkpoint
from dgemma_jax.config import Config, LayerConfig, tiny
from dgemma_jax.model.transformer import DIFFERENTIABLE, build
from dgemma_jax.text.tokenizer import Tokenizer
from dgemma_jax.train import checkpoint, data, tokenizer, trainer
from dgemma_jax.train.export import export, hf_config, processor_config
from dgemma_jax.train.init import initial_params
from dgemma_jax.train.loss import Objective, add_noise, diffusion_loss, noise_levels
from dgemma_jax.train.optim import matrix_axes, optimizer, schedule
from dgemma_jax.train.skills import Question
from tests.images.vision_models import VISION

VOCABULARY = tokenizer.build()
IMAGE_IDS = {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
CONFIG = replace(
    tiny(),
    vision=None,
    hidden_size=32,
    intermediate_size=32,
    self_conditioning_size=32,
    num_attention_heads=2,
    layers=(LayerConfig("full", 1, 16),),
    moe_intermediate_size=16,
)
BOTH_KINDS = replace(CONFIG, layers=(LayerConfig("sliding", 2, 16), LayerConfig("full", 1, 16)))
GRAPH, ABSTRACT = build(CONFIG, "float32", DIFFERENTIABLE)
OPTIMIZER = optimizer(10, scale=5.0)
UPDATE = trainer.make_update(partial(diffusion_loss, GRAPH, CONFIG, Objective(copies=8)), OPTIMIZER, seed=0)


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles():
    """Compiling is most of the time of these tests; their programs run for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def small_batch(step: int) -> data.Batch:
    rng = random.Random(step)
    return data.pack(data.draw({"sudoku": 4, "reverse": 3, "infill": 1}, rng), VOCABULARY, 52, CONFIG, rng)


def small_state() -> trainer.State:
    return trainer.start(initial_params(ABSTRACT, seed=0), OPTIMIZER)


# Tokenizer


@given(st.text())
def test_text_round_trips(text):
    ids = VOCABULARY.encode(text).ids
    assert VOCABULARY.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.CONTROL["<unk>"] not in ids or "<unk>" in text


@given(st.lists(st.sampled_from([*tokenizer.CONTROL, *tokenizer.MEDIA, *tokenizer.WORDS, "a", " ", "\n", "é"])))
def test_control_tokens_are_single_ids(pieces):
    text = "".join(pieces)
    ids = VOCABULARY.encode(text).ids
    control = [piece for piece in pieces if piece in tokenizer.CONTROL or piece in tokenizer.MEDIA]
    special = Tokenizer(VOCABULARY).special_ids
    assert [id for id in ids if id in special.values()] == [special[piece] for piece in control]
    assert VOCABULARY.decode(ids, skip_special_tokens=False) == text
    plain = Tokenizer(VOCABULARY).encode(text, control=False)
    assert not set(plain) & set(special.values())
    assert VOCABULARY.decode(plain) == text


def test_images_are_packed_with_their_prompts():
    """Each prompt's placeholders are spelled out, and the images of all rows follow each other."""
    ids = {name: VOCABULARY.token_to_id(text) for name, text in IMAGE_IDS.items()}
    config, pixels = replace(CONFIG, vision=VISION, **ids), np.zeros((64, 64, 3), np.uint8)
    part = lambda value: {"type": "image", "image": pixels + np.uint8(value)}  # noqa: E731
    questions = [
        Question(
            ("a",), [{"role": "user", "content": [part(1), part(2), {"type": "text", "text": "red"}]}], "red<turn|>"
        ),
        Question(("b",), [{"role": "user", "content": "red"}], "red<turn|>"),
        Question(("c",), [{"role": "user", "content": [part(3)]}], "red<turn|>"),
    ]
    batch = data.pack(list(map(data.render, questions)), VOCABULARY, 150, config, random.Random(0))
    spelled = [ids["boi_token_id"], *[ids["image_token_id"]] * 64, ids["eoi_token_id"]]
    places = [np.flatnonzero(row == ids["boi_token_id"]).tolist() for row in batch.tokens]
    assert [len(row) for row in places] == [2, 0, 1]
    assert all(batch.tokens[row, at : at + 66].tolist() == spelled for row in (0, 2) for at in places[row])
    assert batch.images.counts.tolist() == [64] * 3
    assert (255 * batch.images.patches[:, 0, 0]).round().tolist() == [1, 2, 3]
    assert data.pack([data.render(questions[1])], VOCABULARY, 52, config, random.Random(0)).images is None


def test_vocabulary():
    vocabulary = tokenizer.vocabulary()
    assert sorted(vocabulary.values()) == list(range(tokenizer.VOCAB_SIZE))
    assert VOCABULARY.get_vocab(with_added_tokens=True) == vocabulary
    assert vocabulary["\n"] == 107
    assert vocabulary["<|turn>"] == 105
    assert VOCABULARY.encode("Reverse this list: apple").tokens == ["Reverse", " this", " list", ":", " ", "apple"]
    assert VOCABULARY.encode("pineapple 314<0x41>").tokens == ["pi", "ne", "a", "p", "p", "le", *" 314<0x41>"]
    assert VOCABULARY.encode("12 3").tokens == ["12", " ", "3"]
    assert VOCABULARY.encode("<bos>").ids == [2]
    with pytest.raises(ValueError, match="do not fit"):
        tokenizer.vocabulary(size=200)


# Loss and optimizer


def test_noise():
    levels = noise_levels(jax.random.key(0), 100, 4, 0.2)
    assert ((levels >= 0) & (levels <= 1)).all()
    assert 0.15 < float((levels == 1).mean()) < 0.25
    assert (jnp.diff(levels, axis=1) >= 0).all(), "one copy in each quarter"
    canvas, pinned = jnp.zeros((2, 1000), jnp.int32), jnp.arange(1000) < jnp.array([[0], [500]])
    noised = add_noise(jax.random.key(1), canvas, jnp.array([0.0, 0.5]), pinned, tokenizer.VOCAB_SIZE)
    assert (noised[0] == 0).all()
    assert (noised[1, :500] == 0).all()
    assert 0.4 < float((noised[1, 500:] != 0).mean()) < 0.6


def test_remat_leaves_loss_and_gradients_as_they_are():
    def gradient(remat: bool):
        loss = partial(diffusion_loss, GRAPH, CONFIG, Objective(copies=2, remat=remat))
        differentiate = jax.jit(jax.grad(loss, has_aux=True), static_argnums=3)
        return differentiate(small_state().params, small_batch(0), jax.random.key(0), False)

    (kept, metrics), (recomputed, metrics_again) = gradient(False), gradient(True)
    np.testing.assert_allclose(metrics.loss, metrics_again.loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), kept, recomputed)


def test_the_optimizer_knows_its_matrices():
    axes = matrix_axes(ABSTRACT)
    layer = axes["layers"][0]
    assert layer["attention"]["o"].reduction_axis == (0, 1)
    assert layer["experts"]["gate_up"].reduction_axis == 1
    assert axes["embedder"]["table"] is layer["router"]["proj"] is layer["input_norm"]["scale"] is None


def test_muon_steps_are_nearly_orthogonal():
    params = {"mlp": {"gate": jax.random.normal(jax.random.key(0), (16, 24))}, "norm": {"scale": jnp.ones(16)}}
    update, _ = jax.jit(OPTIMIZER.update)(params, OPTIMIZER.init(params), params)
    assert jax.tree.structure(update) == jax.tree.structure(params)
    singular = np.linalg.svd(update["mlp"]["gate"], compute_uv=False)
    assert singular.max() / singular.min() < 3


def test_schedule():
    rate = schedule(100, 2.0)
    np.testing.assert_allclose([rate(0), rate(2), rate(30), rate(100)], [1.0, 2.0, 2.0, 0.04], rtol=1e-5)


# The run


def losses(state: trainer.State, steps: int) -> tuple[trainer.State, list[float]]:
    seen = []
    for now, metrics in trainer.train(state, steps, UPDATE, small_batch):
        state = now
        seen.append(float(metrics.loss))
    return state, seen


@pytest.fixture(scope="module")
def whole_run() -> tuple[trainer.State, list[float]]:
    return losses(small_state(), 10)


def test_ten_steps_reduce_the_loss(whole_run):
    _, seen = whole_run
    assert len(seen) == 10
    assert np.mean(seen[-3:]) < 0.8 * np.mean(seen[:3])


def test_every_parameter_is_trained(whole_run):
    before = jax.tree.leaves_with_path(initial_params(ABSTRACT, seed=0))
    after = jax.tree.leaves(whole_run[0].params)
    same = [jax.tree_util.keystr(path) for (path, a), b in zip(before, after, strict=True) if np.array_equal(a, b)]
    assert same == ["['layers'][0]['encoder_scalar']"], "nothing reads what follows the encoder's last keys"


def test_a_resumed_run_equals_the_uninterrupted_one(whole_run, tmp_path):
    state, seen = losses(small_state(), 5)
    checkpoint.save(tmp_path / "run" / "state.npz", state, {"seed": 0})
    resumed = checkpoint.load(tmp_path / "run" / "state.npz", small_state(), {"seed": 0})
    state, rest = losses(resumed, 10)
    assert seen + rest == whole_run[1]
    jax.tree.map(np.testing.assert_array_equal, state, whole_run[0])


def test_an_interrupted_write_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "state.npz"
    state = trainer.State({"w": jnp.arange(3.0)}, optax.EmptyState(), jnp.int32(1))
    checkpoint.save(path, state, {})

    def half_written(file, **arrays):
        file.write(b"half a")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", half_written)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(path, state._replace(step=jnp.int32(2)), {})
    assert checkpoint.load(path, state, {}).step == 1


def test_a_state_of_another_run_is_refused(tmp_path):
    path = tmp_path / "state.npz"
    checkpoint.save(path, {"w": jnp.zeros(2)}, {"steps": 10})
    with pytest.raises(ValueError, match="Remove it"):
        checkpoint.load(path, {"w": jnp.zeros(2)}, {"steps": 20})
    with pytest.raises(ValueError, match="other arrays"):
        checkpoint.load(path, {"v": jnp.zeros(2)}, {"steps": 10})


def test_the_config_of_a_model_with_images_is_read_back():
    ids = {name: VOCABULARY.token_to_id(text) for name, text in IMAGE_IDS.items()}
    config = replace(BOTH_KINDS, vision=replace(VISION, max_soft_tokens=280), **ids)
    assert Config.from_hf(hf_config(config, VOCABULARY.get_vocab())) == replace(config, dtype="bfloat16")
    assert processor_config(VISION)["max_soft_tokens"] == 70  # which is a matter of this file


def test_an_exported_model_loads(tmp_path):
    params = initial_params(build(BOTH_KINDS)[1], seed=0)
    export(tmp_path / "model", BOTH_KINDS, params, VOCABULARY, "# card\n")
    export(tmp_path / "model", BOTH_KINDS, params, VOCABULARY, "# card\n")
    config, loaded, text, defaults = open_checkpoint(tmp_path / "model")
    image, audio, video = (VOCABULARY.token_to_id(f"<|{name}|>") for name in ("image", "audio", "video"))
    begin, end = (VOCABULARY.token_to_id(name) for name in ("<|image>", "<image|>"))
    ids = {"image_token_id": image, "boi_token_id": begin, "eoi_token_id": end}
    assert config == replace(BOTH_KINDS, **ids)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(b.dtype), b), params, loaded)
    assert text.encode("<|turn>") == [105]
    assert sorted(defaults.stop_token_ids) == [1, 50, 106]
    assert defaults.suppress == (image, audio, video)
