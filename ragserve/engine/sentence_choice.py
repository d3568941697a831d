"""The sentences that `samkv` keeps by words and the retriever's scores: the engine's code, no model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang_ext.protocol import RetrievalScores
from sglang_ext.request_options import SamKvOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragserve.answering.prompt import Prompt
    from sglang_ext.analysis.document_analysis import Analysis


_UNREAD = (  # tensors of an analysis that only signal `attention` and recomputation read
    "mean_k",
    "mean_k_scale",
    "local_q",
    "local_q_scale",
    "token",
    "attention",
    "exponent",
    "sensitivity",
    "heads",
    "token_k",
    "token_k_scale",
)


class SentenceChooser:
    """Chooses sentences with one tokenizer, without signal `attention`, which needs the model."""

    def __init__(self, tokenizer: Any, *, by_ids: bool = False) -> None:
        """With ``by_ids`` every token id is a word."""
        from sglang_ext.analysis.texts import Texts, numbers

        texts = Texts.of(tokenizer, len(tokenizer))
        self._texts = replace(texts, read=numbers) if by_ids else texts
        self._analyses: dict[tuple[int, ...], Analysis] = {}

    def kept(
        self, prompt: Prompt, options: SamKvOptions, scores: RetrievalScores | None = None
    ) -> list[list[int]]:
        """Token ids of the prompt's kept runs, each as long as neighbours are kept within a document."""
        import torch

        from sglang_ext.context.rope import Rotation
        from sglang_ext.context.selection.blocks import Blocks
        from sglang_ext.context.selection.choose_sentences import choose_sentences
        from sglang_ext.context.selection.sentences import number_sentences
        from sglang_ext.context.selection.signals import Evidence

        spans = prompt.spans[1:]
        ids = torch.tensor(prompt.input_ids)
        analyses = [self._analysis(prompt.input_ids[span.start : span.end]) for span in spans]
        sentence, first = number_sentences(analyses)
        chosen = choose_sentences(
            Evidence(
                options,
                Blocks.build(spans, [64] * len(spans), initial=0, local=0),
                analyses,
                sentence,
                first,
                ids[spans[0].start : spans[-1].end],
                ids[spans[-1].end :],
                self._texts,
                None,
                spans[-1].end,
                Rotation(torch.ones(1), 2, neox=True),
                scores,
            )
        ).kept
        starts = {span.start for span in spans}
        runs: list[list[int]] = []
        for previous, position in zip([-2, *chosen.tolist()], chosen.tolist(), strict=False):
            if position != previous + 1 or position in starts:
                runs.append([])
            runs[-1].append(prompt.input_ids[position])
        return runs

    def _analysis(self, ids: Sequence[int]) -> Analysis:
        """An analysis of which only the sentences are true."""
        import torch

        from sglang_ext.analysis.document_analysis import Analysis

        key = tuple(ids)
        if key not in self._analyses:
            rest: dict[str, Any] = dict.fromkeys(_UNREAD, torch.empty(0))
            begins = self._texts.begins(ids)
            self._analyses[key] = Analysis(len(ids), 64, 1, begins=begins, **rest)
        return self._analyses[key]
