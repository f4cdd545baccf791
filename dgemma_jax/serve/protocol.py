"""Requests in OpenAI's format, with the knobs of diffusion as extensions.

A field is in one of three lists. Honoured: the fields of `ChatRequest` and `CompletionRequest`. Accepted without effect
and named in the response header X-Ignored-Fields: those declared as NoEffect. Refused: all others; those in REFUSED
with a reason, unless they hold a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from dgemma_jax.sampling import MOST_LOGPROBS, Sampling


class Refusal(NamedTuple):
    """Why a field is refused, and the values of it that ask for nothing."""

    why: str
    neutral: tuple[Any, ...] = ()


_GUIDED = "decoding cannot be guided by a grammar; say in the prompt what the answer should look like"
_PENALTY = "the tokens of a canvas are drawn together, so none can be held against the others"
REFUSED = {
    "response_format": Refusal(_GUIDED, ({"type": "text"},)),
    "structured_outputs": Refusal(_GUIDED),
    "guided_json": Refusal(_GUIDED),
    "guided_regex": Refusal(_GUIDED),
    "guided_choice": Refusal(_GUIDED),
    "guided_grammar": Refusal(_GUIDED),
    "frequency_penalty": Refusal(_PENALTY, (0,)),
    "presence_penalty": Refusal(_PENALTY, (0,)),
    "repetition_penalty": Refusal(_PENALTY, (1,)),
    "logit_bias": Refusal("only the model's own logits are used; drop it", ({},)),
    "min_p": Refusal("use top_p or top_k", (0,)),
    "min_tokens": Refusal("the model ends its answer itself; drop it", (0,)),
    "prompt_logprobs": Refusal("the prompt is encoded without computing logits", (0, False)),
    "logprob_token_ids": Refusal("use top_logprobs", ([],)),
    "best_of": Refusal("use n and choose among the answers", (1,)),
    "echo": Refusal("put the prompt before the answer yourself", (False,)),
    "suffix": Refusal("there is no insertion over HTTP", ("",)),
    "audio": Refusal("the model writes text only"),
    "modalities": Refusal("the model writes text only", (["text"],)),
    "prediction": Refusal("every canvas starts from noise; drop it"),
    "web_search_options": Refusal("the model cannot search; offer a tool that does"),
    "functions": Refusal("use tools", ([],)),
    "function_call": Refusal("use tool_choice", ("auto",)),
    "strict": Refusal("arguments cannot be held to a schema while decoding", (False,)),
}
NoEffect = Annotated[Any, Field(exclude=True, description="accepted without effect")]
T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]  # told of the first that is wrong; there may be millions


class Strict(BaseModel):
    """No conversion between types, no unknown field. null is a field left out."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_or_first_unknown(cls, data: Any) -> Any:
        """Without unknown fields that ask for nothing, and with only one of those that do: one is told."""
        if not isinstance(data, Mapping) or data.keys() <= cls.model_fields.keys():
            return data
        known = {name: data[name] for name in cls.model_fields if name in data}
        unknown = (name for name in data if name not in cls.model_fields and not _neutral(name, data[name]))
        return known | {name: data[name] for name in islice(unknown, 1)}

    def ignored(self) -> list[str]:
        """The fields without effect that hold something, those of parts by their path, each once."""
        return list(dict.fromkeys(self._without_effect()))

    def _without_effect(self) -> Iterator[str]:
        for name in sorted(self.model_fields_set):
            value = getattr(self, name)
            if value is not None and type(self).model_fields[name].exclude:
                yield name
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Strict):
                    yield from (f"{name}.{inner}" for inner in part._without_effect())


def _neutral(name: str, value: Any) -> bool:
    return value is None or (name in REFUSED and value in REFUSED[name].neutral)


class Ignored(Strict):
    """Fields of a request that have no effect on the answer."""

    user: NoEffect = None
    metadata: NoEffect = None
    store: NoEffect = None
    service_tier: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_retention: NoEffect = None


Text = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="end with a chunk that holds the usage")
    include_obfuscation: NoEffect = None


class Request(Ignored):
    """What both kinds of completion have in common. A knob left out takes the model's default."""

    model: str | None = Field(None, description="the served model's name; left out, it is that one")
    max_tokens: int | None = Field(None, ge=1, description="longest answer; left out: to the end of the context")
    n: int | None = Field(None, ge=1, le=128, description="answers per prompt")
    seed: int | None = Field(None, ge=0, lt=2**63, description="the same seed gives the same answer")
    stop: Text | Annotated[Items[Text], Field(max_length=16)] | None = Field(None, description="end before this text")
    stream: bool | None = Field(None, description="server-sent events, a chunk or more per canvas")
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, description="of the proposals only; 0 proposes the likeliest tokens")
    top_p: float | None = Field(None, description="propose only the likeliest tokens that hold this share")
    top_k: int | None = Field(None, description="propose only so many of the likeliest tokens")
    max_denoising_steps: int | None = Field(None, description="most steps per canvas")
    entropy_bound: float | None = Field(None, description="nats of entropy that a step may accept")
    t_min: float | None = Field(None, description="temperature that the steps fall towards; null: no temperature")
    t_max: float | None = Field(None, description="temperature of the first step; null: no temperature")
    stability_threshold: int | None = Field(None, description="steps that a canvas stays the same; null: no early stop")
    confidence_threshold: float | None = Field(None, description="mean entropy, nats, of a done canvas; null: as above")

    @model_validator(mode="after")
    def _needs_stream(self) -> Request:
        for name in ("stream_options", "stream_drafts"):
            if getattr(self, name, None) and not self.stream:
                raise ValueError(f"{name} needs stream: true")
        return self

    def sampling(self) -> Sampling:
        """The choices of this request, n and seed left to the caller. ValueError for a value out of range."""
        chosen = {name: value for name in _KNOBS if (value := getattr(self, name)) is not None}
        switched = {name: getattr(self, name) for name in _SWITCHES & self.model_fields_set}
        tokens = {} if self.most_tokens is None else {"max_new_tokens": self.most_tokens}
        return Sampling(**chosen, **switched, **tokens, **self.reported())

    @property
    def most_tokens(self) -> int | None:
        """The longest answer asked for."""
        return self.max_tokens

    def reported(self) -> dict[str, Any]:
        """The fields of Sampling that say which log-probabilities are wanted."""
        raise NotImplementedError

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


_KNOBS = ("stop", "temperature", "top_p", "top_k", "max_denoising_steps", "entropy_bound")
_SWITCHES = {"t_min", "t_max", "stability_threshold", "confidence_threshold"}


class CalledFunction(Strict):
    name: str
    arguments: str | dict[str, Any] | None = None


class MessageCall(Strict):
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    function: CalledFunction


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: NoEffect = None


class ImageURL(Strict):
    url: str = Field(description="data:image/TYPE;base64,...; http and https where the server fetches them")
    detail: NoEffect = None


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageURL
    cache_control: NoEffect = None


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]  # of a message


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | dict[str, Any] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Items[MessageCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: NoEffect = None  # this and the next: what clients have received, and send back
    annotations: NoEffect = None


class Function(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    response: dict[str, Any] | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedChoice(Strict):
    type: Literal["function"]
    function: FunctionName


class TemplateArguments(Strict):
    enable_thinking: bool | None = Field(None, description="let the model think before it answers")


class ChatRequest(Request):
    messages: Items[Message] = Field(min_length=1)
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: the answer ends behind its first call")
    max_completion_tokens: int | None = Field(None, ge=1, description="the same as max_tokens")
    logprobs: bool | None = Field(None, description="report the log-probability of every token, thoughts and calls too")
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description="needs logprobs")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="anything but none: let the model think before it answers"
    )
    chat_template_kwargs: TemplateArguments | None = None
    stream_drafts: bool | None = Field(None, description="with stream: events draft and canvas show the denoising")

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        if None not in (both := (self.max_tokens, self.max_completion_tokens)) and both[0] != both[1]:
            raise ValueError(f"max_tokens is {both[0]} and max_completion_tokens {both[1]}; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        wanted, effort = self._enable_thinking, self.reasoning_effort
        if None not in (wanted, effort) and wanted != (effort != "none"):
            raise ValueError(f"enable_thinking is {wanted} and reasoning_effort {effort}; give one of them")
        return self

    @property
    def _enable_thinking(self) -> bool | None:
        return self.chat_template_kwargs.enable_thinking if self.chat_template_kwargs else None

    @property
    def thinking(self) -> bool:
        """Whether the model may think before it answers."""
        return bool(self._enable_thinking) or self.reasoning_effort not in (None, "none")

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def reported(self) -> dict[str, Any]:
        return {"logprobs": bool(self.logprobs), "top_logprobs": self.top_logprobs}

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as plain data."""
        return [message.model_dump(exclude_none=True) for message in self.messages]

    def functions(self) -> list[dict[str, Any]]:
        """The tools as plain data."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]


Ids = Annotated[Items[int], Field(min_length=1)]


class CompletionRequest(Request):
    prompt: (
        Annotated[str, StringConstraints(min_length=1)]
        | Ids
        | Annotated[Items[Annotated[str, StringConstraints(min_length=1)]], Field(min_length=1)]
        | Annotated[Items[Ids], Field(min_length=1)]
    ) = Field(description="text in which control tokens are recognised, or token ids; or a list of such")
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description="report each token's, and so many likeliest")

    def reported(self) -> dict[str, Any]:
        return {"logprobs": self.logprobs is not None, "top_logprobs": self.logprobs}

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("list[str | list[int]]", [self.prompt] if single else list(self.prompt))
