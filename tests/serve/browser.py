"""Debian's Chromium, driven by selenium, for the page's test."""

import base64
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE = 30  # seconds, on a machine that is busy with other things
MISSING = "chromium and chromedriver are not on PATH; apt-get install chromium chromium-driver"
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which Chromium refuses to start without as root
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
OBSERVE = """
window.captions = [];
const frame = document.getElementById("frame");
new MutationObserver(() => window.captions.push(frame.textContent)).observe(frame, {childList: true});
"""

# drops files on the page: [name, type, base64]
DROP = """
const data = new DataTransfer();
for (const [name, type, body] of arguments[0]) {
  const bytes = Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0));
  data.items.add(new File([bytes], name, { type }));
}
document.body.dispatchEvent(new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: data }));
"""
LUMINANCE = """
const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const luminance = (colour) => {
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((x) => x / 255)
    .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
"""
# the events of a stream, once for each cut of it in two and once byte by byte: how often, and what was found
READ_CUT = """
const [text, done] = arguments;
const bytes = new TextEncoder().encode(text);
const { complete } = await import("/static/stream.js");
const body = (cuts) => new ReadableStream({ start(controller) {
  [0, ...cuts].forEach((cut, i) => controller.enqueue(bytes.slice(cut, cuts[i] ?? bytes.length)));
  controller.close();
}});
const real = window.fetch;
const all = [...bytes.keys()].slice(1);
const read = [];
for (const cuts of [all, ...all.map((cut) => [cut])]) {
  window.fetch = async () => new Response(body(cuts));
  const events = [];
  for await (const event of complete({}, "", new AbortController().signal)) events.push(event);
  read.push(JSON.stringify(events));
}
window.fetch = real;
done([read.length, ...new Set(read)]);
"""


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """A browser. Where there is none the test is skipped, in CI it fails."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(MISSING)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for flag in FLAGS:
        options.add_argument(flag)
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


class Page:
    """The page in a browser, with what a user sees and does."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, width: int = 1280, scheme: str = "light", motion: str = "reduce") -> None:
        """Loads the page anew and waits until it knows the model's name or says why not."""
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        wishes = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(url)
        self.until("byId('model').textContent || byId('status').textContent")
        self.script(OBSERVE)

    def script(self, code: str, *values) -> Any:
        """What the function body `code` returns; byId is at hand."""
        return self.driver.execute_script(f"const byId = (id) => document.getElementById(id); {code}", *values)

    def until(self, condition: str) -> None:
        """Waits for a condition in JavaScript."""
        waiting = WebDriverWait(self.driver, PATIENCE, poll_frequency=0.05)
        waiting.until(lambda _: self.script(f"return Boolean({condition})"), f"never came true: {condition}")

    def find(self, id: str) -> WebElement:
        return self.driver.find_element("id", id)

    def texts(self, selector: str) -> list[str]:
        """The text, also of what is out of sight, of all elements that match."""
        return self.script("return [...document.querySelectorAll(arguments[0])].map((x) => x.textContent)", selector)

    def send(self, text: str) -> None:
        """Types a prompt and presses Enter."""
        self.find("prompt").send_keys(Keys.CONTROL, "a", Keys.NULL, text, Keys.ENTER)

    def ask(self, text: str) -> None:
        """Sends a prompt and waits until the answer is complete, has failed or waits for a tool."""
        self.send(text)
        self.until_idle()

    def until_idle(self) -> None:
        self.until("byId('stop').hidden && byId('play').textContent === 'Play'")

    def press(self, *keys: str) -> None:
        """Types keys into whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def captions(self) -> list[str]:
        """Every caption that the canvas has had."""
        return self.script("return window.captions")

    def states(self) -> list[str]:
        """The state of every cell."""
        return self.script("return [...byId('cells').children].map((cell) => cell.dataset.state)")

    def luminances(self, selector: str) -> list[tuple[float, float]]:
        """The relative luminance (WCAG 2) of text and of what is behind it, for all elements that match."""
        styles = "[...document.querySelectorAll(arguments[0])].map((x) => getComputedStyle(x))"
        return self.script(
            f"{LUMINANCE} return {styles}.map((x) => [x.color, x.backgroundColor].map(luminance))", selector
        )

    def picture(self, path: Path, height: int) -> None:
        """Stores what is seen of the top of the page, with nothing in focus, as PNG."""
        self.script("document.activeElement.blur(); scrollTo(0, 0)")
        clip = {"x": 0, "y": 0, "width": self.script("return innerWidth"), "height": height, "scale": 1}
        found = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})
        path.write_bytes(base64.b64decode(found["data"]))

    def problems(self) -> list[str]:
        """What the browser complained of, but for answers with an error status."""
        entries = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]
        return [text for text in entries if "the server responded with a status of" not in text]

    def requested(self) -> list[str]:
        """The addresses that the page asked for since it was opened; a data: URL is no address."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]
