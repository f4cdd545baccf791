"""Responses in OpenAI's format. What a client expects to be there is always there, null where it is empty."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

FinishReason = Literal["stop", "length", "tool_calls"]


class Sparse(BaseModel):
    """Without the fields that are null: a delta names only what is new."""

    @model_serializer(mode="wrap")
    def _without_null(self, handler: SerializerFunctionWrapHandler):  # a return type would replace the schema
        return {name: value for name, value in handler(self).items() if value is not None}


class PromptDetails(BaseModel):
    cached_tokens: int = Field(description="encoded by an earlier request")


class CompletionDetails(BaseModel):
    reasoning_tokens: int


class Diffusion(BaseModel):
    canvases: int
    denoising_steps: int
    tokens_per_step: float


class Usage(BaseModel):
    """Of all choices together; a prompt counts once. Passes that were made again to enforce a call count too."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    diffusion: Diffusion


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """content: one entry for every token of the answer, those of thoughts and calls too."""

    content: list[TokenLogprob]
    refusal: None = None


class Function(Sparse):
    name: str | None = None
    arguments: str


class Call(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: Function


class CallDelta(Sparse):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: Function


class ChatDelta(Sparse):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatMessage(Sparse):
    role: Literal["assistant"] = "assistant"
    content: str
    reasoning_content: str | None = Field(None, description="what stood in the thought channel")
    reasoning: str | None = Field(None, description="the same")
    tool_calls: list[Call] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextCompletion(BaseModel):
    """A whole completion, or a chunk of one that is streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dgemma-jax"
    max_model_len: int = Field(description="tokens of the longest prompt with its answer")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetails
