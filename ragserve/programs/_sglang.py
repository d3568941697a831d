"""SGLang for programs: an import that works on any machine, and an endpoint that shares the prefix cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _PrepareSglang(MetaPathFinder):
    """Finds nothing itself: runs ``prepare`` when the import of ``sglang`` begins."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "sglang":
            sys.meta_path.remove(self)
            from ragserve.engine.compat import prepare

            prepare()
        return None


def prepare_on_import() -> None:
    """Make ``import sglang`` call ``ragserve.engine.compat.prepare`` first, which imports torch."""
    if "sglang" not in sys.modules and not any(
        isinstance(finder, _PrepareSglang) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _PrepareSglang())


def whole_answer(end: str) -> Any:
    """A choices method for ``sgl.select``: pick the choice with the highest probability as the whole answer.

    SGLang's own methods compare per-token averages, which favour a long choice whose end follows from its
    beginning, or the first token alone. ``end`` ends an answer: it is appended to the choices, so that "King"
    is not always likelier than "King Harald", and removed from the decision."""
    from sglang.lang.choices import ChoicesDecision, ChoicesSamplingMethod

    class WholeAnswer(ChoicesSamplingMethod):
        def __call__(self, *, choices: list[str], input_token_logprobs: list[list[Any]], **_: Any) -> Any:
            # per token [logprob, id, text]; includes the prompt's last tokens, the same for all
            scores = [sum(token[0] or 0.0 for token in tokens) for tokens in input_token_logprobs]
            best = max(range(len(choices)), key=scores.__getitem__)
            return ChoicesDecision(decision=choices[best].removesuffix(end), meta_info={"logprobs": scores})

    return WholeAnswer()


@lru_cache(maxsize=1)
def endpoint_class() -> type[Any]:
    """SGLang's ``RuntimeEndpoint`` with a namespace's cache key; lazy, as importing SGLang takes seconds."""
    import sglang as sgl

    class NamespaceEndpoint(sgl.RuntimeEndpoint):
        """Sends ``extra_key`` with requests, to share the prefix cache of the namespace and of no other."""

        def __init__(self, base_url: str, *, extra_key: str, **options: Any) -> None:
            super().__init__(base_url, **options)
            self._extra_key = extra_key

        def _add_images(self, s: Any, data: dict[str, Any]) -> None:
            # In SGLang 0.5.17, every generation's body passes here.
            super()._add_images(s, data)
            data["extra_key"] = self._extra_key

    return NamespaceEndpoint
