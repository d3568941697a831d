"""SGLang seen from a program: an import that works everywhere, and an endpoint that shares the server's
prefix cache.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _PrepareSglang(MetaPathFinder):
    """Finds nothing itself: the import of ``sglang`` merely passes here first, which is the last moment to
    prepare for it.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "sglang":
            sys.meta_path.remove(self)
            from ragserve.engine.compat import prepare

            prepare()
        return None


def prepare_on_import() -> None:
    """Let ``import sglang`` call ``ragserve.engine.compat.prepare`` first, which costs an import of torch,
    and not before.
    """
    if "sglang" not in sys.modules and not any(
        isinstance(finder, _PrepareSglang) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _PrepareSglang())


def whole_answer(end: str) -> Any:
    """A choices method for ``sgl.select``: the choice with the highest probability as the whole answer.

    SGLang's own methods compare averages a token, where a long choice whose end follows from its beginning
    beats a short one that is likelier, or the first token alone. ``end`` is the end of an answer; choices
    carry it, so that "King" is not always likelier than "King Harald", and the decision does not."""
    from sglang.lang.choices import ChoicesDecision, ChoicesSamplingMethod

    class WholeAnswer(ChoicesSamplingMethod):
        def __call__(self, *, choices: list[str], input_token_logprobs: list[list[Any]], **_: Any) -> Any:
            # [logprob, id, text] a token; the prompt's last tokens, the same for all, are among them
            scores = [sum(token[0] or 0.0 for token in tokens) for tokens in input_token_logprobs]
            best = max(range(len(choices)), key=scores.__getitem__)
            return ChoicesDecision(decision=choices[best].removesuffix(end), meta_info={"logprobs": scores})

    return WholeAnswer()


@lru_cache(maxsize=1)
def endpoint_class() -> type[Any]:
    """SGLang's ``RuntimeEndpoint`` with the cache key of a namespace added; made in a function, as importing
    SGLang takes seconds.
    """
    import sglang as sgl

    class NamespaceEndpoint(sgl.RuntimeEndpoint):
        """Requests carry ``extra_key``, so that they find what /rag/query has prefilled for the namespace,
        and nobody else's.
        """

        def __init__(self, base_url: str, *, extra_key: str, **options: Any) -> None:
            super().__init__(base_url, **options)
            self._extra_key = extra_key

        def _add_images(self, s: Any, data: dict[str, Any]) -> None:
            # The one place that SGLang 0.5.16 sends every generation's body through.
            super()._add_images(s, data)
            data["extra_key"] = self._extra_key

    return NamespaceEndpoint
