"""Sampling: checks on construction, merging, and the defaults of a checkpoint."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma_jax.sampling import BUILT_IN, UNSET, Sampling

# generation_config.json of google/diffusiongemma-26B-A4B-it.
RELEASE = {
    "max_new_tokens": 256,
    "max_denoising_steps": 48,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
    "eos_token_id": [1, 106, 50],
    "pad_token_id": 0,
}
NAMES = sorted(vars(BUILT_IN))


def test_every_field_defaults_to_unset_and_survives_copies():
    assert all(value is UNSET for value in vars(Sampling()).values())
    assert repr(UNSET) == "UNSET" and pickle.loads(pickle.dumps(UNSET)) is UNSET
    assert copy.deepcopy(Sampling(seed=1)) == Sampling(seed=1) and hash(Sampling(stop="x"))


def test_only_keywords():
    with pytest.raises(TypeError):
        Sampling(5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -3),
        ("max_new_tokens", True),
        ("max_new_tokens", 2.0),
        ("max_denoising_steps", 0),
        ("max_denoising_steps", None),
        ("max_denoising_steps", 2**31),
        ("t_max", 1e-40),
        ("temperature", 1e300),
        ("entropy_bound", 0),
        ("entropy_bound", float("nan")),
        ("entropy_bound", None),
        ("t_min", -0.1),
        ("t_min", float("inf")),
        ("t_max", 0),
        ("t_max", "0.8"),
        ("stability_threshold", -1),
        ("stability_threshold", 1.5),
        ("confidence_threshold", 0.0),
        ("temperature", -1),
        ("n", 0),
        ("n", None),
        ("logprobs", 1),
        ("logprobs", None),
        ("canvas", 5),
        ("canvas", [-2]),
        ("canvas", [1.5]),
        ("pinned", [1]),
        ("pinned", "yes"),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 4.0),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", "0.9"),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", True),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 5),
        ("stop_token_ids", 106),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("suppress", "ab"),
        ("suppress", [1.0]),
    ],
)
def test_bad_values_are_named(name, value):
    with pytest.raises(ValueError) as error:
        Sampling(**{name: value})
    assert str(error.value).startswith(f"{name} is {value!r}; expected ") and "\n" not in str(error.value)


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.8, 0.4)])
def test_t_max_must_exceed_t_min(low, high):
    with pytest.raises(ValueError, match=f"t_max is {high}; expected more than t_min, which is {low}"):
        Sampling(t_min=low, t_max=high)
    with pytest.raises(ValueError, match="expected more than t_min"):
        Sampling(t_max=high).merged(Sampling(t_min=low))


def test_a_canvas_and_what_is_pinned_of_it_go_together():
    sampling = Sampling(canvas=np.array([3, -1]), pinned=np.array([True, False]))
    assert (sampling.canvas, sampling.pinned) == ((3, -1), (True, False))
    for wrong, message in (
        ({"canvas": [1, 2], "pinned": [True]}, "pinned has 1 positions; expected 2"),
        ({"pinned": [True]}, "pinned has 1 positions; expected 0"),
        ({"canvas": [1, -1], "pinned": [True, True]}, "holds -1 at a pinned position"),
    ):
        with pytest.raises(ValueError, match=message):
            Sampling(**wrong)
    with pytest.raises(ValueError, match="canvas is array") as error:
        Sampling(canvas=np.zeros((2, 2), int))
    assert "\n" not in str(error.value)


def test_values_are_normalised():
    sampling = Sampling(
        stop="end", stop_token_ids=[np.int64(3)], suppress=None, seed=np.int32(5), t_max=np.float32(0.5), temperature=0
    )
    assert sampling.stop == ("end",) and sampling.stop_token_ids == (3,) and sampling.suppress == ()
    assert type(sampling.seed) is int and type(sampling.t_max) is float and type(sampling.temperature) is float
    assert Sampling(seed=2**63 - 1).seed == 2**63 - 1


@pytest.mark.parametrize(
    "name", ["t_min", "t_max", "stability_threshold", "confidence_threshold", "temperature", "top_k", "top_p"]
)
def test_none_is_a_choice(name):
    assert getattr(Sampling(**{name: None}).merged(BUILT_IN), name) is None


FIELDS = {
    "max_new_tokens": st.none() | st.integers(1, 1000),
    "max_denoising_steps": st.integers(1, 100),
    "t_min": st.none() | st.just(0.0) | st.floats(1e-30, 0.5),
    "t_max": st.none() | st.floats(0.6, 2),
    "temperature": st.none() | st.just(0.0) | st.floats(1e-30, 2),
    "top_k": st.none() | st.integers(0, 1000),
    "top_p": st.none() | st.floats(0.01, 1),
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "stop": st.lists(st.text(min_size=1), max_size=3),
    "suppress": st.lists(st.integers(0, 99), max_size=3),
}


@settings(deadline=None)
@given(chosen=st.fixed_dictionaries({}, optional=FIELDS), defaults=st.fixed_dictionaries({}, optional=FIELDS))
def test_merging_keeps_choices_and_fills_the_rest(chosen, defaults):
    first, second = Sampling(**chosen), Sampling(**defaults)
    merged = first.merged(second)
    for name in NAMES:
        assert getattr(merged, name) == getattr(first if name in chosen else second, name)
    assert merged.merged(second) == merged and first.merged(Sampling()) == first


@settings(deadline=None)
@given(
    name=st.sampled_from(NAMES), value=st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
)
def test_any_value_gives_a_sampling_or_one_line(name, value):
    try:
        sampling = Sampling(**{name: value})
    except ValueError as error:
        assert str(error).startswith(name)
    else:
        assert Sampling(**vars(sampling)) == sampling


def test_defaults_of_the_release():
    special = {"<pad>": 0, "<|image|>": 258880, "<|audio|>": 258881, "<|video|>": 258884, "<turn|>": 106}
    defaults = Sampling.from_generation_config(RELEASE, eos_token_id=[1, 106], special_ids=special)
    assert defaults.stop_token_ids == (1, 106, 50)
    assert defaults.suppress == (258880, 258881, 258884)
    assert defaults.max_new_tokens is None, "the file's 256 is ignored"
    assert defaults.merged(BUILT_IN) == defaults
    assert (defaults.t_min, defaults.t_max, defaults.entropy_bound) == (0.4, 0.8, 0.1)


def test_the_file_overrides_the_built_ins():
    changes = {"max_denoising_steps": 8, "t_min": 0.1, "t_max": 0.2, "stability_threshold": 0}
    changes |= {"top_k": 40, "top_p": 0.95}
    sampler = {"sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.5}}
    defaults = Sampling.from_generation_config(RELEASE | changes | sampler)
    assert {name: getattr(defaults, name) for name in changes} == changes
    assert defaults.entropy_bound == 0.5


def test_null_is_the_built_in_value():
    names = ("max_denoising_steps", "sampler_config", "t_min", "t_max", "stability_threshold", "confidence_threshold")
    defaults = Sampling.from_generation_config(dict.fromkeys(names) | {"eos_token_id": 1})
    assert defaults == Sampling(stop_token_ids=(1,)).merged(BUILT_IN)


def test_a_placeholder_that_is_pad_or_a_stop_id_is_not_suppressed():
    special = {"<|image|>": 0, "<|audio|>": 1, "<|video|>": 7}
    assert Sampling.from_generation_config(RELEASE, special_ids=special).suppress == (7,)


@pytest.mark.parametrize(("eos", "stops"), [([1, 106], (1, 106)), (1, (1,)), (None, ())])
def test_without_the_file_the_stop_ids_are_those_of_config_json_and_it_says_so(eos, stops, caplog):
    defaults = Sampling.from_generation_config(None, eos_token_id=eos)
    assert defaults.stop_token_ids == stops
    assert "no eos_token_id in generation_config.json" in caplog.text and len(caplog.records) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"t_max": 0.3},
        {"t_min": "low"},
        {"eos_token_id": "1"},
        {"eos_token_id": [1, None]},
        {"max_denoising_steps": -1},
        {"sampler_config": {"_cls_name": "Other"}},
        {"sampler_config": 3},
    ],
)
def test_a_bad_file_is_named(change):
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        Sampling.from_generation_config(RELEASE | change)
