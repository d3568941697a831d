"""The base class of all options, and the sentences that say what is wrong with them. Plain data, without
torch or SGLang."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from sglang_ext.wire.renamed import with_new_names

OptionsT = TypeVar("OptionsT", bound="RequestOptions")


class PlanError(ValueError):
    """A plan that cannot be carried out; the message says what is wrong with it."""


class RequestOptions(BaseModel):
    """Base of all options. Values are not converted: ``1`` is not true, and ``"1"`` is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    renamed: ClassVar[Mapping[str, str]] = {}
    """New names by old ones, which still work."""

    @model_validator(mode="before")
    @classmethod
    def _take_old_names(cls, given: Any) -> Any:
        return with_new_names(given, cls.renamed) if isinstance(given, Mapping) else given


def checked(model: type[OptionsT], given: Mapping[str, Any], owner: str) -> OptionsT:
    """``given`` as options of ``owner``. Raises PlanError with a sentence for each bad option."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise PlanError("; ".join(_sentences(error, model, given, owner))) from None


def given_in(text: str, what: str, names: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Fields of a request's JSON text, by their new names. ``what``: decode or prefill. ``names``: new names
    by old ones. Raises PlanError."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise PlanError(f"{what} options are not JSON: {error}") from None
    if not isinstance(given, dict):
        raise PlanError(f"{what} options must be a JSON object")
    try:
        return with_new_names(given, names)
    except ValueError as error:
        raise PlanError(str(error)) from None


def option_names(model: type[RequestOptions]) -> list[str]:
    """Names as the command line spells them, ``experimental.rotate`` for a nested one."""
    names: list[str] = []
    for name, field in model.model_fields.items():
        inner: Any = field.annotation
        nested = isinstance(inner, type) and issubclass(inner, RequestOptions)
        names += [f"{name}.{each}" for each in option_names(inner)] if nested else [name]
    return names


def _sentences(
    error: ValidationError, model: type[RequestOptions], given: Mapping[str, Any], owner: str
) -> list[str]:
    """Return a sentence for each option at fault; the alternatives of a union are joined."""
    unknown: list[str] = []
    wrong: dict[str, list[str]] = {}
    sentences: list[str] = []
    for each in error.errors(include_url=False):
        path = [str(part) for part in each["loc"]]
        name = ".".join(path[: 2 if path[:1] == ["experimental"] else 1])
        what = each["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        if each["type"] == "extra_forbidden":
            unknown.append(name)
        elif name:
            wrong.setdefault(name, []).append(what)
        else:
            sentences.append(what)
    for name, reasons in wrong.items():
        value: Any = given
        for part in name.split("."):
            value = value[part]
        allowed = " or ".join(dict.fromkeys(reasons))
        sentences.append(f"option {name} of {owner} is {reprlib.repr(value)}: {allowed}")
    if unknown:
        known = option_names(model)
        by_last = {name.rpartition(".")[2]: name for name in known}
        close = [
            by_last[m] for name in unknown for m in get_close_matches(name.rpartition(".")[2], by_last, 1)
        ]
        meant = f" (did you mean {', '.join(close)}?)" if close else ""
        sentences.append(f"{owner} has no option {', '.join(unknown)}{meant}: it has {', '.join(known)}")
    return sentences
