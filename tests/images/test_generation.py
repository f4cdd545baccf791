"""Requests with images on a small random model: sources, chunks, prefixes, rows, refusals."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("PIL", reason="images need Pillow; pip install '.[images]'")
from PIL import Image
from rich.console import Console

import dgemma_jax as dg
from dgemma_jax import batch, cli_chat, cli_generate
from dgemma_jax.cli import main
from dgemma_jax.fidelity import compare
from dgemma_jax.images import prepare
from tests.compilations import Compilations
from tests.images.vision_models import small, spelled, vision_model, words
from tests.random_models import SMALL, random_model

C = SMALL.canvas_length
SAMPLING = dg.Sampling(max_new_tokens=C, seed=1)
NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)  # 64 soft tokens
ANSWER = dg.ChatMessage("w7", "", [], "stop", dg.Usage(1, 1, 1, 1))


def png() -> bytes:
    out = io.BytesIO()
    Image.fromarray(NOISE).save(out, "PNG")
    return out.getvalue()


PNG = png()
pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def model():
    return vision_model()


def generate(model, prompts, images, **chosen):
    """With two slots and 128 positions, as everything here: few shapes, few programs."""
    return model.generate(prompts, replace(SAMPLING, **chosen), images=images, slots=2)


A, B = small(1, 2, 3), small(2, 3, 4)  # 6 and 12 soft tokens


def test_nothing_is_compiled_after_the_warm_up(model, abstract_arrays):
    """First of all, so that its programs serve the other tests, too."""
    with dg.Engine(model, slots=2, prefill_chunk=64, prefix_cache_bytes=0) as engine:
        engine.warmup()
        engine.submit([5, 6], SAMPLING).result(300)
        with Compilations() as seen:
            engine.submit(spelled(2, A, 5, B), SAMPLING, images=[A, B]).result(300)
    assert seen.names == []


def test_the_warm_up_compiles_six_programs(model, monkeypatch):
    monkeypatch.setattr(model._programs, "compile", lambda calls: None)
    assert model.scheduler(slots=2).warmup() <= 6


def test_every_source_of_an_image_gives_the_same_answer(model, tmp_path):
    path = tmp_path / "noise.png"
    path.write_bytes(PNG)
    sources = [NOISE, path, str(path), PNG, Image.open(path), [NOISE]]
    text = "w5 <|image|> w6"
    answers = generate(model, [text] * len(sources), sources)
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    assert answers[0].prompt_tokens == 1 + 2 + 66
    assert generate(model, text, NOISE) == generate(model, text, [NOISE]) == answers[:1]
    assert generate(model, text, 255 - NOISE)[0].tokens != answers[0].tokens


def test_messages_hold_images_in_both_formats(model):
    text = {"type": "text", "text": "w5"}
    ours = [{"role": "user", "content": [text, {"type": "image", "image": A}, {"type": "image", "image": B}]}]
    openais = [{"role": "user", "content": [text, *({"type": "image_url", "image_url": {"url": x}} for x in (A, B))]}]
    ids = model.chat_prompt(ours)
    assert ids == model.chat_prompt(openais) == spelled(2, 10, 0, 5, A, B, 11, 10, 0)  # unknown words are w0
    requests = [model.request(messages, SAMPLING) for messages in (ours, openais)]
    assert requests[0] == requests[1] and [one.image for one in requests[0].images] == [A, B]
    told = [event.completion for _, event in model.serve(enumerate(requests), 2) if isinstance(event, dg.Finished)]
    (expected,) = generate(model, [ids], [[A, B]])
    assert told[0].tokens == told[1].tokens == expected.tokens


def test_commands_show_images(model, tmp_path, monkeypatch, capsys):
    """`dgemma generate` with --image, --raw and --input; `dgemma chat` with /image."""
    (tmp_path / "noise.png").write_bytes(PNG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_generate, "load_model", lambda *_: model)
    knobs = ["--image", "noise.png", "--seed", "1", "--max-new-tokens", str(C), "--slots", "2"]
    user = [{"role": "user", "content": [{"type": "image", "image": NOISE}, {"type": "text", "text": "w5"}]}]
    ((_, asked),) = [
        pair for pair in model.serve([(0, model.request(user, SAMPLING))], 2) if type(pair[1]) is dg.Finished
    ]
    assert main(["generate", "w5", *knobs]) == 0
    assert capsys.readouterr().out.strip() == asked.completion.text
    assert main(["generate", "--raw", "w5 <|image|>", *knobs]) == 0
    assert capsys.readouterr().out.strip() == generate(model, "w5 <|image|>", NOISE)[0].text != asked.completion.text
    lines = [{"prompt": "w5", "images": "noise.png"}, {"messages": [{"role": "user", "content": [
        {"type": "image", "image": "noise.png"}, {"type": "text", "text": "w5"}]}]}, {"prompt": "w5", "images": [5]},
        {"messages": [], "images": []}]  # fmt: skip
    told = [line for line in batch.answers(model, map(json.dumps, lines), SAMPLING, slots=2) if isinstance(line, dict)]
    told = {line["id"]: line for line in told}
    assert told[0]["tokens"] == told[1]["tokens"] == asked.completion.tokens
    assert told[2]["error"].startswith("images is [5]; expected") and told[3]["error"].startswith("images go with")

    said = []
    fake = SimpleNamespace(reader=model.reader, chat=lambda messages, *_: said.append([*messages]) or ANSWER)
    talk = cli_chat.Conversation(fake, Console(), None, False, SAMPLING, 1)
    with pytest.raises(ValueError, match=r"nowhere.png' cannot be opened"):
        talk.take("/image nowhere.png")
    talk.take("/image noise.png")
    talk.take("w5")
    talk.take("w6")
    (image, text), then = said[0][0]["content"], said[1][-1]["content"]
    assert (image["image"].digest, text["text"], then) == (prepare(NOISE, model.config.vision).digest, "w5", "w6")


@pytest.mark.parametrize("chunk", [9, 20])
def test_chunks_do_not_split_an_image(model, chunk):
    """Images longer than the chunk, at its end, at its beginning; the same answer as in one piece."""
    ids = spelled(2, 5, 6, A, B, 7, 8, 9, B, 5)
    (whole,) = generate(model, [ids], [[A, B, B]])
    with dg.Engine(model, slots=2, prefill_chunk=chunk) as engine:
        assert engine.submit(ids, SAMPLING, images=[A, B, B]).result(300) == whole
        assert engine.stats.images == 2  # one of them twice


def test_prompts_with_images_share_a_chunk(model):
    rows = [(spelled(2, A, 5), A), (spelled(2, B, 5), B)]
    scheduler = model.scheduler(2, prefill_chunk=128)
    jobs = [scheduler.submit(model.request(ids, SAMPLING, images=image)) for ids, image in rows]
    scheduler.advance()
    assert [job.encoded for job in jobs] == [len(ids) for ids, _ in rows]
    while scheduler.busy:
        scheduler.advance()
    for job, (ids, image) in zip(jobs, rows, strict=True):
        assert job.answer.completion() == generate(model, [ids], [image])[0]


def test_an_image_longer_than_a_chunk_shares_none(model):
    scheduler = model.scheduler(2, prefill_chunk=9)
    text, image = (
        scheduler.submit(model.request(ids, SAMPLING, images=own))
        for ids, own in (([2, 5], None), (spelled(2, B, 5), B))
    )
    seen = []
    for _ in range(4):
        scheduler.advance()
        seen.append((text.encoded, image.encoded))
    assert seen == [(2, 0), (2, 2), (2, 14), (2, 16)]


def test_rows_do_not_depend_on_each_other(model):
    rows = [spelled(2, A, 5), [2, 5, 6, 7], spelled(2, B, 5), spelled(2, A, 5)]
    images = [A, None, B, replace(A, patches=255 - A.patches)]
    together = generate(model, rows, images)
    assert together == [generate(model, [row], [own])[0] for row, own in zip(rows, images, strict=True)]
    assert len({tuple(answer.tokens) for answer in together}) == 4


def test_copies_of_an_answer_see_the_image_once(model):
    with dg.Engine(model, slots=2) as engine:
        request = model.request(spelled(2, A, 5), SAMPLING, images=A)
        handles = [engine.submit_request(replace(request, copy=copy)) for copy in range(2)]
        assert len({tuple(handle.result(300).tokens) for handle in handles}) == 2
        assert engine.stats.images == 1


def test_an_encoded_prefix_is_another_with_another_image(model):
    cold = lambda ids, images: generate(model, [ids], [images])[0]  # noqa: E731
    with dg.Engine(model, slots=2, prefix_cache_bytes=10**7) as engine:
        ask = lambda ids, images: engine.submit(ids, SAMPLING, images=images).result(300)  # noqa: E731
        first = spelled(2, A, 5)
        ask(first, A)
        longer = [*first, 6, 7, *spelled(B, 8)]
        again = ask(longer, [A, B])
        assert again.cached_tokens == len(first) and engine.stats.images == 2
        assert replace(again, cached_tokens=0) == cold(longer, [A, B])
        other = replace(A, patches=255 - A.patches)
        fresh = ask(longer, [other, B])
        assert fresh.cached_tokens == 0 and fresh.tokens != again.tokens
        assert ask([*longer, 9], [other, B]).cached_tokens == len(longer)
        assert ask([*longer, 9], [other, replace(B, columns=4)]).cached_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ("w5 <|image|>", None, "holds 1 placeholders of images and 0 images are given"),
        ("w5", NOISE, "holds 0 placeholders of images and 1 images are given; write"),
        ([5, 90], None, r"holds 1 placeholders \(id 90\); its 0 images take \[\]"),
        (spelled(5, A), B, r"its 1 images take \[12\]"),
        ("<|image|>", "nowhere.png", "image 'nowhere.png' cannot be opened"),
        ("<|image|>", 5, "image 5 is a int; expected a path"),
    ],
)
def test_images_that_do_not_fit_their_prompt_are_refused(model, prompt, images, message):
    with pytest.raises(ValueError, match=message) as error:
        model.generate([prompt], SAMPLING, images=[images])
    assert "\n" not in str(error.value)


def test_what_does_not_go_together_is_refused(model):
    user = [{"role": "user", "content": [{"type": "image", "image": A}]}]
    with pytest.raises(ValueError, match="those of a conversation are parts of its messages"):
        model.request(user, images=A)
    with pytest.raises(ValueError, match="images has 1 entries for 2 prompts"):
        model.generate(["w5", "w6"], images=[A])
    with pytest.raises(ValueError, match=r"images is 'a.png'; expected a list with those of each prompt"):
        model.generate(["w5", "w6"], images="a.png")
    with pytest.raises(ValueError, match=r"messages\[0\] holds a part of type 'video'; only text and images are read"):
        model.chat([{"role": "user", "content": [{"type": "video"}]}])
    text_only = random_model(tokenizer=words(), max_model_len=64)
    for call in (lambda: text_only.generate("<|image|>", images=NOISE), lambda: text_only.chat(user)):
        with pytest.raises(ValueError, match=r"this model reads no images: its config.json has no vision_config"):
            call()


def test_a_report_looks_at_the_images(model):
    """A model with another tower differs behind an image and nowhere else."""
    vision = model.params["vision"]
    params = model.params | {"vision": vision | {"projection": -vision["projection"]}}
    other = dg.Model(model.config, params, model.tokenizer, model.defaults)
    behind, plain = model.request("<|image|>w5", SAMPLING, images=A), model.request("w5", SAMPLING)
    assert compare(model, other, [plain], slots=2).rms_error == 0
    assert compare(model, other, [behind], slots=2).rms_error > 0
