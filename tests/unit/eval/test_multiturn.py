"""Dialogues made of a set's questions: what each turn brings, what is sent, and figures by turn."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.answering.results import Answer
from ragserve.errors import InvalidRequest, Unavailable
from ragserve.eval.data import GivenPassage, Question
from ragserve.eval.multiturn import ask_dialogues, by_turn, dialogues_of, shortened_runs
from ragserve.eval.page_rivals import page_rivals
from ragserve.eval.rest import evaluate_set
from ragserve.eval.run import Options
from tests.unit.eval.answers import answered


def question(number: int) -> Question:
    document = GivenPassage(f"d{number}", f"It is {number}.")
    return Question(str(number), f"What is {number}?", (str(number),), (document,), (document,), "")


class Server:
    """Knows the answer to a question whose document it has been sent, in this session or with the request."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.sessions: dict[str, set[str]] = {}
        self.ended: list[str] = []
        self.down: set[str] = set()

    def query(self, text: str, **fields: Any) -> Answer:
        self.asked.append({"query": text, **fields})
        if text in self.down:
            raise Unavailable("down")
        titles = {document["title"] for document in fields["documents"]}
        session, name = None, fields.get("session")
        if name is not None:
            name = f"s{len(self.sessions)}" if name == "new" else name
            known = self.sessions.setdefault(name, set())
            session = {"id": name, "turn": 1, "expires_in_s": 1.0, "documents": 1, "documents_added": 1}
            session |= {"documents_known": 0, "tokens": 9, "tokens_held": len(known), "tokens_computed": 2}
            known |= titles
            titles = known
        number = text.split()[-1].rstrip("?")
        said = answered(number if f"d{number}" in titles else "unknown")
        return Answer.model_validate(said.model_dump() | {"session": session})

    def retrieve(self, text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(results=[])

    def ingest_texts(self, texts: Any, *, namespace: str) -> str:
        return "job"

    def wait(self, job: str, *, timeout_s: float) -> SimpleNamespace:
        return SimpleNamespace(job_id=job, counts={})

    def drop_namespace(self, name: str) -> None: ...

    def info(self) -> SimpleNamespace:
        return SimpleNamespace(model="models/tiny")

    def end_session(self, session_id: str) -> None:
        self.ended.append(session_id)


QUESTIONS = [question(number) for number in range(7)]


def test_half_of_the_dialogues_need_documents_of_an_earlier_turn() -> None:
    here, earlier = dialogues_of(QUESTIONS, 3)
    assert [[d.title for d in turn.documents] for turn in here] == [["d0"], ["d1"], ["d2"]]
    assert [turn.question.id for turn in earlier] == ["3", "4", "5"]
    assert [[d.title for d in turn.documents] for turn in earlier] == [["d3", "d4"], ["d5"], []]
    assert [turn.place for turn in (*here, *earlier)] == ["here"] * 4 + ["earlier"] * 2
    with pytest.raises(InvalidRequest, match="fewer than two dialogues"):
        dialogues_of(QUESTIONS, 4)
    _, ahead = dialogues_of(QUESTIONS, 3, ahead=2)
    assert [[d.title for d in turn.documents] for turn in ahead] == [["d3", "d4", "d5"], [], []]
    _, farther = dialogues_of(QUESTIONS, 3, ahead=9)
    assert farther == ahead


def test_a_dialogue_is_one_session_and_is_ended() -> None:
    server, steps = Server(), []
    options = Options("concat", concurrency=1, strategy_options={"share": 0.1}, decode={"mode": "dense"})
    client: Any = server
    outcomes = ask_dialogues(client, dialogues_of(QUESTIONS, 3), options, progress=lambda: steps.append(1))
    assert [one.answer.em for one in outcomes] == [1.0] * 6
    assert [asked["session"] for asked in server.asked] == ["new", "s0", "s0", "new", "s1", "s1"]
    assert [asked.get("strategy") for asked in server.asked[:3]] == ["concat", None, None]
    assert server.asked[0]["strategy_options"] == {"share": 0.1, "force": True}
    assert all(asked["decode"] == {"mode": "dense"} for asked in server.asked)
    assert server.ended == ["s0", "s1"]
    assert len(steps) == 6
    lines = by_turn("concat", outcomes, outcomes)
    assert [(line["turn"], line["n"], line["f1"], line["as_full"]) for line in lines] == [
        (number, 2, 100.0, 100.0) for number in (1, 2, 3)
    ]
    assert [(line["here"], line["earlier"]) for line in lines] == [
        (100.0, None),
        (100.0, 100.0),
        (100.0, 100.0),
    ]
    assert [line["held"] for line in lines] == [0, 1.5, 2.5]
    assert outcomes[4].record() | {"turn": 2, "place": "earlier", "held": 2} == outcomes[4].record()


def test_the_rival_sends_all_documents_so_far_and_the_history() -> None:
    client: Any = Server()
    outcomes = ask_dialogues(
        client,
        dialogues_of(QUESTIONS, 3),
        Options(concurrency=1),
        documents_first=True,
        progress=lambda: None,
    )
    assert [one.answer.em for one in outcomes] == [1.0] * 6
    third = client.asked[2]
    assert [document["title"] for document in third["documents"]] == ["d2", "d1", "d0"], "the newest in front"
    assert [message["content"] for message in third["history"]] == ["What is 0?", "0", "What is 1?", "1"]
    assert "session" not in third
    assert third["strategy"] == "prefix"


def test_a_turn_that_fails_counts_as_wrong_and_the_others_go_on() -> None:
    server = Server()
    server.down = {"What is 1?", "What is 3?"}
    client: Any = server
    outcomes = ask_dialogues(
        client, dialogues_of(QUESTIONS, 3), Options("prefix", concurrency=1), progress=lambda: None
    )
    assert [bool(one.answer.error) for one in outcomes] == [False, True, False, True, False, False]
    assert server.asked[4]["session"] == "new", "the first turn that is answered begins the session"
    assert by_turn("prefix", outcomes, ())[0]["failed"] == 1
    assert by_turn("prefix", outcomes, ())[0]["as_full"] is None
    first = by_turn("prefix", outcomes, outcomes)[0]
    assert (first["as_full"], first["f1"], first["held"]) == (100.0, 50.0, 0.0), "of what was answered"
    dead = by_turn("prefix", outcomes[3:4], outcomes[3:4])[0]
    assert (dead["as_full"], dead["held"], dead["failed"]) == (None, None, 1)


def test_a_server_that_goes_away_leaves_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()

    def gone(session_id: str) -> None:
        raise Unavailable("gone")

    monkeypatch.setattr(server, "end_session", gone)
    server.down = {"What is 2?", "What is 5?"}
    client: Any = server
    outcomes = ask_dialogues(
        client, dialogues_of(QUESTIONS, 3), Options("prefix", concurrency=1), progress=lambda: None
    )
    assert [bool(one.answer.error) for one in outcomes] == [False, False, True] * 2


def test_a_set_over_rest(tmp_path: Path) -> None:
    rows = [
        {"id": one.id, "question": one.question, "answers": one.answers, "docs": [[d.title, d.text]]}
        for one in QUESTIONS
        for d in one.documents
    ]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    client: Any = Server()
    rivals = page_rivals(512).items()
    runs = [Options("prefix", concurrency=1), Options("full", concurrency=1)]
    runs += shortened_runs(runs, [300, 900])
    runs += [Options("prefix", concurrency=1, decode=decode, name=label) for label, decode in rivals]
    out = tmp_path / "report.json"
    lines = evaluate_set(client, tmp_path / "set.jsonl", runs, mode="multiturn", turns=3, limit=None, out=out)
    assert len(lines) == 9 * 6
    assert {line["set"] for line in lines} == {"set"}
    begun = [asked for asked in client.asked if asked.get("session") == "new"]
    assert [asked["session_budget"] for asked in begun if "session_budget" in asked] == [300, 300, 900, 900]
    observed = [asked["decode"]["observe"] for asked in client.asked if asked.get("decode")]
    assert observed == [who for who in ("window", "last", "prompt", "recent") for _ in range(6)]
    report = json.loads(out.read_text())
    assert (report["workload"]["turns"], report["workload"]["dialogues"]) == (3, 2)
    found = [(row["strategy"], row["turn"], row["as_full"]) for row in report["rows"]]
    shortened = ("prefix, earlier in 300", "prefix, earlier in 900")
    labels = ("prefix", "full", *shortened, *(label for label, _ in rivals), "prefix, documents first")
    assert found == [(label, turn, 100.0) for label in labels for turn in (1, 2, 3)]


@pytest.mark.parametrize("mode", ["given", "retrieved"])
def test_lines_of_every_mode_say_of_which_set_they_are(tmp_path: Path, mode: str) -> None:
    row = {"question": "What is 1?", "answers": ["1"], "docs": [["d1", "It is 1."]]}
    (tmp_path / "set.jsonl").write_text(json.dumps(row))
    server = Server()
    server.down = {"What is 1?"}
    client: Any = server
    lines = evaluate_set(
        client, tmp_path / "set.jsonl", [Options("full")], mode=mode, turns=2, limit=None, out=None
    )
    assert {(line["set"], line["id"]) for line in lines} == {("set", "1")}
    assert all("down" in line["error"] for line in lines)
