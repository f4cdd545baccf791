"""The canvas page in a real browser, against a scripted server."""

import json
import math
import re

import pytest
from selenium.webdriver.common.keys import Keys

from tests.serve.browser import READ_CUT, Page
from tests.serve.fake_server import KEY, MARKUP, STORY, THOUGHT, WEATHER, WIDTH, FakeServer, answer_to, drafts
from tests.serve.harness import ScriptedEngine, serving

pytestmark = pytest.mark.slow
ANSWER = ".turn.model > .text"
NOTE = ".note:not([hidden])"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


def test_the_canvas_denoises_and_the_answer_appears(page, server):
    page.open(server.url, motion="no-preference")
    page.ask("Tell me a story")
    captions = page.captions()
    frames = ("before", *(f"step {step}:" for step in range(1, 7)), "done")
    steps = [f"Canvas {canvas}, {frame}" for canvas in (1, 2) for frame in frames]
    seen = [next((i for i, text in enumerate(captions) if text.startswith(start)), None) for start in steps]
    assert None not in seen and seen == sorted(seen)
    assert page.texts(ANSWER) == [STORY]
    assert re.fullmatch(r"2 canvases · 12 steps · 5\.0 tokens per step · \d+\.\d s", page.texts(".figures")[0])
    states = page.states()
    assert len(states) == WIDTH and set(states) == {"accepted", "cut"}
    (request,) = server.requests
    assert request == {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Tell me a story"}],
        "stream": True,
        "stream_drafts": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_every_draft_can_be_seen_again(page, server):
    page.open(server.url)
    page.ask("Tell me a story")
    page.ask("Reverse this list: 12 7 93 4")
    page.driver.find_element("css selector", ".turn.model button").click()  # of the first answer
    page.until("byId('scrubber').value > 2 && byId('play').textContent === 'Pause'")
    scrubber = page.find("scrubber")
    scrubber.send_keys(Keys.HOME)
    assert page.find("play").text == "Play"
    assert page.find("frame").text == f"Canvas 1, before step 1: {WIDTH} random tokens"
    assert page.states() == ["noise"] * WIDTH
    scrubber.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.find("frame").text.startswith("Canvas 1, step 3: ")
    assert page.find("frame").text == scrubber.get_attribute("aria-valuetext")
    early, states = page.texts("#cells > *"), page.states()
    assert f"{states.count('accepted')} of {WIDTH} kept" in page.find("frame").text
    assert all(early)
    (_, _, draft, *_) = drafts(answer_to(server.requests[0]).canvases[0], 6, 0)
    cells = "[...byId('cells').children]"
    heats = page.script(f"return {cells}.map((x) => Number(x.style.getPropertyValue('--heat')))")
    assert heats == pytest.approx([1 - math.exp(-nats) for nats in draft["entropy"]], abs=1e-3)
    colours = page.script(f"return {cells}.map((x) => getComputedStyle(x).backgroundColor)")
    kept = [cell for cell in zip(heats, colours, draft["accepted"], strict=True) if cell[2]]
    assert min(kept)[1] != max(kept)[1], "the entropy of what is kept is seen, too"
    look = "(state) => getComputedStyle(byId('cells').querySelector(`[data-state=${state}]`))"
    solid, dashed = page.script(
        f"return ['accepted', 'noise'].map({look}).map((x) => [x.borderTopStyle, x.backgroundImage, x.fontStyle])"
    )
    assert all(one != other for one, other in zip(solid, dashed, strict=True))  # told apart without colour
    page.find("forward").click()
    assert page.find("frame").text.startswith("Canvas 1, step 4: ")
    page.find("back").click()
    assert page.texts("#cells > *") == early
    scrubber.send_keys(Keys.END)
    assert page.find("frame").text.startswith("Canvas 2, done after 6 steps")
    page.find("play").click()
    page.until_idle()
    replayed = page.captions()[-16:]
    assert replayed[0].startswith("Canvas 1, before") and replayed[-1].startswith("Canvas 2, done")


def test_positions_are_read_with_the_arrow_keys(page, server):
    page.open(server.url)
    page.ask("Reverse this list: 12 7 93 4")
    cells = page.find("cells")
    for keys, position in [
        ((Keys.HOME,), 1),
        ((Keys.ARROW_RIGHT, Keys.ARROW_RIGHT), 3),
        ((Keys.ARROW_LEFT,), 2),
        ((Keys.ARROW_UP, Keys.ARROW_LEFT), 1),
        ((Keys.END, Keys.ARROW_DOWN), WIDTH),
    ]:
        cells.send_keys(*keys)
        assert page.find("inspected").text.startswith(f"Position {position}: ")
    cells.send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    assert re.fullmatch(r'Position 2: " 93", entropy 0\.0\d\d nats, in the answer', page.find("inspected").text)
    control = page.script("return [...byId('cells').children].map((x) => [x.textContent, 'control' in x.dataset])")
    assert ["<turn|>", True] in control and ["93", False] in control


def test_everything_is_within_reach_of_the_keyboard(page, server):
    page.open(server.url)
    page.press(Keys.TAB)
    assert page.script("return document.activeElement.className") == "skip"
    page.press(Keys.ENTER)
    page.until("document.activeElement.id === 'prompt'")
    assert page.script("return getSelection().toString()") == "Reverse this list: 12 7 93 4"
    page.press("Go on", Keys.SHIFT, Keys.ENTER, Keys.NULL, "for ever", Keys.ENTER)
    page.until("!byId('stop').hidden")
    page.press(Keys.ESCAPE)
    page.until_idle()
    assert server.requests[0]["messages"][0]["content"] == "Go on\nfor ever"
    page.script("byId('settings').open = true; document.querySelector('.skip').focus()")
    reached = []
    for _ in range(40):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        id, outline = page.script("const x = document.activeElement; return [x.id, getComputedStyle(x).outlineStyle]")
        reached.append(id)
        assert outline == "solid", f"{id} has the focus and does not show it"
        if id == "key":
            break
    wanted = [
        "cells",
        "back",
        "play",
        "scrubber",
        "prompt",
        "send",
        "reset",
        "t_max",
        "seed",
        "thinking",
        "tools",
        "key",
    ]
    assert [id for id in reached if id in wanted] == wanted
    controls = "[...document.querySelectorAll('button, input, textarea, .cells')]"
    unnamed = f"{controls}.filter((x) => !x.ariaLabel && !x.labels?.length && !x.textContent.trim())"
    assert page.script(f"return {unnamed}.map((x) => x.outerHTML)") == []


def test_stop_ends_the_request_and_forgets_the_turn(page, server):
    page.open(server.url)
    page.send("Go on for ever")
    page.until("byId('cells').querySelector('[data-state=accepted]')")
    page.find("stop").click()
    page.until_idle()
    assert server.hung_up.wait(10)
    assert page.texts(NOTE) == ["Stopped. This turn is forgotten."]
    assert page.find("prompt").get_attribute("value") == "Go on for ever"
    assert not page.find("stop").is_displayed()
    page.ask("Reverse this list: 12 7 93 4")
    assert [message["content"] for message in server.requests[-1]["messages"]] == ["Reverse this list: 12 7 93 4"]


def test_a_conversation_goes_on_until_it_is_reset(page, server):
    page.open(server.url)
    page.ask("Tell me a story, cut")
    assert page.texts(NOTE)[0] == "Cut at the longest answer or the end of the context."
    page.ask("Another")
    roles = [(message["role"], message["content"]) for message in server.requests[1]["messages"]]
    assert roles == [("user", "Tell me a story, cut"), ("assistant", STORY), ("user", "Another")]
    page.send("Go on for ever")
    page.until("!byId('stop').hidden")
    page.find("reset").click()
    page.until_idle()
    assert server.hung_up.wait(10)
    assert page.texts(".turn") == [] and page.find("prompt").get_attribute("value") == ""
    assert page.find("frame").text == "Ask something and watch."
    page.ask("Afresh")
    assert len(server.requests[-1]["messages"]) == 1


def test_reasoning_stands_apart_and_folds(page, server):
    page.open(server.url)
    page.find("settings").click()
    page.find("thinking").click()
    page.ask("Reverse this list: 12 7 93 4")
    assert server.requests[0]["chat_template_kwargs"] == {"enable_thinking": True}
    assert page.texts(".reasoning .text") == [THOUGHT] and page.texts(ANSWER) == ["4 93 7 12"]
    thought = page.driver.find_element("css selector", ".reasoning .text")
    assert thought.is_displayed()
    page.driver.find_element("css selector", ".reasoning summary").send_keys(Keys.ENTER)
    assert not thought.is_displayed()


def test_a_tool_is_called_and_its_result_answered(page, server):
    page.open(server.url)
    page.find("settings").click()
    page.find("example").click()
    page.ask("What is the weather in Oslo?")
    assert server.requests[0]["tools"] == json.loads(page.find("tools").get_attribute("value"))
    assert page.texts(".call code") == ["get_weather"]
    assert json.loads(page.texts(".call pre")[0]) == json.loads(WEATHER)
    assert not page.find("send").is_enabled()
    page.driver.find_element("css selector", ".results textarea").send_keys("rain <b>& wind</b>")
    page.driver.find_element("css selector", ".results button").click()
    page.until("document.querySelectorAll('.turn.model').length === 2")
    page.until_idle()
    assert page.texts(ANSWER)[1] == "The weather in Oslo: rain <b>& wind</b>."
    _, called, result = server.requests[1]["messages"]
    function = {"name": "get_weather", "arguments": WEATHER}
    assert called["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "rain <b>& wind</b>"}
    assert page.find("send").is_enabled()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("refuse", "The server refuses this request (400). entropy_bound: expected a number above 0"),
        ("busy", "The server is busy, try again in 7 s. 64 requests are waiting"),
        ("this breaks off", "The stream broke off before the answer was complete."),
        ("this fails", "The server gave up: the device is gone"),
    ],
)
def test_errors_are_told_and_the_conversation_stays_as_it_was(page, server, prompt, words):
    page.open(server.url)
    page.ask(prompt)
    assert page.texts(NOTE) == [f"{words} This turn is forgotten."]
    assert page.find("prompt").get_attribute("value") == prompt
    page.ask("Reverse this list: 12 7 93 4")
    assert len(server.requests[-1]["messages"]) == 1
    assert page.texts(ANSWER)[1] == "4 93 7 12"


def test_a_server_that_is_gone(driver):
    page = Page(driver)
    with FakeServer() as server:
        page.open(server.url)
    page.ask("Hello")
    assert page.texts(NOTE) == ["The server cannot be reached. Is it still running? This turn is forgotten."]


def test_the_api_key_is_asked_for_and_kept_in_memory_only(driver):
    page = Page(driver)
    with FakeServer(key=KEY) as server:
        page.open(server.url)
        assert page.find("status").text == "The server wants an API key: see Settings. no valid API key"
        page.find("key").send_keys(KEY)
        page.ask("Reverse this list: 12 7 93 4")
        assert page.texts(ANSWER) == ["4 93 7 12"] and page.find("model").text == "scripted"
        kept = page.script(
            "return JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        )
        assert KEY not in kept
        page.open(server.url)
        assert page.find("key").get_attribute("value") == ""


def test_settings_go_into_the_request_and_nothing_else_does(page, server):
    page.open(server.url)
    page.find("settings").click()
    page.find("max_denoising_steps").send_keys("12")
    page.find("seed").send_keys("7")
    page.driver.find_element("css selector", "[data-for=t_max]").send_keys(Keys.ARROW_RIGHT)
    page.find("t_min").send_keys("0.25")
    page.find("tools").send_keys(json.dumps([TOOL]))
    page.ask("Reverse this list: 12 7 93 4")
    request = server.requests[0]
    assert {key: request[key] for key in ("max_denoising_steps", "seed", "t_max", "t_min", "tools")} == {
        "max_denoising_steps": 12,
        "seed": 7,
        "t_max": 0.85,
        "t_min": 0.25,
        "tools": [TOOL],
    }
    assert "entropy_bound" not in request
    slider = page.driver.find_element("css selector", "[data-for=max_denoising_steps]")
    assert (slider.get_attribute("value"), slider.get_attribute("aria-valuetext")) == ("12", "12")
    page.find("max_denoising_steps").send_keys(Keys.BACKSPACE, Keys.BACKSPACE)
    assert slider.get_attribute("aria-valuetext") == "the server's default"
    page.ask("Again")
    assert "max_denoising_steps" not in server.requests[1]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_denoising_steps", "0", "Most steps per canvas: Value must be greater than or equal to 1."),
        ("entropy_bound", "1e", "Entropy that a step may keep, nats: Please enter a number."),
        ("tools", "[{", "Tools are not valid JSON: "),
        ("tools", "{}", "Tools must be a list, [...], of functions in OpenAI's format."),
    ],
)
def test_settings_that_cannot_be_sent_are_told(page, server, field, value, words):
    page.open(server.url)
    page.find("settings").click()
    page.find(field).send_keys(value)
    page.find("settings").find_element("css selector", "summary").click()
    page.send("Reverse this list: 12 7 93 4")
    assert page.find("status").text.startswith(words)
    assert page.script("return document.activeElement.id") == field
    assert page.find("prompt").get_attribute("value") == "Reverse this list: 12 7 93 4"
    assert server.requests == [] and page.texts(".turn") == []


def test_markup_stays_text(page, server):
    page.open(server.url)
    page.ask(f"markup {MARKUP}")
    assert page.texts(ANSWER) == [MARKUP] and page.texts(".turn.user > .text") == [f"markup {MARKUP}"]
    assert "src=x" in page.texts("#cells > *")
    assert page.script("return document.querySelectorAll('main img, main b').length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(page, server, scheme):
    page.open(server.url, scheme=scheme)
    page.ask("Tell me a story")
    page.find("scrubber").send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    (paper,) = page.luminances("body")
    assert paper[1] > 0.8 if scheme == "light" else paper[1] < 0.05
    pairs = page.luminances("#cells > *, button:enabled, .turn.user, .board")
    ratios = [(max(pair) + 0.05) / (min(pair) + 0.05) for pair in pairs]
    assert len(ratios) > WIDTH and min(ratios) >= 4.5  # WCAG 2's contrast of text


@pytest.mark.parametrize("width", [360, 800, 1280])
def test_nothing_sticks_out_sideways(page, server, width):
    page.open(server.url, width=width)
    page.find("settings").click()
    page.find("example").click()
    page.ask("What is the weather in Oslo?" + "x" * 300)
    page.driver.find_element("css selector", ".results textarea").send_keys("y" * 300)
    page.driver.find_element("css selector", ".results button").click()
    page.until("document.querySelectorAll('.turn.model').length === 2")
    page.until_idle()
    assert page.script("return document.documentElement.scrollWidth") <= width
    everything = "[...document.querySelectorAll('body *:not(.skip)')]"
    out = f"{everything}.filter((x) => x.getBoundingClientRect().right > innerWidth)"
    assert page.script(f"return {out}.map((x) => x.outerHTML)") == []


def test_the_real_server_is_understood(driver, tiny):
    """The same page, sent by `dgemma serve`; only the engine is scripted."""
    page = Page(driver)
    call = '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_response>'
    texts = iter([f"<|channel>thought\n12 7<channel|>{call}", "rain<channel|>It is fine.<turn|>"])
    with serving(ScriptedEngine(tiny, lambda _: next(texts))) as url:
        page.open(f"{url}/")
        page.find("settings").click()
        page.find("example").click()
        page.find("thinking").click()
        page.find("max_denoising_steps").send_keys("12")
        page.find("t_max").send_keys("1")
        page.ask("What is the weather in Oslo?")
        assert page.texts(NOTE) == [] and page.texts(".reasoning .text") == ["12 7"]
        assert page.texts(".call code") == ["get_weather"] and json.loads(page.texts(".call pre")[0]) == {
            "city": "Oslo"
        }
        assert set(page.states()) == {"accepted", "cut"}
        page.driver.find_element("css selector", ".results textarea").send_keys("rain")
        page.driver.find_element("css selector", ".results button").click()
        page.until("document.querySelectorAll('.turn.model').length === 2")
        page.until_idle()
        assert page.texts(ANSWER)[1] == "It is fine." and page.texts(NOTE) == []
        assert re.match(r"\d+ canvas(es)? · \d+ steps · \d+\.\d tokens per step · ", page.texts(".figures")[1])
        page.find("entropy_bound").send_keys("-1")
        page.script("byId('entropy_bound').min = -5")
        page.ask("And now?")
        assert page.texts(NOTE)[0].startswith("The server refuses this request (400). ")
        assert "entropy_bound" in page.texts(NOTE)[0]
    assert page.problems() == []


def test_events_are_read_however_the_stream_is_cut(page, server):
    """Every cut of a short stream in two, and the stream byte by byte."""
    page.open(server.url)
    stream = (
        ': hello\r\n\r\nevent: draft\r\ndata: {"tokens": ["é", "\\n", "\U0001f600"]}\r\n\r\n: on\n\n'
        'data:{"choices":\ndata: []}\n\nid: 3\nevent: canvas\rdata: {"steps": 1}\r\rdata: [DONE]\n\n'
    )
    count, only = page.driver.execute_async_script(READ_CUT, stream)
    assert count == len(stream.encode())
    assert json.loads(only) == [
        {"name": "draft", "data": {"tokens": ["é", "\n", "\U0001f600"]}},
        {"name": "message", "data": {"choices": []}},
        {"name": "canvas", "data": {"steps": 1}},
    ]
