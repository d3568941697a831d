"""Defaults of strategy `samkv` for one model, as `ragserve calibrate` found them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.wire.request_options import merged, strategy_options


@dataclass(frozen=True)
class Profile:
    """A model's own defaults; empty: the built-in ones.

    ``stable``: layers over which P is averaged (the paper's N*). ``heads``: layer and KV head, over all
    ranks, of the retrieval heads. ``selection``: the default of option `selection`. ``options``: defaults of
    the other options by selection, because their best values differ between selections."""

    stable: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    selection: str = ""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Mapping[str, Any], layers: int, kv_heads: int) -> Profile:
        """A profile read from JSON. Raises ValueError where it does not fit a model of these dimensions."""
        try:
            stable = tuple(int(layer) for layer in raw.get("stable", ()))
            heads = tuple((int(layer), int(head)) for layer, head in raw.get("heads", ()))
            selection = str(raw.get("selection", ""))
            options = {str(name): dict(values) for name, values in raw.get("options", {}).items()}
            for name, values in {selection or "sentences": {}, **options}.items():
                strategy_options("samkv", {"selection": name, **values})
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"the model's samkv profile cannot be read: {error}: run ragserve calibrate again"
            ) from error
        inside = all(0 <= layer < layers for layer in (*stable, *(layer for layer, _ in heads))) and all(
            0 <= head < kv_heads for _, head in heads
        )
        if not inside:
            raise ValueError(
                f"the samkv profile is not of this model, which has {layers} layers of {kv_heads} KV heads: "
                "run ragserve calibrate again"
            )
        return cls(stable, heads, selection, options)

    @property
    def digest(self) -> str:
        """8 hex digits over the contents, "" for the empty profile. A measurement holds for one profile."""
        if self == Profile():
            return ""
        text = json.dumps([self.stable, self.heads, self.selection, self.options], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def completed(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """A request's options on top of the profile's."""
        defaults = {"selection": self.selection} if self.selection else {}
        selection = options.get("selection", self.selection or "sentences")
        own = self.options.get(selection, {}) if isinstance(selection, str) else {}
        return merged({**defaults, **own}, options)
