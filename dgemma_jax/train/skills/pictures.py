"""Pictures of 64 x 64 pixels: which shape they show in which colour, and how many dots."""

import base64
import random
from collections.abc import Sequence
from io import BytesIO

from PIL import Image, ImageDraw

from dgemma_jax.train.skills.question import Question

SIDE = 64
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
    "pink": (245, 150, 190),
    "brown": (130, 80, 40),
}
GROUNDS = ("white", "black", "green", "blue")
SHAPES = ("circle", "square", "triangle")
MOST_DOTS = 4


def shape(rng: random.Random) -> Question:
    """One shape in one colour on a ground of another."""
    name, colour, ground = rng.choice(SHAPES), *_colours(rng)
    radius = rng.randint(9, 26)
    x, y = (rng.randint(radius, SIDE - 1 - radius) for _ in range(2))
    image, draw = _canvas(rng, ground)
    ink = _shade(rng, colour)
    if name == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), ink)
    elif name == "square":
        draw.rectangle((x - radius, y - radius, x + radius, y + radius), ink)
    else:
        draw.polygon(((x, y - radius), (x - radius, y + radius), (x + radius, y + radius)), ink)
    essence = f"{name} {colour} {ground} {radius} {x} {y}"
    return _about(image, essence, rng.choice(("What is this?", "What is in this picture?")), f"A {colour} {name}.")


def dots(rng: random.Random) -> Question:
    """One to four dots of one colour that do not touch."""
    count, (colour, ground) = rng.randint(1, MOST_DOTS), _colours(rng)
    places = _apart(rng, count)
    image, draw = _canvas(rng, ground)
    ink = _shade(rng, colour)
    for x, y, radius in places:
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), ink)
    return _about(image, f"dots {places}", "How many dots are there?", str(count))


def _colours(rng: random.Random) -> tuple[str, str]:
    """Of what is shown, and of the ground."""
    ground = rng.choice(GROUNDS)
    return rng.choice([colour for colour in COLOURS if colour != ground]), ground


def _shade(rng: random.Random, colour: str) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, part + rng.randint(-15, 15))) for part in COLOURS[colour])
    return red, green, blue


def _canvas(rng: random.Random, ground: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (SIDE, SIDE), _shade(rng, ground))
    return image, ImageDraw.Draw(image)


def _apart(rng: random.Random, count: int) -> list[tuple[int, int, int]]:
    """Centres and radii in order, at least four pixels between any two dots."""
    found: list[tuple[int, int, int]] = []
    while len(found) < count:
        radius = rng.randint(4, 7)
        x, y = (rng.randint(radius, SIDE - 1 - radius) for _ in range(2))
        if all((x - u) ** 2 + (y - v) ** 2 >= (radius + r + 4) ** 2 for u, v, r in found):
            found.append((x, y, radius))
    return sorted(found)


def _about(image: Image.Image, essence: str, text: str, answer: str) -> Question:
    file = BytesIO()
    image.quantize(4).save(file, "PNG", optimize=True)
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts: Sequence[dict] = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return Question((essence,), [{"role": "user", "content": parts}], f"{answer}<turn|>")
