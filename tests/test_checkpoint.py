"""Opening a model by name: directories, the hub's cache, tokenizers, dtypes, and what is said when it fails."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from dgemma_jax import checkpoint
from dgemma_jax.checkpoint import open_checkpoint, resolve
from dgemma_jax.convert.orbax_files import config_fields
from dgemma_jax.sampling import Sampling
from dgemma_jax.text.tokenizer import Tokenizer
from tests.parity.checkpoints import NARROW, WIDE, random_tensors, write

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("narrow"), NARROW)


@pytest.fixture
def directory(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def write_tokenizer(path: Path) -> Path:
    """A word tokenizer whose image placeholder lies inside NARROW's vocabulary and whose video one does not."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "hello": 3, "<|image|>": 600, "<|video|>": 700}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.add_special_tokens([name for name in vocabulary if name != "hello"])
    tokenizer.save(str(path))
    return path


def test_a_directory_without_tokenizer(directory):
    config, params, tokenizer, defaults = open_checkpoint(directory)
    assert config.vocab_size == 611 and config.dtype == "float32"
    assert tokenizer is None
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    np.testing.assert_array_equal(
        params["embedder"]["table"], random_tensors(NARROW)["model.decoder.embed_tokens.weight"]
    )
    assert defaults.stop_token_ids == (1,) and defaults.suppress == () and defaults.max_denoising_steps == 48


def test_a_text_path_and_a_model_with_images(tmp_path):
    config, params, _, defaults = open_checkpoint(str(write(tmp_path, WIDE)))
    assert config.vision is not None and len(params["vision"]["layers"]) == 2
    assert defaults.suppress == (config.image_token_id,), "also without a tokenizer that names it"


def test_the_processors_file_says_how_many_soft_tokens_an_image_has(tmp_path):
    """Its patches must be those of the model; a conversion does not fix the number."""
    directory = write(tmp_path / "model", WIDE)
    plain = open_checkpoint(directory)[0]
    assert plain.vision.max_soft_tokens == 280
    sizes = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    (directory / "preprocessor_config.json").write_text(json.dumps(sizes))
    assert open_checkpoint(directory)[0].vision.max_soft_tokens == 70
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": sizes | {"max_soft_tokens": 140}}))
    chosen = open_checkpoint(directory)[0]
    assert chosen.vision.max_soft_tokens == 140 and config_fields(chosen) == config_fields(plain)
    for wrong, message in (
        (sizes | {"patch_size": 16}, "patch_size is 16, vision_config has 4; they must be the same"),
        (sizes | {"max_soft_tokens": 100}, "max_soft_tokens is 100; expected one of 70, 140, 280, 560, 1120"),
        ([1], "holds no settings of an image processor"),
    ):
        (directory / "processor_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message):
            open_checkpoint(directory)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype("float16"), np.float32])
def test_dtypes(directory, dtype):
    config, params, _, _ = open_checkpoint(directory, dtype=dtype)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {config.dtype} == {np.dtype(dtype).name}


def test_an_unknown_dtype_is_refused(directory):
    with pytest.raises(ValueError, match="dtype is 'int8'; expected one of bfloat16, float32, float16"):
        open_checkpoint(directory, dtype="int8")
    with pytest.raises(ValueError, match="dtype is 5; expected one of bfloat16"):
        open_checkpoint(directory, dtype=5)


def test_what_is_no_tokenizer_is_refused(directory):
    with pytest.raises(ValueError, match=r"tokenizer is 5; expected the path of a tokenizer\.json"):
        open_checkpoint(directory, tokenizer=5)


def test_the_tokenizer_of_the_directory_gives_the_placeholders(directory):
    write_tokenizer(directory / "tokenizer.json")
    *_, tokenizer, defaults = open_checkpoint(directory)
    assert tokenizer.encode("hello") == [3]
    assert defaults.suppress == (600,), "700 is outside the vocabulary and can never be produced"


def test_another_tokenizer_may_be_given(directory, tmp_path):
    path = write_tokenizer(tmp_path / "other.json")
    for given in (path, str(path), Tokenizer.from_file(path), tokenizers.Tokenizer.from_file(str(path))):
        *_, tokenizer, defaults = open_checkpoint(directory, tokenizer=given)
        assert tokenizer.encode("hello") == [3] and defaults.suppress == (600,)


def test_stop_ids_outside_the_vocabulary_are_left_out(directory):
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 106, 5000]}')
    assert open_checkpoint(directory)[3].stop_token_ids == (1, 106)


@pytest.mark.parametrize(("top", "stops"), [([1, 106], (1, 106)), (None, (1,))])
def test_without_generation_config_the_stop_ids_come_from_config_json(directory, top, stops, caplog):
    (directory / "generation_config.json").unlink()
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": top}))
    defaults = open_checkpoint(directory)[3]
    assert defaults.stop_token_ids == stops and isinstance(defaults, Sampling)
    assert "config.json's" in caplog.text


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Path:
    """An empty Hugging Face home."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "hub"


def download(hub: Path, original: Path, repo: str = "org/small-it") -> Path:
    folder = hub / f"models--{repo.replace('/', '--')}"
    snapshot = Path(shutil.copytree(original, folder / "snapshots" / COMMIT))
    for ref in ("main", "v1", "refs/pr/2"):
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(COMMIT)
    return snapshot


def test_hub_names_are_found_in_the_local_cache(hub, original, monkeypatch):
    snapshot = download(hub, original)
    for revision in ("", "@main", "@v1", "@refs/pr/2", "@" + COMMIT):
        assert resolve("org/small-it" + revision) == snapshot
    assert open_checkpoint("org/small-it")[0].vocab_size == 611
    monkeypatch.setenv("HF_HOME", "elsewhere")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    assert resolve("org/small-it") == snapshot
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    shutil.copytree(hub, "cache/huggingface/hub")
    assert resolve("org/small-it").name == COMMIT


def test_a_directory_comes_before_a_hub_name(hub, original):
    download(hub, original)
    shutil.copytree(original, "org/small-it")
    assert resolve("org/small-it") == Path("org/small-it")


@pytest.mark.parametrize(
    ("name", "command"),
    [("org/small-it", "`hf download org/small-it`"), ("org/b@v2", "`hf download org/b --revision v2`")],
)
def test_what_to_do_when_a_hub_name_is_not_there(hub, name, command):
    with pytest.raises(ValueError) as error:
        open_checkpoint(name)
    message = str(error.value)
    assert command in message and str(hub) in message and "HF_HOME" in message and "\n" not in message


def test_a_revision_that_is_not_there(hub, original):
    download(hub, original)
    with pytest.raises(ValueError, match="org/small-it@v9 is neither"):
        resolve("org/small-it@v9")


@pytest.mark.parametrize("name", ["nothing", "../nothing", "a/b/c", "nothing@v1", "https://huggingface.co/org/b"])
def test_names_that_are_nothing(hub, name):
    with pytest.raises(ValueError, match="there is no model directory"):
        open_checkpoint(name)


def test_files_that_are_no_model_directory(directory):
    with pytest.raises(ValueError, match="GGUF files cannot be read"):
        open_checkpoint(directory / "model-q4.gguf")
    with pytest.raises(ValueError, match="is a file; expected the directory"):
        open_checkpoint(directory / "model.safetensors")
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json; a model directory holds"):
        open_checkpoint(directory)
    (directory / "model-q4.gguf").touch()
    with pytest.raises(ValueError, match=r"has no config\.json \(only model-q4\.gguf, and GGUF"):
        open_checkpoint(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_broken_json_names_its_file(directory, name):
    (directory / name).write_text("{")
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        open_checkpoint(directory)


def test_a_config_that_contradicts_the_tensors(directory):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["moe_intermediate_size"] = 25
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"\[6, 48, 48\], the config asks for \[6, 50, 48\]"):
        open_checkpoint(directory)


def test_tiny_is_the_bundled_model(monkeypatch, tmp_path, original):
    shutil.copytree(original, tmp_path / "tiny")
    monkeypatch.setattr(checkpoint, "BUNDLED", tmp_path)
    assert resolve("tiny") == tmp_path / "tiny"


@pytest.mark.parity
def test_what_transformers_saves(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    write(tmp_path, WIDE)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["vision_config"] |= {"use_clipped_linears": True}  # whose fresh bounds are infinite
    model = transformers.DiffusionGemmaForBlockDiffusion._from_config(transformers.DiffusionGemmaConfig(**fields))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    assert "per_layer_config" in (tmp_path / "saved" / "config.json").read_text()
    config, params, _, defaults = open_checkpoint(tmp_path / "saved")
    assert config.dtype == "bfloat16" and config.layers == open_checkpoint(tmp_path)[0].layers
    table = model.model.decoder.embed_tokens.weight.detach().float().numpy()
    np.testing.assert_array_equal(np.asarray(params["embedder"]["table"], np.float32), table)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1 and defaults.t_max == 0.8
