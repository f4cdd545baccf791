"""What auto takes on devices that are not there, what is refused and in which words, and that nothing is replaced."""

import logging
import subprocess
import sys

import pytest

import dgemma_jax as dg
from dgemma_jax.kernels import selection
from dgemma_jax.kernels.mixed_attention.launch import TILES
from dgemma_jax.kernels.selection import Device

HEADS = {"sliding": 256, "full": 512}
CPU = Device("cpu")
H200 = Device("cuda", "NVIDIA H200", (9, 0), 232_448, jax_version=(0, 11, 2))


def gpu(**fields) -> Device:
    return Device(**{**vars(H200), **fields})


@pytest.mark.parametrize(
    ("device", "attention", "experts"),
    [
        (CPU, "xla", "xla"),
        (Device("tpu"), "xla", "xla"),
        (H200, "pallas", "pallas"),
        (gpu(jax_version=(0, 10, 2)), "pallas", "pallas"),
        (gpu(kind="NVIDIA GB10", capability=(12, 1), shared=101_376), "pallas", "pallas"),
        (gpu(shared=65_536), "xla", "xla"),
        (gpu(shared=81_920), "xla", "pallas"),
        (gpu(capability=(7, 5), shared=65_536), "xla", "xla"),
        (gpu(jax_version=(0, 13, 0)), "xla", "xla"),
        (gpu(jax_version=(0, 13, 0), jax_triton=True), "xla", "xla"),
        (gpu(jax_version=(0, 11, 2), jax_triton=True), "pallas", "pallas"),
    ],
)
def test_auto_takes_what_runs(device, attention, experts):
    assert selection.attention("auto", device, HEADS, 2) == attention
    assert selection.experts(device) == experts


def test_auto_takes_triton_where_pallas_has_gone(monkeypatch):
    monkeypatch.setitem(selection.JAX_BELOW, "pallas", (0, 11))
    assert selection.attention("auto", gpu(jax_triton=True), HEADS, 2) == "triton"
    assert selection.attention("auto", H200, HEADS, 2) == "xla"


@pytest.mark.parametrize("device", [CPU, H200, gpu(jax_triton=True)], ids=["cpu", "gpu", "gpu with jax-triton"])
@pytest.mark.parametrize("name", ["reference", "xla", "pallas", "triton"])
def test_a_name_is_taken_at_its_word_or_refused(device, name):
    if name == "triton" and not device.jax_triton:
        with pytest.raises(ValueError, match="triton"):
            selection.attention(name, device, HEADS, 2)
    else:
        assert selection.attention(name, device, HEADS, 2) == name


@pytest.mark.parametrize(
    ("name", "device", "heads", "why"),
    [
        ("triton", CPU, HEADS, "it needs a CUDA GPU, and this is cpu"),
        ("pallas", Device("tpu"), HEADS, "it needs a CUDA GPU, and this is tpu"),
        ("triton", H200, HEADS, "it needs jax-triton (pip install 'dgemma-jax[triton]')"),
        ("triton", gpu(jax_version=(0, 12, 0)), HEADS, "it needs jax below 0.12, and this is 0.12.0"),
        ("pallas", gpu(capability=(7, 5)), HEADS, "it needs compute capability 8.0, and NVIDIA H200 has 7.5"),
        ("pallas", H200, {"full": 1024}, "tiles for heads up to 512 wide, and those of full layers are 1024 wide"),
        ("pallas", gpu(shared=65_536), HEADS, "takes 98848 bytes of shared memory, and a program has 65536"),
        ("sdpa", H200, HEADS, "there is no such implementation"),
        (None, H200, HEADS, "there is no such implementation"),
        ("", CPU, HEADS, "there is no such implementation"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(name, device, heads, why):
    with pytest.raises(ValueError) as error:
        selection.attention(name, device, heads, 2)
    message = str(error.value)
    assert "\n" not in message and why in message
    assert message.startswith(f"attention_implementation is {name!r}") and "; here auto, reference, xla" in message


@pytest.mark.parametrize("name", ["flashinfer", "cudnn", "flash_attn", "flash-attn", "flash_attention_2", "FlashInfer"])
@pytest.mark.parametrize("device", [CPU, H200], ids=str)
def test_kernels_of_others_are_refused_by_name(name, device):
    with pytest.raises(
        ValueError, match="heads 512 wide and per-row causality; here auto, reference, xla, pallas work"
    ):
        selection.attention(name, device, HEADS, 2)


def test_one_line_names_the_tile_of_each_kind_of_layer():
    line = selection.describe("pallas", H200, HEADS, 2)
    assert "\n" not in line and "pallas on NVIDIA H200" in line
    for kind, width in HEADS.items():
        tile = TILES[width]
        assert f"{kind} layers, heads {width} wide: {tile.queries} queries x {tile.keys} keys" in line
    assert selection.describe("xla", CPU, HEADS, 4) == "attention: xla on cpu"
    assert "interpreted" in selection.describe("pallas", CPU, HEADS, 4)


def test_every_tile_has_its_bytes():
    assert [list(by_width) for by_width in selection.TILE_BYTES.values()] == [list(TILES)] * 2


@pytest.mark.gpu_offline
@pytest.mark.filterwarnings("ignore:.*Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("width", TILES)
def test_tiles_take_no_more_shared_memory_than_stated(width, dtype, itemsize):
    pytest.importorskip("triton", reason="the triton wheel compiles the kernel; install it to run this")
    from dgemma_jax.kernels.mixed_attention.offline import GPUS, Case, compile_pallas, compile_triton

    case = Case("", H=width, K=2, S=8192, window=None, dtype=dtype)
    most = max(compiled(case, gpu).shared for compiled in (compile_pallas, compile_triton) for gpu in GPUS.values())
    assert most <= selection.TILE_BYTES[itemsize][width]


def test_this_machine_is_described():
    device = selection.this_device()
    assert device.platform == "cpu" and str(device) == "cpu"


def test_a_model_runs_what_was_chosen_and_says_so_once(caplog):
    with caplog.at_level(logging.INFO, logger="dgemma_jax.api"):
        model = dg.load("tiny", attention_implementation="reference")
        assert dg.load("tiny").graph != model.graph
    assert [record.getMessage() for record in caplog.records] == [
        "attention: reference on cpu; experts: xla",
        "attention: xla on cpu; experts: xla",
    ]
    assert dg.load("tiny", attention_implementation="xla").graph == dg.load("tiny").graph


def test_a_choice_is_refused_before_weights_are_read(monkeypatch):
    def read(*_):
        raise AssertionError("the weights were read")

    monkeypatch.setattr("dgemma_jax.api.read_checkpoint", read)
    with pytest.raises(ValueError, match="attention_implementation is 'flashinfer'"):
        dg.load("tiny", attention_implementation="flashinfer")
    with pytest.raises(AssertionError, match="the weights were read"):
        dg.load("tiny")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_command_line_chooses(command):
    line = [sys.executable, "-m", "dgemma_jax.cli", command, "--seed", "1", "--max-new-tokens", "4"]

    def run(name: str) -> subprocess.CompletedProcess:
        arguments = [*line, "--attention-implementation", name]
        return subprocess.run(arguments, capture_output=True, text=True, check=False, input="Reverse a b")

    done = run("reference")
    assert done.returncode == 0 and done.stderr.startswith("dgemma: attention: reference on cpu; experts: xla\n")
    done = run("flashinfer")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith("dgemma: error: attention_implementation is 'flashinfer'")
