"""What an engine takes of the device, and what it compiles before it serves."""

import logging
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import dgemma_jax as dg
from dgemma_jax.engine import capacity
from dgemma_jax.engine.scheduler import chunk_sizes
from dgemma_jax.parallel import check_parallel
from tests.compilations import Compilations
from tests.full_size import TEXT_26B as LARGE
from tests.random_models import SMALL, random_model
from tests.test_generate import small_tokenizer

GB = 10**9
SHORT = dg.Sampling(max_new_tokens=SMALL.canvas_length + 4)


pytestmark = pytest.mark.usefixtures("abstract_arrays")  # the warm-up compiles without running


@pytest.fixture(scope="module")
def model():
    return random_model(tokenizer=small_tokenizer(), max_model_len=200)


def planned(monkeypatch, free: int, slots=None, max_model_len=None, prefix=None, platform="gpu") -> capacity.Plan:
    monkeypatch.setattr(capacity, "free_bytes", lambda fraction, mesh: int(fraction * free))
    monkeypatch.setattr(capacity.jax, "default_backend", lambda: platform)
    return capacity.plan(LARGE, "bfloat16", slots, max_model_len, LARGE.max_position_embeddings, prefix, 0.9)


def test_slots_are_what_memory_leaves(monkeypatch):
    """26B: a slot of 8,192 positions takes 0.38 GB of cache, a tenth for prefixes, and its share of a pass."""
    one = capacity.cache_bytes(LARGE, 8192, "bfloat16")
    assert 0.37 * GB < one < 0.38 * GB
    found = [planned(monkeypatch, free, max_model_len=8192).slots for free in (GB, 2 * GB, 10 * GB, 80 * GB)]
    assert found == [1, 2, 16, 64]
    assert planned(monkeypatch, 80 * GB, max_model_len=8192, platform="cpu").slots == 8
    assert planned(monkeypatch, 2 * GB, max_model_len=8192, prefix=GB).slots == 1
    assert planned(monkeypatch, 80 * GB, max_model_len=8192).prefix_cache_bytes == int(0.1 * 64 * one)


def test_a_row_more_must_fit_to_encode_a_prompt_in(monkeypatch):
    """Beside two slots and a tenth of them for prefixes; a single slot needs none."""
    one, step = capacity.cache_bytes(LARGE, 32_768, "bfloat16"), 0.3 * GB
    rows = {1.2: 1, 2.3: 1, 3: 1, 3.3: 2}
    found = [planned(monkeypatch, (n * one + step) / 0.9, max_model_len=32_768).slots for n in rows]
    assert found == [*rows.values()]


def test_a_prompt_is_encoded_in_a_copy_of_its_row():
    positions, one = 1 << 16, np.int32(1)
    model = random_model(replace(SMALL, max_position_embeddings=positions))
    cache = jax.eval_shape(lambda: dg.init_cache(model.config, 2, positions))
    tokens = np.zeros((1, 64), np.int32)
    prefill = model._programs._prefill.lower(model.params, cache, tokens, one, one, one, None, None)
    memory = prefill.compile({"xla_backend_optimization_level": 0}).memory_analysis()
    row = capacity.cache_bytes(model.config, positions, "float32")
    assert row <= memory.temp_size_in_bytes < 1.1 * row


def test_chosen_slots_share_what_memory_leaves(monkeypatch):
    whole = planned(monkeypatch, 200 * GB, slots=4)
    assert whole.max_model_len == LARGE.max_position_embeddings
    less = planned(monkeypatch, 10 * GB, slots=4)
    assert 1024 < less.max_model_len < LARGE.max_position_embeddings
    again = planned(monkeypatch, 10 * GB, slots=4, max_model_len=less.max_model_len)
    assert again == less
    with pytest.raises(ValueError, match=r"^4 slots of [\d,]+ positions take [\d,]+ bytes, 9,000,000,000 are free: .*"):
        planned(monkeypatch, 10 * GB, slots=4, max_model_len=less.max_model_len + 1)


def test_what_does_not_fit_at_all_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"1 slots of 2 positions take .* bytes, 900,000 are free: lower slots"):
        planned(monkeypatch, 10**6)


def test_chosen_slots_get_a_shorter_context_where_not_even_one_has_the_whole(monkeypatch):
    found = planned(monkeypatch, 2 * GB)
    assert found.slots == 1 and 8192 < found.max_model_len < LARGE.max_position_embeddings


def test_weights_to_come_are_kept_free(monkeypatch):
    """Planned before they are read it is the plan that is made afterwards."""
    monkeypatch.setattr(capacity.jax, "default_backend", lambda: "gpu")
    common = (LARGE, "bfloat16", None, 8192, LARGE.max_position_embeddings, None, 0.9)
    monkeypatch.setattr(capacity, "free_bytes", lambda fraction, mesh: int(fraction * 80 * GB))
    before = capacity.plan(*common, weights=52 * GB)
    monkeypatch.setattr(capacity, "free_bytes", lambda fraction, mesh: int(fraction * 80 * GB) - 52 * GB)
    assert before == capacity.plan(*common) and before.slots == 32
    with pytest.raises(ValueError, match=r"take [\d,]+ bytes beside 80,000,000,000 of weights, 0 are free"):
        monkeypatch.setattr(capacity, "free_bytes", lambda fraction, mesh: 72 * GB)
        capacity.plan(*common, weights=80 * GB)


def test_a_pass_of_a_small_model_takes_little():
    """In proportion to the 26B model, for which the ceilings hold."""
    assert capacity.step_bytes(LARGE, "bfloat16", 4) == 5 * (64 << 20)
    assert capacity.step_bytes(dg.tiny(), "bfloat16", 8) < 16 << 20


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 0},
        {"max_model_len": 1},
        {"max_model_len": 10**9},
        {"memory_fraction": 0},
        {"memory_fraction": 1.5},
        {"memory_fraction": "all"},
        {"prefill_chunk": 0},
        {"prefix_cache_bytes": -1},
        {"compilation_cache": 5},
        {"attention_implementation": "flash_attn"},
    ],
)
def test_bad_settings_are_refused(model, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]) as error:
        dg.Engine(model, **wrong)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"model is 'tiny'; expected a dg.Model"):
        dg.Engine("tiny")


def test_a_shorter_context_holds_for_the_requests(model):
    with dg.Engine(model, slots=2, max_model_len=100, prefill_chunk=16) as engine:
        with pytest.raises(ValueError, match="leaves no room in a context of 100"):
            engine.submit([5] * 100)
        answer = engine.submit([5] * 90, dg.Sampling(seed=1)).result(300)
    assert (len(answer.tokens), answer.finish_reason) == (10, "length")
    assert model.max_model_len == 200


def test_another_attention_gives_the_same(model):
    sampling = replace(SHORT, seed=3)
    with dg.Engine(model, slots=2, attention_implementation="reference") as engine:
        assert engine.model.implementations.attention == "reference"
        other = engine.submit([5, 6, 7], sampling).result(300)
    assert other.tokens == model.generate([[5, 6, 7]], sampling, slots=2)[0].tokens


@pytest.fixture
def programs(tmp_path):
    """Where this test's programs go; those of later tests stay in memory."""
    before = jax.config.jax_compilation_cache_dir
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_after_the_warm_up_nothing_is_compiled(programs, caplog):
    """At most six programs, kept on disk; then no request compiles, whatever it asks for."""
    model = random_model(seed=1, tokenizer=small_tokenizer(), max_model_len=200)  # for which nothing was compiled yet
    asked = [{"top_k": 5}, {"top_logprobs": 3, "logprobs": True}, {"temperature": 0.0}, {"max_denoising_steps": 3}]
    with dg.Engine(model, slots=2, prefix_cache_bytes=0, prefill_chunk=256, compilation_cache=programs) as engine:
        with caplog.at_level(logging.INFO, "dgemma_jax"), Compilations() as first:
            assert engine.warmup() > 0
        assert 2 <= len(first.names) <= 6
        with Compilations() as later:
            before = engine.stats.compilations
            handles = [engine.submit([5] * n, replace(SHORT, seed=n, **asked[n % 4])) for n in (1, 2, 3, 70, 150)]
            assert all(handle.result(300).tokens for handle in handles)
            assert engine.stats.compilations == before
        assert later.names == []
    assert "programs compiled in" in caplog.text
    assert any(file.name.startswith("jit__advance") for file in programs.iterdir())


def test_chunks_come_in_few_sizes():
    assert chunk_sizes(1024) == [64, 256, 1024]
    assert chunk_sizes(7) == [7]
    assert chunk_sizes(100) == [64, 100]


def test_the_likeliest_ids_of_every_token(model):
    """Beside rows that do not ask, cut like the tokens; the first is the token itself where nothing was suppressed."""
    plain = dg.Sampling(max_new_tokens=SMALL.canvas_length + 4, seed=1, logprobs=True)
    asks = replace(plain, top_logprobs=3)
    expected, answer = model.generate([[5, 6], [5, 6]], [plain, asks], slots=2)
    assert expected.top_logprobs is None
    assert replace(answer, top_logprobs=None) == expected
    assert [len(found) for found in answer.top_logprobs] == [3] * len(answer.tokens)
    for id, logprob, found in zip(answer.tokens, answer.logprobs, answer.top_logprobs, strict=True):
        assert found[0][0] == id
        assert found[0][1] == pytest.approx(logprob, abs=1e-5)
        assert [value for _, value in found] == sorted((value for _, value in found), reverse=True)
    with pytest.raises(ValueError, match=r"top_logprobs is 21; expected an integer in 0 .. 20"):
        dg.Sampling(top_logprobs=21)


@pytest.mark.parametrize("axes", [["data", "Pipe"], ["pp"], ["stage", "tensor"], ["pipeline"]])
def test_a_pipeline_is_refused_by_the_name_of_an_axis(axes):
    with pytest.raises(ValueError, match=r"canvas state advances only where the sampler runs.*data, expert or tensor"):
        check_parallel(axes)


@pytest.mark.parametrize("size", [0, 2, -1, None, "2"])
def test_a_pipeline_is_refused_by_its_size(size):
    with pytest.raises(ValueError, match=f"pipeline_parallel_size is {size!r}; "):
        check_parallel(pipeline_parallel_size=size)


def test_other_axes_are_let_through():
    check_parallel(["data", "expert", "tensor"])
    check_parallel()
