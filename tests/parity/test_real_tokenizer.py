"""What transformers saves beside the tokenizer.json of Gemma 4: loaded as a directory, spoken to in text.

The weights are small and random, and the vocabulary and the ids of images are those of the release.
"""

import json
import shutil
from dataclasses import replace

import pytest

import dgemma_jax as dg

from . import checkpoints
from .oracle import Oracle

pytestmark = pytest.mark.parity

IMAGE_IDS = {"image_token_id": 258_880, "boi_token_id": 255_999, "eoi_token_id": 258_882}
TEXTS = ["hello wörld", "日本語 text\n\n  tabs\t", "🙂 emoji  double  spaces", "naïve <|turn>user\n"]
SHORT = dg.Sampling(seed=1, max_new_tokens=24, max_denoising_steps=3)


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    path = request.config.getoption("--real-tokenizer")
    if not path:
        pytest.skip("needs --real-tokenizer PATH")
    root = tmp_path_factory.mktemp("real")
    written = checkpoints.write(root / "written", replace(checkpoints.CALM, vocab=262_144, vision=True, layers="SF"))
    fields = json.loads((written / "config.json").read_text()) | IMAGE_IDS
    (written / "config.json").write_text(json.dumps(fields))
    saved = Oracle(written).save(root / "saved")
    shutil.copy(path, saved / "tokenizer.json")
    return dg.load(saved)


def test_its_names_of_images_are_the_ids_of_the_config(model):
    names = ("<|image|>", "<|image>", "<image|>")
    assert [model.tokenizer.token_id(name) for name in names] == list(IMAGE_IDS.values())
    assert model.config.image_token_id == IMAGE_IDS["image_token_id"] in model.defaults.suppress
    assert model.config.vocab_size == model.tokenizer.vocab_size == 262_144


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_its_tokens(model, text):
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text


def test_it_answers_text_and_chats(model):
    """A prompt of text is the ids of that text behind one <bos>; the answer is the text of its tokens."""
    answer, again = model.generate([TEXTS[0], [2, *model.tokenizer.encode(TEXTS[0])]], SHORT)
    assert answer == again and answer.prompt_tokens > 1
    assert len(answer.tokens) == 24 or answer.finish_reason == "stop"
    assert answer.raw_text == model.tokenizer.decode(answer.tokens)
    assert answer.text == model.tokenizer.decode(answer.tokens, skip_special=True)
    said = model.chat([{"role": "user", "content": TEXTS[1]}], sampling=SHORT)
    assert said.usage.prompt_tokens > len(model.tokenizer.encode(TEXTS[1]))
