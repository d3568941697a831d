"""What users say of answers, as questions for `ragserve eval`, and what they asked and was not found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.answering.namespace_log import NamespaceLog, seen_records
from ragserve.answering.query_log import may_be_shared, same_question, search_question
from sglang_ext.wire.joint_names import names_of

if TYPE_CHECKING:
    from ragserve.answering.query import Query
    from ragserve.answering.results import SearchedFor
    from ragserve_index import IndexStore

_WHY = "the passages do not seem to answer"
FEEDBACK, UNANSWERED = "feedback", "unanswered"  # folders in the data folder


class FeedbackLog(NamespaceLog):
    """Ratings of answers, each with its question, answer and documents."""

    name = FEEDBACK


class UnansweredLog(NamespaceLog):
    """Questions that the documents did not seem to answer, and why."""

    name = UNANSWERED

    def not_found(self, query: Query, searched_for: SearchedFor | None, began: float, why: str) -> None:
        """Note a question in each namespace that was asked; ``began``: when it came (``time.time``). Why it
        was not found says nothing of the other namespaces to those who read one's questions."""
        if not query.private:
            question = (search_question(query.question, searched_for) or "").strip()
            names = names_of(query.request.namespace)
            for name in names if may_be_shared(query, searched_for) else ():
                said = why if len(names) == 1 else _WHY
                self.note(name, question, began, query.search.viewer, asked=names, why=said)


def as_row(record: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    """A rating as a row of `ragserve.eval.own_questions`, with fields that it ignores. An answer that was
    found wrong leaves its question alone."""
    good = record["rating"] == "up"
    return {
        "id": record["id"],
        "question": record["question"],
        "answers": [record["answer"]] if good and record["answer"] else [],
        "documents": record["documents"] if good else [],
        "namespace": namespace,
        "rating": record["rating"],
        "answer": record["answer"],
        "time": record["time"],
    }


def rated(data_dir: Path, store: IndexStore, namespace: str) -> list[dict[str, Any]]:
    """A namespace's ratings as rows, oldest first, the latest one of each answer: those that the store's
    viewer may see, and that rest on none of the documents hidden from it. Reads files."""
    found: dict[str, dict[str, Any]] = {}
    for record in sorted(seen_records(data_dir, FEEDBACK, store, namespace), key=lambda each: each["time"]):
        found.pop(record["id"], None)
        if store.hidden(namespace, record["documents"]):
            continue
        found[record["id"]] = as_row(record, namespace)
    return list(found.values())


def unanswered(data_dir: Path, store: IndexStore, namespace: str, most: int) -> list[dict[str, Any]]:
    """What was asked of a namespace and not found: the ``most`` latest questions that the store's viewer may
    see, newest first, each with the number of times it was asked. Reads files."""
    found: dict[str, dict[str, Any]] = {}
    for record in sorted(seen_records(data_dir, UNANSWERED, store, namespace), key=lambda each: each["time"]):
        same = same_question(record["question"])
        asked = found.pop(same, {"asked": 0})["asked"] + 1
        found[same] = {
            "question": record["question"],
            "asked": asked,
            "time": record["time"],
            "why": str(record.get("why", "")),
        }
    return list(found.values())[::-1][:most]
