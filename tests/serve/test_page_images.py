"""Images on the canvas page, in a real browser."""

import base64

import pytest

from tests.serve.browser import DROP

pytestmark = pytest.mark.slow
ANSWER = ".turn.model > .text"
PICTURE = base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg' width='7' height='5'/>").decode()


def test_dropped_images_go_with_the_prompt(page, server):
    page.open(server.url)
    files = [["a.svg", "image/svg+xml", PICTURE], ["b.txt", "text/plain", "aGk="], ["c.svg", "image/svg+xml", PICTURE]]
    page.script(DROP, files)
    page.until("document.querySelectorAll('#images img').length === 2")
    assert page.texts("#status") == ["b.txt is no image."]
    page.script("document.querySelector('#images button').click()")
    page.ask("What is this?")
    assert page.texts(ANSWER) == ["1 images"]
    assert page.script("return document.querySelector('.turn.user img').naturalWidth") == 7
    assert page.script("return byId('images').hidden")
    url = f"data:image/svg+xml;base64,{PICTURE}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    assert server.requests[-1]["messages"] == [{"role": "user", "content": parts}]
    page.ask("And now?")
    first, _, last = server.requests[-1]["messages"]
    assert (first["content"], last["content"]) == (parts, "And now?")


def test_images_of_a_request_that_fails_stay_beside_the_prompt(page, server):
    page.open(server.url)
    page.script(DROP, [["a.svg", "image/svg+xml", PICTURE]])
    page.until("document.querySelectorAll('#images img').length === 1")
    page.ask("refuse this")
    assert page.script("return document.querySelectorAll('#images img').length") == 1
    assert page.find("prompt").get_attribute("value") == "refuse this"
    page.find("reset").click()
    assert page.script("return byId('images').hidden")
