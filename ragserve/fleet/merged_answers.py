"""Answers of several workers to one control operation, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragserve.engine.document_cache import Whereabouts

_OF_ALL = ("remote.bytes", "remote.budget_bytes")  # figures of the store, not of the worker


def merged(answers: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return sums of figures, lists after each other with the worker's name before text, and True where all
    say so. The store that they share is away where one of them does not reach it, and each worker counts the
    bytes of all; of shares the largest counts. ``names``: of the workers that answered."""
    found: dict[str, Any] = _together(answers, names)
    return found


def _together(values: Sequence[Any], names: Sequence[str], figure: str = "") -> Any:
    first = next((value for value in values if value is not None), None)
    if isinstance(first, dict):
        keys = {key: None for value in values if value is not None for key in value}  # in order
        return {
            key: _together(
                [value[key] for value in values if value is not None and key in value],
                [
                    name
                    for value, name in zip(values, names, strict=True)
                    if value is not None and key in value
                ],
                f"{figure}.{key}" if figure else key,
            )
            for key in keys
        }
    if isinstance(first, list):
        return [
            f"{name}: {each}" if isinstance(each, str) else each
            for value, name in zip(values, names, strict=True)
            for each in value or ()
        ]
    if isinstance(first, bool):
        return any(values) if figure == "remote.away" else all(values)
    if isinstance(first, int | float):
        largest = figure in _OF_ALL or figure.endswith("_share")
        return None if None in values else max(values) if largest else sum(values)
    return first


def in_order(parts: Sequence[tuple[Sequence[int], Sequence[Any]]], count: int) -> list[Any]:
    """Return ``count`` values, of parts that have some each and say at which places."""
    found: list[Any] = [None] * count
    for places, values in parts:
        for place, value in zip(places, values, strict=True):
            found[place] = value
    return found


def whereabouts(parts: Sequence[tuple[Sequence[int], Whereabouts]], count: int) -> Whereabouts:
    """Return where documents are, of parts that say so of some each. Room to write is that of the fullest
    worker: a group of documents may be all its."""
    each = [found for _, found in parts]
    budgets = [found.budget_bytes for found in each if found.budget_bytes is not None]
    faults = _together([dict(found.faults) for found in each], [""] * len(each))
    return Whereabouts(
        on_device=tuple(in_order([(places, found.on_device) for places, found in parts], count)),
        on_host=tuple(in_order([(places, found.on_host) for places, found in parts], count)),
        below=tuple(in_order([(places, found.below) for places, found in parts], count)),
        lasting=each[0].lasting,
        budget_bytes=sum(budgets) if len(budgets) == len(each) else None,
        write_room_bytes=min(found.write_room_bytes for found in each),
        queued_bytes=max(found.queued_bytes for found in each),
        block=each[0].block,
        page_bytes=each[0].page_bytes,
        faults=faults,
    )
