"""Sampling: what a request may choose, its checks, and the defaults a checkpoint brings along."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from dgemma_jax.config import is_int, is_number

S = TypeVar("S", bound="Sampling")
logger = logging.getLogger(__name__)


class Unset(enum.Enum):
    """The type of UNSET: not chosen, so the model's default holds. None is a choice and mostly means off."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET
MOST_LOGPROBS = 20  # of the likeliest ids a position reports at most
PLACEHOLDERS = ("<|image|>", "<|audio|>", "<|video|>")


def _integer(low: int, high: int | None = None) -> Callable[[Any], int | None]:
    def convert(value: Any) -> int | None:
        if value is None:
            return None
        if not is_int(value, low) or (high is not None and value > high):
            raise ValueError
        return int(value)

    return convert


def _real(accepts: Callable[[Any], bool]) -> Callable[[Any], float | None]:
    def convert(value: Any) -> float | None:
        if value is None:
            return None
        if not accepts(value):
            raise ValueError
        return float(value)

    return convert


def _required(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def converted(value: Any) -> Any:
        if value is None:
            raise ValueError
        return convert(value)

    return converted


def _positive(value: Any) -> bool:
    """What the device, which counts in 32 bits, can tell from zero and from infinity."""
    return is_number(value) and 1e-30 <= value <= 1e30


def _not_negative(value: Any) -> bool:
    return is_number(value) and (value == 0 or _positive(value))


def _share(value: Any) -> bool:
    return is_number(value) and 0 < value <= 1


def _ids(value: Iterable[int] | None) -> tuple[int, ...]:
    ids = () if value is None else tuple(value)
    if not all(is_int(id) for id in ids):
        raise ValueError
    return tuple(int(id) for id in ids)


def _strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    strings = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in strings):
        raise ValueError
    return strings


def _canvas(value: Iterable[int] | None) -> tuple[int, ...]:
    ids = () if value is None else tuple(value)
    if not all(is_int(id, -1) for id in ids):
        raise ValueError
    return tuple(int(id) for id in ids)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _flags(value: Iterable[Any] | None) -> tuple[bool, ...]:
    items = () if value is None else tuple(value)
    return tuple(_flag(item.item() if hasattr(item, "item") else item) for item in items)  # numpy's booleans too


INT32 = 2**31 - 1
_IDS = "a list of token ids (integers from 0), or None for none"
_FIELDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "max_new_tokens": (_integer(1), "a positive integer, or None for the rest of the context"),
    "max_denoising_steps": (_required(_integer(1, INT32)), "a positive integer below 2**31"),
    "entropy_bound": (_required(_real(_positive)), "a number in 1e-30 .. 1e30"),
    "t_min": (_real(_not_negative), "0 or a number in 1e-30 .. 1e30, or None for no temperature"),
    "t_max": (_real(_positive), "a number in 1e-30 .. 1e30, or None for no temperature"),
    "stability_threshold": (_integer(0, INT32), "an integer from 0 and below 2**31, or None for no early stop"),
    "confidence_threshold": (_real(_positive), "a number in 1e-30 .. 1e30, or None for no early stop"),
    "temperature": (_real(_not_negative), "0 or a number in 1e-30 .. 1e30, or None for the schedule alone"),
    "top_k": (_integer(0, INT32), "an integer from 0 and below 2**31; 0 and None keep all ids"),
    "top_p": (_real(_share), "a number above 0 and at most 1; 1 and None keep all ids"),
    "seed": (_integer(0, 2**63 - 1), "an integer in 0 .. 2**63 - 1, or None for a fresh one"),
    "stop": (_strings, "a non-empty string or a list of them, or None for none"),
    "stop_token_ids": (_ids, _IDS),
    "suppress": (_ids, _IDS),
    "logprobs": (_flag, "True or False"),
    "top_logprobs": (_integer(0, MOST_LOGPROBS), f"an integer in 0 .. {MOST_LOGPROBS}, or None for none"),
    "n": (_required(_integer(1)), "a positive integer"),
    "canvas": (_canvas, "a list of token ids, -1 where a random one is to stand, or None for a random canvas"),
    "pinned": (_flags, "a list of booleans, one per id of canvas, or None for none"),
}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What one request chooses. A field left UNSET takes the model's default; ValueError for a value out of range.

    max_new_tokens: the output is cut exactly there; None is to the end of the context.
    max_denoising_steps: steps a canvas may take. entropy_bound: nats that the accepted positions of a step may hold.
    t_min, t_max: the logits are divided by a temperature that falls from t_max towards t_min; None for no division.
    stability_threshold, confidence_threshold: a canvas is done once its argmax stayed the same for so many further
        steps and its mean entropy (nats) is below the confidence; None in either lets every step run.
    temperature: acts on the proposal draw only; None or 1 leaves it alone, 0 proposes the argmax.
    top_k, top_p: cut the distribution to its top_k likeliest ids, then to the fewest of those that hold top_p of it,
        before any temperature. Entropy, acceptance and stopping see what is left.
    seed: the request's random stream. stop: strings that end the text. stop_token_ids: ids that end it.
    suppress: ids that are never produced. logprobs: report each token's. n: answers per prompt.
    top_logprobs: report so many of the likeliest ids at each token's place, without temperature or cut.
    canvas: what the first canvas starts from, instead of random ids; pinned: positions of it that stay as they are.
    """

    max_new_tokens: int | Unset | None = UNSET
    max_denoising_steps: int | Unset = UNSET
    entropy_bound: float | Unset = UNSET
    t_min: float | Unset | None = UNSET
    t_max: float | Unset | None = UNSET
    stability_threshold: int | Unset | None = UNSET
    confidence_threshold: float | Unset | None = UNSET
    temperature: float | Unset | None = UNSET
    top_k: int | Unset | None = UNSET
    top_p: float | Unset | None = UNSET
    seed: int | Unset | None = UNSET
    stop: str | Iterable[str] | Unset | None = UNSET
    stop_token_ids: Iterable[int] | Unset | None = UNSET
    suppress: Iterable[int] | Unset | None = UNSET
    logprobs: bool | Unset = UNSET
    top_logprobs: int | Unset | None = UNSET
    n: int | Unset = UNSET
    canvas: Iterable[int] | Unset | None = UNSET
    pinned: Iterable[bool] | Unset | None = UNSET

    def __post_init__(self) -> None:
        for name, value in self._chosen().items():
            convert, expected = _FIELDS[name]
            try:
                converted = convert(value)
            except (TypeError, ValueError):
                shown = repr(value).replace("\n", "")  # an array's would take several lines
                raise ValueError(f"{name} is {shown:.60}; expected {expected}") from None
            object.__setattr__(self, name, converted)
        low, high = self.t_min, self.t_max
        if isinstance(low, float) and isinstance(high, float) and high <= low:
            raise ValueError(f"t_max is {high}; expected more than t_min, which is {low}")
        canvas, pinned = tuple(getattr(self, name) if name in self._chosen() else () for name in ("canvas", "pinned"))
        if pinned and len(pinned) != len(canvas):
            raise ValueError(f"pinned has {len(pinned)} positions; expected {len(canvas)}, one per id of canvas")
        if any(keep and id < 0 for id, keep in zip(canvas, pinned, strict=bool(pinned))):
            raise ValueError("canvas holds -1 at a pinned position; expected the id that is to stay there")

    def _chosen(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not UNSET}

    def merged(self, defaults: S) -> S:
        """This choice with its unset fields taken from `defaults`. ValueError where the two do not go together."""
        return replace(defaults, **self._chosen())

    @staticmethod
    def from_generation_config(
        config: Mapping[str, Any] | None, *, eos_token_id: Any = None, special_ids: Mapping[str, int] | None = None
    ) -> Resolved:
        """The defaults of a checkpoint, with no field unset.

        config: a parsed generation_config.json, or None if there is no such file. null there is the built-in value,
        and its max_new_tokens is ignored. eos_token_id: what config.json says, used (and said so) where the
        generation_config names no stop ids. special_ids: the tokenizer's special tokens, for the default `suppress`.
        """
        config = {} if config is None else config
        if not isinstance(config, Mapping):
            raise ValueError(f"generation_config.json is {config!r}; expected a JSON object")
        stops = _stop_ids(config.get("eos_token_id"), eos_token_id)
        special_ids = special_ids or {}
        kept = [*stops, config.get("pad_token_id")]
        suppress = [special_ids[name] for name in PLACEHOLDERS if name in special_ids]
        values = {name: config.get(name) for name in _NAMES} | {"entropy_bound": _entropy_bound(config)}
        try:
            chosen = Sampling(**{name: value for name, value in values.items() if value is not None})
            return chosen.merged(
                replace(BUILT_IN, stop_token_ids=stops, suppress=[id for id in suppress if id not in kept])
            )
        except ValueError as error:
            raise ValueError(f"generation_config.json: {error}") from None


if TYPE_CHECKING:

    class Resolved(Sampling):
        """A Sampling with no field unset and every value converted, as `merged` gives it."""

        max_new_tokens: int | None
        max_denoising_steps: int
        entropy_bound: float
        t_min: float | None
        t_max: float | None
        stability_threshold: int | None
        confidence_threshold: float | None
        temperature: float | None
        top_k: int | None
        top_p: float | None
        seed: int | None
        stop: tuple[str, ...]
        stop_token_ids: tuple[int, ...]
        suppress: tuple[int, ...]
        logprobs: bool
        top_logprobs: int | None
        n: int
        canvas: tuple[int, ...]
        pinned: tuple[bool, ...]

else:
    Resolved = Sampling

BUILT_IN = Resolved(
    max_new_tokens=None,
    max_denoising_steps=48,
    entropy_bound=0.1,
    t_min=0.4,
    t_max=0.8,
    stability_threshold=1,
    confidence_threshold=0.005,
    temperature=None,
    top_k=None,
    top_p=None,
    seed=None,
    stop=(),
    stop_token_ids=(),
    suppress=(),
    logprobs=False,
    top_logprobs=None,
    n=1,
    canvas=(),
    pinned=(),
)
_NAMES = ("max_denoising_steps", "t_min", "t_max", "stability_threshold", "confidence_threshold", "top_k", "top_p")


def _entropy_bound(config: Mapping[str, Any]) -> Any:
    sampler = config.get("sampler_config")
    if sampler is None:
        return None
    if not isinstance(sampler, Mapping) or sampler.get("_cls_name") != "EntropyBoundSamplerConfig":
        raise ValueError(f"generation_config.json: sampler_config is {sampler!r}; expected EntropyBoundSamplerConfig")
    return sampler.get("entropy_bound")


def _stop_ids(generation: Any, fallback: Any) -> tuple[int, ...]:
    """The ids of an eos_token_id, which is one id, a list or null; config.json's if generation_config.json has none."""
    value, source = (fallback, "config.json") if generation is None else (generation, "generation_config.json")
    try:
        ids = _ids([value] if is_int(value) else value)
    except (TypeError, ValueError):
        raise ValueError(f"{source}: eos_token_id is {value!r}; expected an id or a list of ids") from None
    if generation is None:
        text = f"the stop ids are config.json's {list(ids)}" if ids else "no id stops the text"
        logger.warning("no eos_token_id in generation_config.json: %s", text)
    return ids
