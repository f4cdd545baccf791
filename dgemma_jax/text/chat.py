"""Chat messages to the prompt that DiffusionGemma was trained on.

The format is that of the chat template shipped with google/diffusiongemma-26B-A4B-it (July 2026), with two differences.
An assistant message after tool results continues the model's turn, as in Gemma 4's template of the same date: the
shipped one opens a second turn inside the first. And a turn that the template closed before the generation prompt
(text beside answered tool calls) is followed by a new one, so that the prompt always ends inside a model turn.
"""

from collections.abc import Mapping, Sequence

from dgemma_jax.text.schema import Budget, declare
from dgemma_jax.text.segments import PLACEHOLDERS, Segments, json_object

ROLES = ("system", "developer", "user", "assistant", "tool")
_KINDS = {"reasoning": str, "reasoning_content": str, "name": str}
_KINDS |= {"tool_calls": list | tuple, "tool_responses": list | tuple}
_NAMES = {str: "a string", list | tuple: "a list"}


def render_chat(
    messages: Sequence[Mapping],
    tools: Sequence[Mapping] | None = None,
    thinking: bool = False,
    add_generation_prompt: bool = True,
    template: str | None = None,
) -> str:
    """The prompt of a conversation in OpenAI's message format, as one string, `<bos>` included.

    `add_generation_prompt` opens the model's turn at the end. `template` is a checkpoint's own jinja template, rendered
    by transformers instead of the built-in format. ValueError names the message and what it should hold. In calls of
    earlier messages a string delimiter inside an argument becomes a plain quote; in a call of the last message it is
    refused.
    """
    return str(segments(messages, tools, thinking, add_generation_prompt, template))


def encode_chat(
    messages: Sequence[Mapping],
    tokenizer,
    tools: Sequence[Mapping] | None = None,
    thinking: bool = False,
    add_generation_prompt: bool = True,
    template: str | None = None,
) -> list[int]:
    """The token ids of `render_chat`, in which a control token typed in a message stays ordinary text.

    add_generation_prompt, template: see there.
    """
    return segments(messages, tools, thinking, add_generation_prompt, template).encode(tokenizer)


def segments(messages, tools=None, thinking=False, add_generation_prompt=True, template=None) -> Segments:
    """The prompt of a conversation in pieces, each a control token or text."""
    for index, message in enumerate(messages):
        _check(message, f"messages[{index}]")
    try:
        return _segments(messages, tools, thinking, add_generation_prompt, template)
    except RecursionError:
        raise ValueError("messages and tools: nested too deeply, or holding themselves; pass flat values") from None


def _check(message, path: str) -> None:
    """Raises ValueError for a message whose parts are not of the kinds that OpenAI's format has."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        got = message.get("role") if isinstance(message, Mapping) else message
        raise ValueError(f"{path}.role: expected one of {', '.join(ROLES)}, got {got!r:.80}")
    for key, kind in _KINDS.items():
        if not isinstance(message.get(key), kind | None):
            raise ValueError(f"{path}.{key}: expected {_NAMES[kind]}, got {message[key]!r:.80}")
    for key in ("tool_calls", "tool_responses"):
        for index, item in enumerate(message.get(key) or ()):
            if not isinstance(item, Mapping):
                raise ValueError(f"{path}.{key}[{index}]: expected an object, got {item!r:.80}")


def _segments(messages, tools, thinking: bool, add_generation_prompt: bool, template: str | None) -> Segments:
    if template is not None:
        from dgemma_jax.text.template import template_segments  # needs transformers

        return template_segments(messages, tools, thinking, add_generation_prompt, template)
    out = Segments().control("<bos>")
    first = messages[0] if messages and messages[0]["role"] in ("system", "developer") else None
    if first or tools or thinking:
        _system_turn(out, first, tools or (), thinking)
    _Turns(out, messages, 1 if first else 0).write(thinking, add_generation_prompt)
    return out


def _system_turn(out: Segments, message: Mapping | None, tools, thinking: bool) -> None:
    out.control("<|turn>").text("system\n")
    if thinking:
        out.control("<|think|>").text("\n")
    content = message["content"] if message and message.get("content") else ""
    if isinstance(content, str):
        out.text(content.strip())
    else:
        for part in _parts(content, "messages[0].content"):
            if part["type"] != "text":
                kind = part["type"]
                raise ValueError(f"messages[0].content: expected text in the system message, got {kind!r}; move it")
            out.text(_text(part).strip() + " ")
    budget = Budget()
    for index, tool in enumerate(tools):
        declare(tool, out, f"tools[{index}]", budget)
    out.control("<turn|>").text("\n")


class _Turns:
    """Writes the messages after the system message. A model turn spans assistant messages and the results between."""

    def __init__(self, out: Segments, messages, start: int):
        self.out, self.messages, self.start = out, messages, start
        self.spoken = [i for i in range(start, len(messages)) if messages[i]["role"] != "tool"]
        users = [i for i in self.spoken if messages[i]["role"] == "user"]
        self.last_user = users[-1] if users else -1
        self.state = "closed"  # of the last turn: closed, called (a call waits for its result), responded

    def write(self, thinking: bool, add_generation_prompt: bool) -> None:
        tools_only = self.messages[self.start : self.spoken[0] if self.spoken else len(self.messages)]
        if tools_only:
            self._refuse_orphan(self.start)
        for place, index in enumerate(self.spoken):
            after = self.spoken[place + 1] if place + 1 < len(self.spoken) else len(self.messages)
            previous = self.messages[self.spoken[place - 1]]["role"] if place else None
            self._turn(index, after, previous)
        if add_generation_prompt and self.state == "closed":
            self.out.control("<|turn>").text("model\n")
        elif add_generation_prompt and self.state == "responded" and thinking:
            self.out.control("<|channel>").text("thought\n")

    def _turn(self, index: int, after: int, previous: str | None) -> None:
        """One message and the tool messages that follow it, up to the message at `after`."""
        message, out = self.messages[index], self.out
        model = message["role"] == "assistant"
        if not (model and previous == "assistant"):
            out.control("<|turn>").text(("model" if model else message["role"]) + "\n")
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if reasoning and index > self.last_user:
            out.control("<|channel>").text(f"thought\n{reasoning}\n").control("<channel|>")
        calls = message.get("tool_calls") or ()
        new = index == len(self.messages) - 1
        for number, call in enumerate(calls):
            _call(out, call, f"messages[{index}].tool_calls[{number}]", new)
        responded = self._responses(index, after, calls)
        spoke = self._content(message, index, model)
        last = after == len(self.messages)
        goes_on = model and not last and self.messages[after]["role"] == "assistant"
        if calls and not responded:
            out.control("<|tool_response>")
            self.state = "called"
        elif last and responded and not spoke:
            self.state = "responded"
        else:
            self.state = "closed"
            if not goes_on:
                out.control("<turn|>").text("\n")

    def _responses(self, index: int, after: int, calls) -> bool:
        message = self.messages[index]
        native = message.get("tool_responses") or ()
        for response in native:
            _response(self.out, response.get("name") or "unknown", response.get("response"))
        if index + 1 < after and (native or not calls):
            self._refuse_orphan(index + 1)
        for place in range(index + 1, after):
            self._tool_message(self.messages[place], place, calls, place - index - 1)
        return bool(native) or index + 1 < after

    def _tool_message(self, message: Mapping, index: int, calls, place: int) -> None:
        """A result goes to the call with its id, else to its name, else to the call in the same place."""
        id = message.get("tool_call_id")
        named = [call["function"]["name"] for call in calls if id is not None and call.get("id") == id]
        in_place = calls[place]["function"]["name"] if place < len(calls) else "unknown"
        name = named[-1] if named else message.get("name") or ("unknown" if id is not None else in_place)
        content = message.get("content")
        if content is None or isinstance(content, str | Mapping):
            _response(self.out, name, content)
            return
        parts = _parts(content, f"messages[{index}].content")
        _response(self.out, name, "".join(_text(part) for part in parts if part["type"] == "text"))
        for part in parts:
            if part["type"] != "text":
                self.out.medium(part)

    def _content(self, message: Mapping, index: int, model: bool) -> bool:
        """Writes the content; true if there was any."""
        content = message.get("content") or ""
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        spoke = False
        for part in _parts(content, f"messages[{index}].content"):
            if part["type"] != "text":
                self.out.medium(part)
                spoke = True
                continue
            text = (_without_thoughts(_text(part)) if model else _text(part)).strip()
            self.out.text(text)
            spoke = spoke or bool(text)
        return spoke

    def _refuse_orphan(self, index: int) -> None:
        raise ValueError(
            f"messages[{index}]: a tool result must follow the assistant message whose tool_calls asked for it; "
            "send that message too"
        )


def _parts(content, path: str) -> Sequence[Mapping]:
    """Content given as a list of parts, checked."""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(f"{path}: expected a string or a list of parts, got {type(content).__name__}")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or (kind != "text" and kind not in PLACEHOLDERS):
            raise ValueError(
                f"{path}[{index}].type: expected text, {', '.join(PLACEHOLDERS)}; got {kind or part!r:.60}"
            )
        if kind == "text" and not isinstance(part.get("text"), str | None):
            raise ValueError(f"{path}[{index}].text: expected a string, got {part['text']!r:.60}")
    return content


def _text(part: Mapping) -> str:
    return part.get("text") or ""


def _call(out: Segments, call: Mapping, path: str, new: bool) -> None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{path}.function: expected a name and arguments, got {function!r:.80}")
    path = f"{path}.function.arguments"
    arguments = json_object(function.get("arguments"), path)
    out.control("<|tool_call>").text(f"call:{function['name']}{{").pairs(arguments, path if new else None)
    out.text("}").control("<tool_call|>")


def _response(out: Segments, name: str, response) -> None:
    pairs = response if isinstance(response, Mapping) else {"value": response}
    out.control("<|tool_response>").text(f"response:{name}{{").pairs(pairs).text("}").control("<tool_response|>")


def _without_thoughts(text: str) -> str:
    """Past model text without what stands between channel tokens."""
    return "".join(part.split("<|channel>")[0] for part in text.split("<channel|>"))
