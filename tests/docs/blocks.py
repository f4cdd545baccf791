"""The fenced blocks of the README and the documentation, and the commands in them.

A command with a tag in its comment, as in `dgemma chat  # [terminal]`, is not run but checked in another way; so is a
Python block that begins with such a comment. TAGS says what they need that a test has not.
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TAGS = {
    "26B": "the released checkpoint, 50 GB, and a device that holds it",
    "GPU": "CUDA GPUs",
    "install": "a package index",
    "minutes": "more time than a test may take",
    "terminal": "a person at a terminal",
}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_TAG = re.compile(r"# \[([^\]]+)\]")


class Command(NamedTuple):
    """A command without its comment, and the tag of the comment."""

    text: str
    tag: str | None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


class Block(NamedTuple):
    """language: what stands behind the opening fence. output: what it prints, the `text` block right behind it."""

    language: str
    code: str
    output: str | None = None

    @property
    def tag(self) -> str | None:
        """Of a Python block: why it is not run."""
        found = _TAG.match(self.code)
        return found and found[1]

    @property
    def commands(self) -> list[Command]:
        """Of a `bash` block, continued lines joined."""
        return _commands(self.code) if self.language == "bash" else []


def pages() -> list[Path]:
    """Every page whose blocks are promises."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "benchmarks/README.md",
        *sorted(ROOT.glob("docs/**/*.md")),
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in their order; what a block prints is part of it and none of its own."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    end = 0
    for match in _BLOCK.finditer(text):
        follows = text[end : match.start()].strip() == ""
        if match[1] == "text" and follows and found and found[-1].language in ("bash", "python"):
            found[-1] = found[-1]._replace(output=match[2])
        else:
            found.append(Block(match[1], match[2]))
        end = match.end()
    return found


def commands(page: Path) -> list[Command]:
    """The commands of all its `bash` blocks."""
    return [command for block in blocks(page) for command in block.commands]


def _commands(code: str) -> list[Command]:
    found, pending = [], ""
    for line in code.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
        elif _complete(pending):
            if text := _without_comment(pending):
                tag = _TAG.search(pending)
                found.append(Command(text, tag and tag[1]))
            pending = ""
        else:
            pending += "\n"
    assert not pending, f"a command without end: {pending}"
    return found


def _complete(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:  # an open quotation
        return False
    return True


def _without_comment(text: str) -> str:
    """A comment begins with a # behind two blanks, or at the start of the line."""
    return re.split(r"(?:^|  )# ?", text, maxsplit=1)[0].strip()
