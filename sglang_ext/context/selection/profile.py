"""What `ragserve calibrate` found for a model: defaults of strategy `samkv` that take the place of the
built-in ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.context.selection.samkv import SCOPES


@dataclass(frozen=True)
class Profile:
    """``stable``: layers over which P is averaged (the paper's N*); ``heads``: layer and KV head, of all
    ranks, of the retrieval heads; ``selection``; ``options``: others by selection, because they have not the
    same values in all of them. Empty: the built-in one."""

    stable: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    selection: str = ""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Mapping[str, Any], layers: int, kv_heads: int) -> Profile:
        """From JSON, for a model of so many layers and KV heads. Raises ValueError for what cannot be one of
        it.
        """
        try:
            stable = tuple(int(layer) for layer in raw.get("stable", ()))
            heads = tuple((int(layer), int(head)) for layer, head in raw.get("heads", ()))
            options = {str(name): dict(values) for name, values in raw.get("options", {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"the model's samkv profile cannot be read: {error!r}: run ragserve calibrate again"
            ) from error
        selection = str(raw.get("selection", ""))
        inside = all(0 <= layer < layers for layer in (*stable, *(layer for layer, _ in heads))) and all(
            0 <= h < kv_heads for _, h in heads
        )
        if not inside or {selection, *options} - {"", *SCOPES}:
            raise ValueError(
                f"the samkv profile is not of this model, which has {layers} layers of {kv_heads} KV heads: run ragserve calibrate again"
            )
        return cls(stable, heads, selection, options)

    @property
    def digest(self) -> str:
        """8 hex digits of what it says; empty where that is nothing. What was measured with one profile holds
        for no other.
        """
        if self == Profile():
            return ""
        text = json.dumps([self.stable, self.heads, self.selection, self.options], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def completed(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """A request's options, with the profile's where the request says nothing."""
        named = {"selection": self.selection} if self.selection else {}
        wanted = options.get("selection", self.selection or SCOPES[0])
        return {**named, **(self.options.get(wanted, {}) if isinstance(wanted, str) else {}), **options}
