"""What eight virtual CPU devices compute; test_devices.py runs this file where there are eight."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import dgemma_jax as dg
from dgemma_jax.api import Model
from dgemma_jax.config import LayerConfig, gemma_26b_a4b
from dgemma_jax.convert import parts
from dgemma_jax.diffusion.random import key_from_seed, proposal_uniforms
from dgemma_jax.engine import capacity
from dgemma_jax.images import image_batch
from dgemma_jax.kernels.vocab_head import TILE, likeliest, vocab_head
from dgemma_jax.model.transformer import build
from dgemma_jax.quantization import quantized_params
from dgemma_jax.sharding import shard_of
from tests.convert.convert_helpers import convert_model
from tests.devices.forced import CONFIG, Programs, Recording, place, record
from tests.full_size import Hlo, collectives
from tests.images import vision_models
from tests.parity.checkpoints import WIDE, random_tensors, write
from tests.random_models import SMALL_DEFAULTS, random_params

EIGHT = {"data": 2, "expert": 2, "tensor": 2}


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record()


@pytest.fixture(scope="module")
def eight() -> Programs:
    return Programs(dg.make_mesh(**EIGHT))


# Compiling for one takes ten seconds: `make soak` does it for all.
FEW = ({"expert": 2}, {"tensor": 4}, {"tensor": 3})
MORE = ({}, {"data": 2}, {"tensor": 2}, {"tensor": 8}, {"data": 4, "expert": 2}, {"data": 3})


@pytest.mark.parametrize("axes", [*FEW, *MORE], ids=str)
def test_a_mesh_decides_as_one_device_does(recording, soak, axes):
    """Among them K/V heads in copies, and three devices that divide neither heads nor ids nor experts."""
    if axes in MORE and not soak:
        pytest.skip("in `make soak`")
    mesh = dg.make_mesh(**axes)
    recording.repeat(Programs(mesh), dg.init_cache(CONFIG, 2, 64, mesh=mesh))


def test_eight_devices_decide_as_one_does(recording, eight):
    recording.repeat(eight, dg.init_cache(CONFIG, 2, 64, mesh=eight.mesh))


V = 7 * TILE + 100


def everything(shard, hidden, table, uniforms, suppress, ids):
    """All figures of the head: of three rows the second and third ask for top_k, top_p and another temperature."""
    how = {"softcap": 30.0, "scale": 2.0, "shard": shard, "ids": ids}
    how |= {"top_k": jnp.array([0, 50, 0]), "top_p": jnp.array([1.0, 1.0, 0.8])}
    temperatures = jnp.array([0.8, 0.4, 0.6]), jnp.array([1.0, 1.0, 0.5])
    stats = vocab_head(hidden, table, *temperatures, uniforms, suppress, **how)
    return stats, likeliest(hidden, table, 5, 30.0, shard=shard)


@pytest.fixture(scope="module")
def heads():
    """The head of one device and of eight that share the vocabulary: (HeadStats, Likeliest) of each.

    Positions 0 to 2: one logit of +30 on the fourth device and -30 elsewhere; 3: all logits are equal; 4: the two
    largest are equal, on two devices; 5: the largest id of all is suppressed; the others are random.
    """
    rng = np.random.default_rng(0)
    table, hidden = rng.normal(0, 1, (V, 16)), rng.normal(0, 1.5, (3, 9, 16))
    table[:, 0], table[3 * TILE + 77, 0] = -1, 1
    hidden[:, :4], hidden[:, 4:, 0] = 0, 0
    hidden[:, :3, 0] = 300
    table[[2 * TILE + 3, 6 * TILE], 1:] *= 3
    table[5 * TILE + 9] = table[2 * TILE + 3]
    hidden[:, 4] = table[2 * TILE + 3] * (np.arange(16) > 0)
    hidden[:, 5] = table[6 * TILE] * (np.arange(16) > 0)
    uniforms = proposal_uniforms(jnp.stack([key_from_seed(seed) for seed in range(3)]), 9, V)
    suppress = jnp.zeros((3, V), bool).at[:, 6 * TILE].set(True)
    rest = (uniforms, suppress, jnp.asarray(rng.integers(0, V, (3, 9))))
    hidden, table = jnp.asarray(hidden, jnp.float32), np.asarray(table, np.float32)

    mesh = dg.make_mesh(expert=2, tensor=4)
    shard = shard_of("vocab", V, mesh)
    specs = (P(), P(shard.axes), P(), P(), P())
    cut = jax.shard_map(partial(everything, shard), mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    padded = jnp.pad(table, ((0, shard.count * shard.length - V), (0, 0)))
    whole = jax.jit(partial(everything, None))(hidden, table, *rest)
    return jax.device_get(whole), jax.device_get(jax.jit(cut)(hidden, padded, *rest))


def test_a_vocabulary_on_eight_devices_gives_the_same_figures(heads):
    (expected, top), (got, own_top) = heads
    for name in ("argmax", "sample"):
        assert np.array_equal(getattr(got, name), getattr(expected, name)), name
    for name in ("entropy", "logprob", "soft", "id_logprob"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=1e-4, atol=1e-4, err_msg=name)
    assert np.array_equal(own_top.ids, top.ids)
    np.testing.assert_allclose(own_top.logprobs, top.logprobs, atol=1e-4)


def test_one_large_logit_on_one_device_is_finite(heads):
    _, (got, _) = heads
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))
    assert (got.argmax[:, :3] == 3 * TILE + 77).all() and (got.sample[:, :3] == 3 * TILE + 77).all()
    np.testing.assert_allclose(got.soft[:, :3, 0], 2.0, atol=1e-3)


def test_ties_between_devices_go_to_the_lowest_id(heads):
    _, (got, top) = heads
    assert (got.argmax[:, 3] == 0).all() and (top.ids[:, 3] == np.arange(5)).all()
    assert (got.argmax[:, 4] == 2 * TILE + 3).all()
    assert (top.ids[:, 4, :2] == [2 * TILE + 3, 5 * TILE + 9]).all()
    assert (top.ids[:, 5, 0] == 6 * TILE).all() and not (got.argmax[:, 5] == 6 * TILE).any()


def test_experts_are_shared(eight):
    """Four groups of devices have a quarter of each matrix, twice over the data axis."""
    whole = build(CONFIG)[1]["layers"]
    for number, layer in eight.params["layers"].items():
        for name, array in layer["experts"].items():
            size = whole[number]["experts"][name].size
            assert [shard.data.size for shard in array.addressable_shards] == [size // 4] * 8


def test_only_sums_travel(eight):
    """What a compiled step sends: no weights, and per layer one sum each of attention, dense MLP and experts."""
    sent = collectives(Hlo(eight.compiled_step.as_text()))
    C, D = CONFIG.canvas_length, CONFIG.hidden_size
    assert sent["all-reduce"].count(C * D) == 3 * len(CONFIG.layers) + 3  # and embedding, self-conditioning, head
    assert max(sent.pop("all-reduce")) == C * D
    assert max(map(max, sent.values())) <= C * 4  # figures of the four tiles at every position
    assert sent.keys() <= {"all-gather", "collective-permute"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A model with six query and three K/V heads, ten experts and 2,500 ids, as safetensors and converted."""
    root = tmp_path_factory.mktemp("stored")
    write(root / "hf", WIDE)
    convert_model(root / "hf", root / "orbax")
    return root


UNEVEN = {
    "2 devices": ["3 K/V heads of sliding layers", "3 K/V heads of full layers"],
    "3 devices": ["56 columns of the self-conditioning MLP", "56 columns of the dense MLPs"],
}


@pytest.mark.parametrize("axes", [{"expert": 2, "tensor": 2}, {"tensor": 3}], ids=str)
@pytest.mark.parametrize("layout", ["hf", "orbax"])
def test_each_device_reads_its_part(stored, monkeypatch, caplog, layout, axes):
    """The values of one device; and of a tensor that is cut no more than a part is put in order at a time."""
    expected, mesh = dg.load(stored / layout), dg.make_mesh(**axes)
    seen, owned = [], parts.owned
    monkeypatch.setattr(parts, "owned", lambda view, dtype: seen.append(view.size) or owned(view, dtype))
    got = dg.load(stored / layout, mesh=mesh)
    devices = f"{axes['tensor']} devices"
    said = [record.getMessage() for record in caplog.records if record.name == "dgemma_jax.api"]
    replicated = [line for line in said if line.endswith(": replicated")]
    assert replicated == [f"mesh: {what} do not divide over {devices} (tensor): replicated" for what in UNEVEN[devices]]
    assert [line.split(" are filled up to ")[0] for line in said if line not in replicated] == [
        "mesh: 10 experts",
        "mesh: 2500 ids",
    ]

    def check(array: jax.Array, whole: jax.Array) -> None:
        held, beyond = np.asarray(array), np.ones(array.shape, bool)
        inside = tuple(map(slice, whole.shape))
        np.testing.assert_array_equal(held[inside], whole)
        beyond[inside] = False
        assert array.dtype == whole.dtype and not held[beyond].any()

    jax.tree.map(check, got.params, expected.params)
    largest = max(shard.data.size for leaf in jax.tree.leaves(got.params) for shard in leaf.addressable_shards)
    assert largest < expected.params["embedder"]["table"].size
    assert max(seen, default=0) == (largest if layout == "hf" else 0)  # converted ones are read by Orbax


@pytest.mark.parametrize("layout", ["hf", "orbax"])
def test_values_that_cannot_be_are_found_on_a_mesh(tmp_path, layout):
    """A number that float16 does not hold, among a device's experts: the same line as on one device."""
    source = write(tmp_path / "hf", WIDE)
    tensors = random_tensors(WIDE)
    tensors["model.decoder.layers.1.experts.down_proj"][9, 3, 2] = 1e6
    save_file(tensors, source / "model.safetensors")
    if layout == "orbax":
        convert_model(source, tmp_path / "orbax")
    errors = []
    for mesh in (None, dg.make_mesh(expert=2, tensor=2)):
        with pytest.raises(ValueError, match=r"not finite.*1 of .* values as float16") as error:
            dg.load(tmp_path / layout, "float16", mesh=mesh)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_on_a_mesh(soak, quantization):
    """Values and scales are cut alike; with 4 bits the columns of a dense MLP in whole groups."""
    if quantization == "int8" and not soak:
        pytest.skip("in `make soak`")
    layers = (LayerConfig("sliding", 2, 32), LayerConfig("full", 1, 32))
    config = replace(CONFIG, layers=layers, intermediate_size=64, moe_intermediate_size=32, num_attention_heads=4)
    params = quantized_params(random_params(config), quantization)
    config, mesh = replace(config, quantization=quantization), dg.make_mesh(expert=2, tensor=2)
    canvas = np.random.default_rng(0).integers(0, config.vocab_size, (1, config.canvas_length), np.int32)

    def logits(params: dict, mesh: Mesh | None) -> np.ndarray:
        run = jax.jit(partial(dg.denoise_logits, build(config, mesh=mesh)[0]))
        return np.asarray(run(params, canvas, dg.init_cache(config, 1, 8, mesh=mesh)))

    cut = place(params, config, mesh)
    down = cut["layers"][0]["mlp"]["down"]
    assert {shard.data.shape[0] for shard in down["values"].addressable_shards} == {
        16 if quantization == "int4" else 32
    }
    expected = logits(params, None)
    assert np.abs(logits(cut, mesh) - expected).max() <= 1e-4 * np.abs(expected).max()


def test_images_on_a_mesh():
    """Every device runs the whole tower; soft tokens take their places in all rows' parts."""
    config, batch = vision_models.CONFIG, image_batch([vision_models.small(1, 2, 3)], vision_models.VISION)
    ids = vision_models.spelled(2, 5, vision_models.small(1, 2, 3), 7, 8)
    tokens, lengths = np.array([ids], np.int32), np.array([len(ids)], np.int32)
    params = random_params(config)

    def states(params: dict, mesh: Mesh | None) -> np.ndarray:
        run = jax.jit(partial(dg.encode, build(config, mesh=mesh)[0]))
        return np.asarray(run(params, tokens, lengths, dg.init_cache(config, 1, 32, mesh=mesh), batch)[1])

    mesh, expected = dg.make_mesh(expert=2, tensor=2), states(params, None)
    assert np.abs(states(place(params, config, mesh), mesh) - expected).max() <= 1e-4 * np.abs(expected).max()


def test_a_checkpoint_of_one_mesh_reads_on_another(tmp_path):
    """Saved with Orbax as it lies on four devices, read as it lies on eight others."""
    config = replace(CONFIG, vocab_size=8 * TILE, num_experts=8)
    first, second = dg.make_mesh(expert=2, tensor=2), dg.make_mesh(tensor=8)
    params = random_params(config)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", place(params, config, first))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", build(config, mesh=second)[1])
    table = restored["embedder"]["table"]
    assert (
        len({shard.device for shard in table.addressable_shards}) == 8
        and table.addressable_shards[0].data.size * 8 == table.size
    )
    jax.tree.map(np.testing.assert_array_equal, restored, params)


def test_memory_is_that_of_a_device(monkeypatch):
    """26B over two groups of four devices: K/V heads of sliding layers are quartered, of full layers halved."""
    config, mesh = gemma_26b_a4b(), dg.make_mesh(data=2, tensor=4)
    whole = {layer.kind: 8192 if layer.kind == "full" else config.sliding_window for layer in config.layers}
    numbers = sum(
        2 * whole[layer.kind] * layer.head_dim * (2 if layer.kind == "sliding" else 1) for layer in config.layers
    )
    assert capacity.cache_bytes(config, 8192, "bfloat16", mesh) == pytest.approx(2 * numbers, abs=4)

    def slots(free: int) -> int:
        monkeypatch.setattr(capacity, "free_bytes", lambda fraction, mesh: free)
        return capacity.plan(config, "bfloat16", None, 8192, 8192, None, 0.9, mesh=mesh).slots

    assert [slots(10**9 * free) for free in (1, 2, 10)] == [4, 16, 16]  # at most 8 a group on a CPU
    assert [capacity.slots_for(prompts, mesh) for prompts in (1, 2, 3, 100, None)] == [2, 2, 4, 16, 16]


def test_an_engine_on_a_mesh_answers_as_one_device(eight):
    """Slots over data, more requests than slots, and a prompt that goes on from one that was kept."""
    sampling, prompts = dg.Sampling(max_new_tokens=20), [[5, 6, 7], [9] * 30, [5, 6, 7, 8, 9], [3]]
    one = Model(CONFIG, random_params(CONFIG), None, SMALL_DEFAULTS, max_model_len=64)
    expected = one.generate(prompts, sampling, seed=4, slots=1)
    model = Model(CONFIG, eight.params, None, SMALL_DEFAULTS, max_model_len=64, mesh=eight.mesh)
    with dg.Engine(model, slots=2, prefill_chunk=16, prefix_cache_bytes=10**6) as engine:
        handles = [engine.submit(prompt, sampling, seed=4) for prompt in prompts]
        answers = [handle.result(600) for handle in handles]
        assert engine.stats.prefix_hits == 1
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
