"""The share of questions whose answer is among the sentences that `samkv` keeps, by signal and by share kept.

Needs no model. Sentences are chosen by the engine's code, without attention. Each of a question's documents
is one chunk, embedded as at ingestion. The rivals are a word search by token ids, as `samkv` had it before,
and the best passages whole."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.config import DEFAULT_MODEL
from ragserve.config import load as load_settings
from ragserve.errors import InvalidRequest
from ragserve.eval.data import Question, by_name, load
from ragserve.verification import report
from ragserve.verification.metrics import contains_answer
from sglang_ext.wire.protocol import RetrievalScores
from sglang_ext.wire.request_options import SamKvOptions

if TYPE_CHECKING:
    from ragserve.answering.prompt import Prompt, PromptBuilder
    from ragserve.answering.sessions.sentence_choice import SentenceChooser
    from ragserve.retrieval.embedder import Embedder

SHARES = (0.05, 0.1, 0.15, 0.25, 0.4)
_LIMIT, _QUICK = 40, 10  # questions a set
# options of `samkv`, and which of the retriever's scores it is given: of passages, of sentences
_WORDS = {"retrieval_weight": 0.0, "lexical_weight": 1.0, "feedback_weight": 0.0}
_RETRIEVER = {"retrieval_weight": 1.0, "feedback_weight": 0.0}
_ALL = {"retrieval_weight": 2 / 3, "lexical_weight": 1.0, "feedback_weight": 0.0}
SIGNALS: dict[str, tuple[Mapping[str, float], bool, bool]] = {
    "token ids": (_WORDS, False, False),
    "words": (_WORDS, False, False),
    "document": (_RETRIEVER, True, False),
    "sentence": (_RETRIEVER, False, True),
    "document, sentence": (_RETRIEVER, True, True),
    "words, document, sentence": (_ALL, True, True),
    "words, feedback": ({**_WORDS, "feedback_weight": 0.3}, False, False),
    "all with feedback": ({**_ALL, "feedback_weight": 0.3}, True, True),
}
BEST_PASSAGES = "best passages whole"
_VARIED = ("token ids", "words", "all with feedback")  # asked in other spellings, too


def run(out_dir: Path | None, *, quick: bool = False, data: Sequence[Path] = ()) -> dict[str, Any]:
    """Measure question sets; ``quick``: 10 questions of each. Raises InvalidRequest without ``data``, and
    for two sets of one name."""
    from ragserve.answering.prompt import PromptBuilder, load_tokenizer
    from ragserve.answering.sessions.sentence_choice import SentenceChooser
    from ragserve.retrieval.embedder import Embedder

    if not data:
        raise InvalidRequest(
            "bench selection needs question sets.",
            hint="Give --data FILE (.jsonl, .jsonl.gz) as for `ragserve eval`; more than once for several.",
        )
    tokenizer = load_tokenizer(DEFAULT_MODEL)
    builder = PromptBuilder(tokenizer)
    choosers = {by_ids: SentenceChooser(tokenizer, by_ids=by_ids) for by_ids in (False, True)}
    embedder, sentence_bytes = Embedder(), load_settings().sentence_bytes
    rows: list[dict[str, Any]] = []
    for name, path in by_name(data).items():
        questions = [q for q in load(path, _QUICK if quick else _LIMIT) if _answerable(q)]
        asked = [_Asked(q, builder, embedder, sentence_bytes) for q in questions]
        for signal in SIGNALS:
            chooser = choosers[signal == "token ids"]
            for spelling in SPELLINGS if signal in _VARIED else ("as asked",):
                rows.append(_row(name, signal, spelling, asked, chooser))
        rows.append(_whole(name, asked))
    return report.write(
        "selection",
        {"questions": f"at most {_QUICK if quick else _LIMIT} a set", "embedder": embedder.name},
        rows,
        out=out_dir / "selection.json" if out_dir else None,
        note="Percent of questions whose answer stands in what is kept, by share of document tokens kept. "
        f"Attention takes no part. {sentence_bytes} bytes of sentence embeddings a token.",
    )


def with_typo(question: str) -> str:
    """The question with two letters swapped in one of its longer words, always the same."""
    found = list(re.finditer(r"\w{4,}", question))
    if not found:
        return question
    draw = random.Random(question)
    word = draw.choice(found)
    at = word.start() + draw.randrange(1, len(word.group()) - 1)
    return question[:at] + question[at + 1] + question[at] + question[at + 2 :]


SPELLINGS: dict[str, Callable[[str], str]] = {
    "as asked": str,
    "lower case": str.lower,
    "upper case": str.upper,
    "one typo": with_typo,
}


class _Asked:
    """A question with its prompts and scores, by spelling."""

    def __init__(
        self, question: Question, builder: PromptBuilder, embedder: Embedder, sentence_bytes: int
    ) -> None:
        from ragserve.answering.prompt import PromptDocument
        from ragserve.verification.given_scores import GivenScores

        self.question = question
        given = GivenScores(builder, embedder, question.documents, sentence_bytes)
        documents = [PromptDocument("", d.title, d.text) for d in question.documents]
        self.prompts: dict[str, Prompt] = {}
        self.scores: dict[str, RetrievalScores] = {}
        for name, spell in SPELLINGS.items():
            text = spell(question.question)
            self.prompts[name] = builder.build(text, documents, max_prompt_tokens=10**6)
            self.scores[name] = given.of(text, self.prompts[name]) or RetrievalScores((), ())


def _row(
    name: str,
    signal: str,
    spelling: str,
    asked: Sequence[_Asked],
    chooser: SentenceChooser,
) -> dict[str, Any]:
    weights, of_documents, of_sentences = SIGNALS[signal]
    row = _head(name, signal, spelling, asked)
    options = SamKvOptions.model_validate({"experimental": dict(weights)})
    kept = []
    for each in asked:
        every = each.scores[spelling]
        scores = RetrievalScores(
            every.documents if of_documents else (None,) * len(every.documents),
            every.sentences if of_sentences else ((),) * len(every.sentences),
        )
        kept.append(
            [
                any(contains_answer(chooser.read(run), each.question.answers) for run in runs)
                for runs in chooser.sentences(each.prompts[spelling], scores).runs(options, SHARES)
            ]
        )
    for share, found in zip(SHARES, zip(*kept, strict=True), strict=True):
        row[f"{share:.0%}"] = round(100 * statistics.fmean(found), 1)
    return row


def _whole(name: str, asked: Sequence[_Asked]) -> dict[str, Any]:
    """The row of the best passages, taken whole while they fit into the share."""
    row = _head(name, BEST_PASSAGES, "as asked", asked)
    for share in SHARES:
        kept = []
        for each in asked:
            spans = each.prompts["as asked"].spans[1:]
            sizes = [span.end - span.start for span in spans]
            scores = each.scores["as asked"].documents
            left, found = round(share * sum(sizes)), False
            for i in sorted(range(len(sizes)), key=[-(score or 0.0) for score in scores].__getitem__):
                left -= sizes[i]
                if left < 0:
                    break
                found = found or contains_answer(each.question.documents[i].text, each.question.answers)
            kept.append(found)
        row[f"{share:.0%}"] = round(100 * statistics.fmean(kept), 1)
    return row


def _head(name: str, signal: str, spelling: str, asked: Sequence[_Asked]) -> dict[str, Any]:
    return {"set": name, "questions": len(asked), "signal": signal, "question": spelling}


def _answerable(question: Question) -> bool:
    return any(contains_answer(document.text, question.answers) for document in question.documents)
