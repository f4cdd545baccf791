"""The fixed file of held-out prompts on which the bundled model is measured."""

import gzip
import json
from pathlib import Path

from dgemma_jax.train.data import Example, held_out
from dgemma_jax.train.skills import SKILLS

COUNT = 500  # per skill
SEED = 2


def write(path: Path) -> None:
    """One line of JSON per prompt, skill by skill, compressed; the same bytes every time."""
    lines = [
        json.dumps({"skill": skill, **example._asdict()})
        for skill in SKILLS
        for example in held_out(skill, COUNT, SEED)
    ]
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))


def read(path: Path) -> dict[str, list[Example]]:
    """The examples by skill."""
    found: dict[str, list[Example]] = {}
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        entry = json.loads(line)
        gap = entry["gap"] and tuple(entry["gap"])
        found.setdefault(entry["skill"], []).append(
            Example(entry["prompt"], entry["answer"], gap, tuple(entry["images"]))
        )
    return found
