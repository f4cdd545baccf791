"""`dgemma chat`: a conversation in the terminal, or over a pipe with one user turn per line."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from dgemma_jax.cli_generate import load_model, sampling_of
from dgemma_jax.parallel import mesh_of
from dgemma_jax.text.schema import function_of

if TYPE_CHECKING:
    from dgemma_jax.api import Model
    from dgemma_jax.events import ChatMessage

HELP = """/reset               forget the conversation
/think on|off        let the model think before it answers
/tools FILE|off      let it call the functions declared in a JSON file
/image FILE          show the model an image with the next line
/help                this list
/exit                leave, like Ctrl-D"""


def run(args: Namespace) -> None:
    """Talks until the input ends. ValueError for what cannot be done; at a terminal it ends only its turn."""
    sampling, mesh = sampling_of(args), mesh_of(args)
    tools = read_tools(args.tools) if args.tools else None
    console = Console(stderr=True)
    model = load_model(args, console, mesh)
    talk = Conversation(model, console, tools, args.thinking, sampling, args.seed)
    interactive = sys.stdin.isatty()
    if interactive:
        console.print(Text("/help lists the commands, Ctrl-D leaves", style="dim"))
    while (line := talk.read("> ")) is not None and line.strip() != "/exit":
        try:
            talk.take(line)
        except (ValueError, OSError) as error:
            if not interactive:
                raise
            console.print(Text(f"dgemma: error: {error}", style="red"))
        except KeyboardInterrupt:
            if not interactive:
                raise
            console.print(Text("(interrupted; the turn is forgotten)", style="dim"))


class Conversation:
    """The messages so far and what commands change. A turn that fails leaves all as it was."""

    def __init__(self, model: Model, console: Console, tools, thinking: bool, sampling, seed: int | None) -> None:
        self.model, self.console, self.tools, self.thinking = model, console, tools, thinking
        self.sampling, self.seed = sampling, seed
        self.messages: list[dict[str, Any]] = []
        self.images: list[dict[str, Any]] = []  # parts of the next message
        self.out = Console(highlight=False, soft_wrap=True)

    def read(self, prompt: str) -> str | None:
        """The next line of the user, None at the end. The prompt is for a terminal only."""
        if not sys.stdin.isatty():
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            return None

    def take(self, line: str) -> None:
        """Runs a command, or answers a user turn; an empty line is neither."""
        command, _, argument = line.strip().partition(" ")
        if command.startswith("/"):
            self._command(command, argument.strip())
        elif line.strip():
            before, images = len(self.messages), self.images
            try:
                self._answer(line)
            except BaseException:
                del self.messages[before:]
                self.images = images
                raise

    def _command(self, command: str, argument: str) -> None:
        if command == "/reset":
            self.messages.clear()
            self.images.clear()
        elif command == "/help":
            self.console.print(HELP, highlight=False)
        elif command == "/image" and argument:
            (image,) = self.model.reader.prepare([argument])
            self.images.append({"type": "image", "image": image})
        elif command == "/think" and argument in ("on", "off"):
            self.thinking = argument == "on"
        elif command == "/tools" and argument:
            self.tools = None if argument == "off" else read_tools(argument)
        else:
            raise ValueError(f"{command} {argument}".strip() + " is no command; /help lists them")

    def _answer(self, line: str) -> None:
        """The model's turns until one has no call; the user plays the functions, one line per result."""
        content = [*self.images, {"type": "text", "text": line}] if self.images else line
        self.messages.append({"role": "user", "content": content})
        self.images = []
        while True:
            with self.console.status("") if self.console.is_terminal else nullcontext():
                answer = self.model.chat(self.messages, self.tools, self.thinking, self.sampling, self.seed)
            self.messages.append(answer.as_message())
            self._show(answer)
            if not answer.tool_calls:
                return
            for call in answer.tool_calls:
                result = self.read(f"result of {call.name}> ")
                if result is None:
                    return
                content = _json_object(result)
                self.messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": result if content is None else content}
                )

    def _show(self, answer: ChatMessage) -> None:
        if answer.reasoning:
            self.out.print(Text(answer.reasoning, style="dim"))
        if answer.content:
            self.out.print(Text(answer.content))
        for call in answer.tool_calls:
            self.out.print(Text(json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)))
        if answer.finish_reason == "length":
            self.console.print(Text("(cut at the longest answer or the end of the context)", style="dim"))
        sys.stdout.flush()


def read_tools(path: str) -> list[dict[str, Any]]:
    """The functions declared in a JSON file: a list in OpenAI's format. ValueError if it holds anything else."""
    try:
        tools = json.loads(Path(os.path.expanduser(path)).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(tools, list):
        raise ValueError(f"{path} holds {type(tools).__name__}; expected a list of tools in OpenAI's format")
    for index, tool in enumerate(tools):
        function_of(tool, f"{path}[{index}]")
    return tools


def _json_object(text: str) -> dict | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
