"""`dgemma generate --watch`: the canvas in the terminal while it is denoised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dgemma_jax.events import Canvas, Completion, Draft, Finished
from dgemma_jax.sampling import Sampling

if TYPE_CHECKING:
    from dgemma_jax.api import Model
    from dgemma_jax.prompts import Prompt
    from dgemma_jax.text.tokenizer import Tokenizer


def watch(
    model: Model,
    prompts: Sequence[tuple[Prompt, Any]],
    sampling: Sampling,
    seed: int | None,
    console: Console,
) -> Iterator[tuple[int, Completion]]:
    """Streams one prompt (with its images) after the other, draws every draft, and yields (index, completion)."""
    for index, (prompt, images) in enumerate(prompts):
        screen = Screen(model.required_tokenizer)
        with Live(console=console, transient=True, auto_refresh=False) as live:
            for event in model.stream(prompt, sampling, seed, images=images):
                if isinstance(event, Finished):
                    live.stop()
                    yield index, event.completion
                else:
                    live.update(screen.draw(event), refresh=True)


class Screen:
    """The answer so far and the canvas behind it; what the last step changed is set off."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.canvases = 0
        self.tokens: list[int] = []
        self.draft: list[int] = []

    def draw(self, event: Draft | Canvas) -> Text:
        """The picture after `event`."""
        if isinstance(event, Canvas):
            self.canvases += 1
            self.tokens += event.tokens
            self.draft = []
            return self._picture([], f"canvas {self.canvases} done after {event.steps} steps")
        picture = self._picture(event.tokens, f"canvas {self.canvases + 1}, step {event.step}")
        self.draft = event.tokens
        return picture

    def _picture(self, draft: list[int], title: str) -> Text:
        picture = Text(title + "\n", style="dim")
        picture.append(self.tokenizer.decode(self.tokens, skip_special=True), style="not dim")
        decoder = self.tokenizer.decoder(skip_special=True)
        decoder.feed(self.tokens)
        for token, before in zip_longest(draft, self.draft[: len(draft)]):
            picture.append(decoder.feed([token]), style="not dim cyan" if token == before else "magenta")
        picture.append(decoder.finish())
        return picture
