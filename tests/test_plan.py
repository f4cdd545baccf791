"""`dgemma inspect --plan` and `--report`: what a model takes of a GPU, and how far it is from its source."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_aot, memory_plan
from dgemma_jax.cli import main
from dgemma_jax.config import gemma_26b_a4b
from dgemma_jax.engine.hardware import GPUS, TEMPORARIES, estimate
from tests.convert.test_failures import error_of
from tests.test_config import RELEASE

CONFIG = gemma_26b_a4b()


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    """The config.json of the release, and nothing else."""
    path = tmp_path_factory.mktemp("release") / "config.json"
    path.write_text(json.dumps(RELEASE))
    return path


def test_the_26b_in_bytes():
    """Weights by hand: what is stored of each parameter, and the scales."""
    experts, table = 30 * 128 * 3 * 704 * 2816, 262_144 * 2816
    projections = 25 * 2816 * 256 * (2 * 16 + 2 * 8) + 5 * 2816 * 512 * (2 * 16 + 2)
    dense = 30 * 3 * 2816 * 2112
    bf16 = estimate(CONFIG, "h200", "bf16", 1, 8192)
    rest = bf16.weights - 2 * (experts + table + projections + dense)
    assert 0 < rest < 1.3e9, "router, norms, self-conditioning, image tower"
    int8, int4 = (estimate(CONFIG, "h200", weights, 1, 8192) for weights in ("int8", "int4"))
    scales = 4 * (30 * 128 * (2 * 704 + 2816) + 262_144)
    many = experts + projections + dense
    assert int8.weights - rest == pytest.approx(many + table + scales, rel=1e-3)
    assert int4.weights - rest == pytest.approx(many * (1 / 2 + 2 / 32) + table, rel=1e-3)
    assert bf16.pass_bytes - bf16.cache == pytest.approx(50.5e9, rel=1e-3)


def test_a_pass_by_hand():
    """Operations of one canvas behind 8,192 positions, and the tokens per second that they leave."""
    found = estimate(CONFIG, "a100-80", "int4", 2, 8192)
    sliding = 2816 * 256 * (2 * 16 + 2 * 8) + 2 * 16 * 256 * (1024 + 256)
    full = 2816 * 512 * (2 * 16 + 2) + 2 * 16 * 512 * (8192 + 256)
    mlp = 3 * 2816 * (2112 + 8 * 704) + 2816 * 128
    token = 25 * sliding + 5 * full + 30 * mlp + 2 * 262_144 * 2816 + 3 * 2816 * 2112
    assert found.pass_operations == 2 * 2 * 256 * token
    assert found.computing == pytest.approx(2 * 2 * 256 * token / 312e12)
    assert found.rate(16) == pytest.approx(2 * 256 / 17 / found.computing)
    alone = estimate(CONFIG, "a100-80", "bf16", 1, 8192)
    assert alone.rate(9) == pytest.approx(256 / 10 / (alone.pass_bytes / 2.039e12))


def test_the_plan_of_the_release(release, capsys):
    arguments = [str(release), "--plan", "--gpu", "h200", "--slots", "8", "--max-model-len", "8192"]
    assert main(["inspect", *arguments, "--weights", "int8", "--steps", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sources = ("(computed", "(data sheet)", "(measured by the compiler")
    assert all(any(source in line for source in sources) for line in lines), lines
    names = ["gpu", "usable", "weights", "cache", "state", "a step", "left", "a pass", "tokens/s"]
    assert [line[:12].strip() for line in lines] == names
    assert "XLA_CLIENT_MEM_FRACTION=0.9 with memory_fraction 1" in lines[1]
    assert "26.49 GB in int8" in lines[2] and "3.02 GB for 8" in lines[3]
    assert main(["inspect", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts = ("weights", "cache", "prefixes", "aside", "states", "temporaries", "left")
    assert sum(found[part] for part in parts) == pytest.approx(found["usable"]) == 0.9 * 141e9
    assert found["origin"].startswith("measured by" if found["compiled"] else "computed")
    assert list(found["tokens_per_second_by_steps"]) == ["8", "16", "48"]


def test_what_does_not_fit_is_refused(release, capsys):
    plan = ("inspect", release, "--plan")
    refused = error_of(capsys, *plan, "--gpu", "rtx5090", "--max-model-len", "8192")
    assert "1 slots of 8,192 positions take 52," in refused and "28,800,000,000 of NVIDIA RTX 5090 may be" in refused
    for wrong, words in (
        (("--gpu", "h200", "--slots", "0"), "slots is 0; expected 1"),
        (("--gpu", "h200", "--max-model-len", "1"), "max_model_len is 1; expected 2 .. 262144"),
        (("--gpu", "h200", "--steps", "0"), "steps is 0.0; expected a positive number"),
        ((), "gpu is None; expected the GPU to plan for"),
    ):
        assert words in error_of(capsys, *plan, *wrong)
    assert "--gpu goes with --plan" in error_of(capsys, "inspect", release, "--gpu", "h200")
    assert "--plan does not go with --verify" in error_of(capsys, *plan, "--gpu", "h200", "--verify")
    with pytest.raises(SystemExit):
        main([*map(str, plan), "--gpu", "mi300"])


def test_another_model_takes_the_engines_ceiling(capsys):
    assert main(["inspect", "tiny", "--plan", "--gpu", "gb10", "--weights", "int8"]) == 0
    assert "8 MiB of temporaries (computed: the engine's ceiling)" in capsys.readouterr().out
    assert not estimate(replace(CONFIG, hidden_size=2880), "gb10", "bf16", 1, 64).compiled


def test_the_compilers_figures_are_those_that_are_stored():
    stored = json.loads(gpu_aot.RESULTS.read_text())["targets"] if gpu_aot.RESULTS.exists() else {}
    assert set(stored) == {target for target, _ in TEMPORARIES} <= {gpu.compiled for gpu in GPUS.values()}
    for (target, weights), (one, more) in TEMPORARIES.items():
        found = [stored[target]["programs"][f"loop, {rows} rows, {weights}"]["temp_mib"] for rows in (1, 2)]
        assert (one, more) == pytest.approx((found[0], found[1] - found[0])), (target, weights)


@pytest.mark.parametrize(
    ("page", "table"), [(memory_plan.PAGE, memory_plan.table), (memory_plan.README, memory_plan.short_table)]
)
def test_the_tables_of_the_pages_are_what_the_script_makes(page, table):
    assert memory_plan.BEGIN + table() + memory_plan.END in page.read_text(encoding="utf-8")
