"""The 26B programs compiled in bf16 for GPUs that are not there: memory, copies, kernels. `make gpu-aot` runs this."""

import pytest

from benchmarks.gpu_aot import TARGETS, measure_apart

pytestmark = [pytest.mark.gpu_aot, pytest.mark.slow]
CANVAS_TIMES_VOCABULARY = 256 * 262_144


@pytest.fixture(scope="module", params=TARGETS)
def figures(request) -> dict:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax's CUDA wheels compile for GPUs: make gpu-aot")
    found = measure_apart(request.param)
    for name, line in found.items():
        print(request.param, name, line)
    return found


def test_memory_of_a_step(figures):
    one, two = figures["loop, 1 rows"]["temp_mib"], figures["loop, 2 rows"]["temp_mib"]
    assert one < 128
    assert two - one < 64


def test_no_logits_and_no_copies(figures):
    for name, found in figures.items():
        assert found["largest_array_elements"] < CANVAS_TIMES_VOCABULARY, name
        assert found["large_copies"] == 0, name


def test_a_chunk_is_encoded_in_the_donated_cache(figures):
    found = figures["encode, 1 rows"]
    assert found["alias_mib"] == found["cache_mib"]


def test_few_kernels_per_layer(figures):
    """A step is launched kernel by kernel; a change that breaks fusion shows here first."""
    assert 10 < figures["loop, 1 rows"]["kernels_per_layer"] < 110
