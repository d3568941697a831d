"""The query log: questions that users have asked, for `ragserve tune` and the idle server. JSON lines in
`queries/`, of texts, namespaces and times. It is off unless ``query_log_bytes`` says otherwise."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ragserve.answering.namespace_log import NamespaceLog, log_of, records_in
from sglang_ext.wire.joint_names import is_joint, names_of

if TYPE_CHECKING:
    from ragserve.answering.query import Query
    from ragserve.answering.results import SearchedFor
    from ragserve_index import IndexStore

FOLDER = "queries"  # in the data folder


def search_question(question: str, searched_for: SearchedFor | None) -> str | None:
    """What was searched for, as a question that stands alone; None for a follow-up that does not."""
    if searched_for is None:
        return question
    return None if searched_for.follow_up == "context" else searched_for.question


def may_be_shared(query: Query, searched_for: SearchedFor | None) -> bool:
    """Whether what was asked is for the logs of all its namespaces. What was searched for in place of what
    was typed, and follow-ups, may have words of one that readers of another's log do not know."""
    return searched_for is None or not is_joint(query.request.namespace)


def same_question(question: str) -> str:
    """Equal for questions that differ in case and spaces only."""
    return " ".join(question.casefold().split())


def question_id(question: str) -> str:
    """A digest that is equal for the same questions."""
    return hashlib.sha256(same_question(question).encode()).hexdigest()[:16]


class QueryLog(NamespaceLog):
    """Questions that were searched for and answered."""

    name = FOLDER

    def answered(
        self, query: Query, searched_for: SearchedFor | None, began: float, namespaces: Iterable[str]
    ) -> None:
        """Note a question in the namespaces whose passages the model has read; ``began``: when it came
        (``time.time``)."""
        if not query.private:
            question = (search_question(query.question, searched_for) or "").strip()
            asked = names_of(query.request.namespace)
            for name in namespaces if may_be_shared(query, searched_for) else ():
                self.note(name, question, began, query.search.viewer, asked=asked)


class LoggedQuestions:
    """A namespace's questions, newest first and each once. What is logged meanwhile is seen. Without a log
    there are none."""

    def __init__(
        self, data_dir: Path, store: IndexStore, namespace: str, most: int, known: Iterable[str] = ()
    ) -> None:
        """``most``: questions that are looked at, the newest ones. ``known``: ids (`question_id`) of those
        that are not given again."""
        self._entries = log_of(data_dir, FOLDER)
        self._store = store
        self._namespace = namespace
        self._most = most
        self._mark: tuple[int, int] | None = None
        self._left: list[str] = []
        self._given = set(known)

    def next(self) -> str | None:
        """The next question; None while there is none. Reads files."""
        self._read_again()
        if not self._left:
            return None
        self._given.add(question_id(self._left[-1]))
        return self._left.pop()

    def waiting(self) -> int:
        """How many are still to be given. Reads files."""
        self._read_again()
        return len(self._left)

    def _read_again(self) -> None:
        if (mark := self._now()) != self._mark:
            self._left = [text for text in self._read() if question_id(text) not in self._given][::-1]
            self._mark = mark  # now: what raised is read again

    def _now(self) -> tuple[int, int] | None:
        """What changes with the log."""
        try:
            found = self._entries.paths[0].stat()
        except OSError:
            return None
        return found.st_ino, found.st_size

    def _read(self) -> list[str]:
        """The newest questions, newest first."""
        made_at = self._store.made_at()
        found: dict[str, str] = {}
        for path in self._entries.paths:
            of_file: dict[str, str] = {}
            for record in records_in(path, self._namespace, made_at):
                question = record["question"]
                of_file.pop(same_question(question), None)
                of_file[same_question(question)] = question
                if len(of_file) > self._most:
                    del of_file[next(iter(of_file))]
            found |= {same: text for same, text in reversed(of_file.items()) if same not in found}
        return list(found.values())[: self._most]
