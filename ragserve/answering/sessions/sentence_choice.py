"""The sentences that `samkv` keeps by words and the retriever's scores: the engine's code, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sglang_ext.wire.protocol import RetrievalScores
from sglang_ext.wire.request_options import SamKvOptions

if TYPE_CHECKING:
    from ragserve.answering.prompt import Prompt
    from sglang_ext.analysis.document_analysis import Analysis
    from sglang_ext.context.selection.signals import Evidence


class PromptSentences:
    """A prompt's sentences, whose signals are computed once."""

    def __init__(self, prompt: Prompt, evidence: Evidence) -> None:
        self._prompt, self._evidence = prompt, evidence

    def positions(self, options: SamKvOptions, shares: Sequence[float]) -> list[list[int]]:
        """The positions of the prompt that are kept at each of the ``shares`` (option `keep`), ascending."""
        from sglang_ext.context.selection.choose_sentences import score_sentences
        from sglang_ext.context.selection.sentences import take_best

        evidence = self._under(options)
        score, sentences, first = score_sentences(evidence), evidence.sentences, self._prompt.spans[1].start
        counts = [max(1, round(share * sentences.tokens)) for share in shares]
        return [(first + take_best(score, sentences, count)).tolist() for count in counts]

    def _under(self, options: SamKvOptions) -> Evidence:
        known = {name: score for name, score in self._evidence.known.items() if name != "document"}
        return replace(self._evidence, options=options, known=known)  # `document` has an option of its own

    def bounds(self) -> list[list[tuple[int, int]]]:
        """For each document its sentences in order: the first token, counted in the document, and the one
        behind the last."""
        found = []
        for analysis in self._evidence.analyses:
            starts = [0, *(analysis.begins[1:].nonzero()[:, 0] + 1).tolist(), analysis.n_tokens]
            found.append(list(pairwise(starts)))
        return found

    def scored(self, options: SamKvOptions) -> list[list[tuple[int, int, float]]]:
        """`bounds` with the score by which `samkv` would keep a sentence, higher is better."""
        from sglang_ext.context.selection.choose_sentences import score_sentences

        scores = iter(score_sentences(self._under(options)).tolist())
        return [[(start, end, next(scores)) for start, end in own] for own in self.bounds()]

    def leading(self, options: SamKvOptions) -> list[str]:
        """For each sentence the signal that adds most to its score; "" where none adds anything."""
        import torch

        from sglang_ext.context.selection.signals import contributions

        found = contributions(self._under(options))
        largest, at = torch.stack(list(found.values())).max(0)
        names = list(found)
        return [names[n] if value > 0 else "" for n, value in zip(at.tolist(), largest.tolist(), strict=True)]

    def attended(self, values: Sequence[float | None]) -> PromptSentences:
        """These sentences with the values of signal `attention`. Where one is None, there are no keys, and
        words speak in its place."""
        import torch

        known = self._evidence.known
        words = known["words"].tolist()
        own = [word if value is None else value for value, word in zip(values, words, strict=True)]
        evidence = replace(self._evidence, known={**known, "attention": torch.tensor(own)})
        return PromptSentences(self._prompt, evidence)

    def runs(self, options: SamKvOptions, shares: Sequence[float]) -> list[list[list[int]]]:
        """Token ids of the kept runs at each of the ``shares``, each as long as neighbours are kept within a
        document."""
        return [self._runs(chosen) for chosen in self.positions(options, shares)]

    def chosen_runs(self, options: SamKvOptions) -> list[list[int]]:
        """Token ids of the runs that are kept where the options say how much."""
        from sglang_ext.context.selection.choose_sentences import choose_sentences

        return self._runs(choose_sentences(self._under(options)).kept.tolist())

    def _runs(self, chosen: Sequence[int]) -> list[list[int]]:
        starts = {span.start for span in self._prompt.spans[1:]}
        runs: list[list[int]] = []
        for previous, position in zip([-2, *chosen], chosen, strict=False):
            if position != previous + 1 or position in starts:
                runs.append([])
            runs[-1].append(self._prompt.input_ids[position])
        return runs


class SentenceChooser:
    """Finds the sentences of prompts with one tokenizer, without the model."""

    def __init__(self, tokenizer: Any, *, by_ids: bool = False) -> None:
        """With ``by_ids`` every token id is a word."""
        from sglang_ext.analysis.texts import Texts, numbers

        texts = Texts.of(tokenizer, len(tokenizer))
        self.read = tokenizer.decode
        self._texts = replace(texts, read=numbers) if by_ids else texts
        self._analyses: dict[tuple[int, ...], Analysis] = {}

    def sentences(
        self,
        prompt: Prompt,
        scores: RetrievalScores | None = None,
        attended: Sequence[float] | None = None,
    ) -> PromptSentences:
        """The sentences of a prompt. Signal `attention` [sentences], ``attended``, takes part where it is
        given."""
        import torch

        from sglang_ext.context.selection.blocks import Blocks
        from sglang_ext.context.selection.sentences import Sentences
        from sglang_ext.context.selection.signals import SIGNALS, Evidence
        from sglang_ext.tensors.rope import Rotation

        spans = prompt.spans[1:]
        ids = torch.tensor(prompt.input_ids)
        analyses = [self._analysis(prompt.input_ids[span.start : span.end]) for span in spans]
        evidence = Evidence(
            SamKvOptions(),
            Blocks.build(spans, [64] * len(spans), initial=0, local=0),
            analyses,
            Sentences.of(analyses),
            ids[spans[0].start : spans[-1].end],
            ids[spans[-1].end :],
            self._texts,
            None,
            spans[-1].end,
            Rotation(torch.ones(1), 2, neox=True),
            scores,
        )
        found = {name: signal(evidence) for name, signal in SIGNALS.items()}
        if attended is not None:
            found["attention"] = torch.tensor(attended)
        known = {name: score for name, score in found.items() if score is not None}
        return PromptSentences(prompt, replace(evidence, known=known))

    def _analysis(self, ids: Sequence[int]) -> Analysis:
        """An analysis of which only the sentences are true."""
        from sglang_ext.analysis.document_analysis import Analysis

        key = tuple(ids)
        found = self._analyses.get(key)
        if found is None:
            found = self._analyses[key] = Analysis.of_sentences(self._texts.begins(ids), 64)
        return found

    def forget(self) -> None:
        """Forget the documents seen so far; from any thread."""
        self._analyses = {}
