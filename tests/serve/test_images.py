"""Images over HTTP: what reaches the model through the official client, and what is refused before it."""

import base64
import io

import httpx2
import numpy as np
import openai
import pytest
from PIL import Image

from dgemma_jax.images import prepare
from dgemma_jax.serve import images
from dgemma_jax.serve.images import ImageRules
from tests.images.vision_models import VISION, vision_model
from tests.random_models import random_model
from tests.serve.harness import NAME, ScriptedEngine, serving

PIXELS = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


def png(pixels: np.ndarray = PIXELS) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


URL = "data:image/png;base64," + base64.b64encode(png()).decode()


def shown(*urls: str) -> list[dict]:
    """A user's turn with images."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "w5"}]}]


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine(vision_model(), lambda request: "w7 w8")


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine) as url:
        yield url


def refused(url: str, messages: list[dict]) -> str:
    answer = httpx2.post(f"{url}/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "\n" not in message
    return message


def test_an_image_reaches_the_model(url, engine):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model=NAME, messages=shown(URL), max_tokens=2)
    assert answer.choices[0].message.content == "w7 w8"
    (placed,) = engine.requests[-1].images
    assert placed.image.digest == prepare(PIXELS, VISION).digest
    assert answer.usage.prompt_tokens == len(engine.requests[-1].ids) > placed.image.tokens == 64


def test_what_has_no_effect_is_named(url):
    messages = shown(URL)
    messages[0]["content"][0]["image_url"]["detail"] = "high"
    answer = httpx2.post(f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert answer.headers["X-Ignored-Fields"] == "messages.content.image_url.detail"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (shown("https://example.com/a.png"), "is no data: URL; send one (remote images need --allow-remote-images)"),
        (shown("/etc/passwd"), "messages[0].content[0]: the image '/etc/passwd' is no data: URL"),
        (shown("file:///etc/passwd"), "is no data: URL"),
        (shown(URL[:200]), "the image of the data: URL is not base64"),
        (shown("data:image/png;base64,aGk="), "the image of 2 bytes is none that can be read"),
        (shown("data:text/plain;base64,aGk="), "is no data:image/TYPE;base64"),
        (shown(*[URL] * 9), "messages hold 9 images; this server reads at most 8 in one request"),
        (shown(*[URL] * 2), "leaves no room in a context of 128"),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
            "messages[0].content[0].type is 'input_audio': expected 'text', 'image_url'; the model reads text and",
        ),
        (
            [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": URL}}]}],
            "the model reads text and images, no audio, no video and no files",
        ),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url.url is missing"),
    ],
)
def test_what_cannot_be_read_is_refused(url, messages, message):
    assert message in refused(url, messages)


def test_a_model_without_an_image_tower_says_so():
    with serving(ScriptedEngine(random_model(tokenizer=vision_model().tokenizer), lambda request: "w7")) as url:
        assert "messages[0] holds a part of type 'image_url'; this model reads no images" in refused(url, shown(URL))


def test_remote_images_are_fetched_where_that_is_allowed(engine, monkeypatch):
    fetched = []
    monkeypatch.setattr(images, "fetch", lambda url: fetched.append(url) or png())
    with serving(engine, images=ImageRules(most=1, remote=True)) as url:
        answer = httpx2.post(f"{url}/v1/chat/completions", json={"messages": shown("https://a.example/b.png")})
        assert answer.status_code == 200 and fetched == ["https://a.example/b.png"]
        assert engine.requests[-1].images[0].image.digest == prepare(PIXELS, VISION).digest
        assert "at most 1 in one request" in refused(url, shown("https://a.example/b.png", URL))
        assert len(fetched) == 1
