"""Fields that need more than a type: each is read in one pass, so that a body with a million faults names the first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

from whimbrel.config import did_you_mean

__all__ = [
    "LogitBias",
    "MAX_LOGPROBS",
    "MAX_N",
    "Prompts",
    "Stops",
    "Strict",
    "TextContent",
    "WHOLE",
    "leave_out_neutral",
]

MAX_N, MAX_STOPS, MAX_STOP_LENGTH, MAX_LOGPROBS, MAX_BIASES = 64, 16, 256, 20, 1024


class Strict(BaseModel):
    """A JSON object of known fields: no field is guessed, and no value is turned into another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


def refuse(kind: str, param: str, message: str) -> NoReturn:
    """Raise a fault of the field `param`; `kind` becomes the error's code."""
    raise PydanticCustomError(kind, "{message}", {"param": param, "message": message})


def leave_out_neutral(given: Any, known: Collection[str], neutral: Mapping[str, Collection[Any]]) -> Any:
    """Drop what asks for nothing: nulls, and of fields that cannot be honoured the values that change nothing.

    What cannot be honoured is refused by name, and so is what nobody knows: an ignored field is a wrong answer.
    """
    if not isinstance(given, dict):
        return given
    kept = {}
    for name, value in given.items():
        if value is None and (name in known or name in neutral):
            continue
        if name in neutral:
            if not any(type(value) is type(harmless) and value == harmless for harmless in neutral[name]):
                refuse("unsupported_parameter", name, f"{name} is not supported: leave it out")
        elif name not in known:
            # pydantic errors cannot contain a lone surrogate.
            short = name[:64].encode("utf-8", "backslashreplace").decode()
            refuse("unknown_parameter", short, f"unknown field {short!r}{did_you_mean(short, known)}")
        else:
            kept[name] = value
    return kept


def _whole(given: Any) -> Any:
    """1.0 is a whole number in JSON."""
    return int(given) if type(given) is float and given.is_integer() else given


def _read_prompts(given: Any) -> list[str | list[int]]:
    """Every prompt of a request: a text, texts, token ids, or lists of token ids."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        refuse("invalid_value", "prompt", "prompt must be a text, texts, token ids, or lists of token ids, not empty")
    if all(isinstance(item, str) for item in given):
        return given
    lists = given if all(isinstance(item, list) and item for item in given) else [given]
    # Checks the types of whole lists: a Python loop over a million tokens would block the event loop.
    kinds = [set(map(type, item)) for item in lists]
    if all(kind == {int} for kind in kinds):
        return list(lists)
    if all(kind <= {int, float} for kind in kinds):
        ids = [[_whole(token) for token in item] for item in lists]
        if all(set(map(type, item)) == {int} for item in ids):
            return list(ids)
    refuse(
        "invalid_value", "prompt", "prompt must hold texts only, token ids only, or lists of token ids that hold some"
    )


def _read_stops(given: Any) -> list[str]:
    """The strings that end a text."""
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        refuse("invalid_value", "stop", f"stop must be a text or a list of at most {MAX_STOPS}")
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        refuse("invalid_value", "stop", f"each stop must be a text of 1 to {MAX_STOP_LENGTH} characters")
    try:
        "".join(stops).encode()
    except UnicodeEncodeError:
        refuse("invalid_value", "stop", "a stop holds half a surrogate pair: give valid Unicode")
    return stops


def _read_bias(given: Any) -> dict[int, float]:
    """What is added to the logits of tokens."""
    if not isinstance(given, dict) or len(given) > MAX_BIASES:
        refuse("invalid_value", "logit_bias", f"logit_bias must be an object of at most {MAX_BIASES} token ids")
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 9):
            refuse("invalid_value", "logit_bias", f"logit_bias has the key {token[:64]!r}: keys are token ids")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            refuse("invalid_value", "logit_bias", f"logit_bias of token {token} must be a number from -100 to 100")
    return {int(token): float(bias) for token, bias in given.items()}


def _read_content(given: Any) -> Any:
    """The text of a message, whose parts are put together."""
    if not isinstance(given, list):
        return given
    texts = []
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or set(part) != {"type", "text"} or not isinstance(part["text"], str):
            refuse("invalid_value", "messages", "a part of a message's content must be {'type': 'text', 'text': ...}")
        texts.append(part["text"])
    return "".join(texts)


WHOLE = BeforeValidator(_whole)
"""Reads a whole number, however it is written."""

_Id = Annotated[int, Field(ge=0)]
_Ids = Annotated[list[_Id], Field(min_length=1)]
_Lists = Annotated[list[_Ids], Field(min_length=1)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]

_Biases = Annotated[
    dict[_BiasKey, _Bias], Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False})
]

Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(
        _read_prompts, json_schema_input_type=str | Annotated[list[str], Field(min_length=1)] | _Ids | _Lists
    ),
]
Stops = Annotated[
    list[str],
    PlainValidator(_read_stops, json_schema_input_type=_Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)]),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_read_bias, json_schema_input_type=_Biases),
]
TextContent = Annotated[str, BeforeValidator(_read_content, json_schema_input_type=str | list[TextPart])]
