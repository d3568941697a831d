"""``/v1/responses`` keeps the newest of what it stores. SGLang forgets none, and says so."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

KEPT = 256  # responses


class Newest(OrderedDict[str, Any]):
    """A dict of the ``most`` entries that were set last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)


def install(state: Any) -> None:
    """Bound the stores of SGLang's app of ``state``. Raises RuntimeError for another SGLang."""
    serving = getattr(state, "openai_serving_responses", None)
    if serving is None:  # it could not be made for this model
        return
    for name in ("response_store", "msg_store"):
        if getattr(serving, name, None) != {}:
            raise RuntimeError(f"SGLang's OpenAIServingResponses has no empty {name}")
    serving.response_store = Newest(KEPT)
    serving.msg_store = Newest(2 * KEPT)  # a response that is found must find its messages
