"""The 26B programs compiled in bf16 for GPUs that are not there: memory, copies, kernels.

`make gpu-aot` runs this, which also stores the figures in benchmarks/results/gpu_aot.json.
"""

import pytest

from benchmarks.gpu_aot import MIB, TARGETS, record
from dgemma_jax.engine.hardware import WEIGHTS

pytestmark = [pytest.mark.gpu_aot, pytest.mark.slow]
CANVAS_TIMES_VOCABULARY = 256 * 262_144


@pytest.fixture(scope="module", params=TARGETS)
def figures(request) -> dict:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax's CUDA wheels compile for GPUs: make gpu-aot")
    return record(request.param)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_memory_of_a_step(figures, weights):
    one, two = (figures[f"loop, {rows} rows, {weights}"]["temp_mib"] for rows in (1, 2))
    assert one < 128
    assert two - one < 64


def test_no_logits_and_no_copies(figures):
    for name, found in figures.items():
        assert found["largest_array_elements"] < CANVAS_TIMES_VOCABULARY, name
        assert found["large_copies"] == 0, name


def test_no_quantised_weight_is_ever_whole_as_numbers(figures):
    """What is as large as a weight without quantisation, where weights are arguments, are activations and chunks."""
    for name, found in figures.items():
        without = figures[name.replace("int8", "bf16").replace("int4", "bf16")]["as_large_as_weights"]
        for shape, count in found["as_large_as_weights"].items():
            assert count <= without.get(shape, 0), (name, shape)


def test_quantised_weights_are_arguments_of_their_bytes(figures):
    """Of 26B without the image tower, beside cache and slots."""
    for weights, gigabytes in {"bf16": 50.5, "int8": 25.35, "int4": 14.57}.items():
        found = figures[f"loop, 1 rows, {weights}"]
        assert found["arguments_mib"] - found["cache_mib"] == pytest.approx(gigabytes * 1e9 / MIB, rel=0.01)


def test_a_chunk_is_encoded_in_the_donated_cache(figures):
    for weights in ("bf16", "int8"):
        found = figures[f"encode, 1 rows, {weights}"]
        assert found["alias_mib"] == found["cache_mib"]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_few_kernels_per_layer(figures, weights):
    """A step is launched kernel by kernel; a change that breaks fusion shows here first."""
    assert 10 < figures[f"loop, 1 rows, {weights}"]["kernels_per_layer"] < 110


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_four_devices_share_weights_and_send_sums(figures, weights):
    """Each has a quarter of experts and vocabulary and half of the rest; an expert's matrix alone has 2,816 x 704."""
    found = figures.get(f"loop, 1 rows, {weights}, 4 devices")
    if found is None:
        pytest.skip("compiled for H200")
    whole = figures[f"loop, 1 rows, {weights}"]
    assert found["arguments_mib"] < 0.29 * whole["arguments_mib"]
    assert found["temp_mib"] < 128
    assert set(found["collectives"]) == {"all-reduce", "all-gather"}
    assert found["collectives"]["all-gather"][1] < 2816 * 704
