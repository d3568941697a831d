"""Sessions over every route: what the next turn's prompt is, what ends a session, and who may use it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragserve.answering.prompt import load_tokenizer
from ragserve.config import DEFAULT_MODEL
from sglang_ext.wire.protocol import SessionPart, session_key
from tests.unit.api.scripted_server import DOCUMENTS, Live, Tenants, eventually, serving
from tests.unit.api.test_query import sse

FIRST = "Who built the lighthouse of Skerryvore?"
THEN = "And how is the soup of leeks made?"


def ask(client: httpx.Client, question: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"query": question, "namespace": "docs", "k": 1, "follow_ups": "alone", **fields}
    response = client.post("/rag/query", json=body)
    assert response.status_code == status, response.text
    return dict(response.json())


def refused(client: httpx.Client, status: int, code: str, **fields: Any) -> dict[str, Any]:
    error = dict(ask(client, THEN, status, **fields)["error"])
    assert error["code"] == code, error
    return error


def decoded(ids: list[int]) -> str:
    return str(load_tokenizer(DEFAULT_MODEL).decode(ids))


def test_a_turn_sends_its_question_and_adds_what_is_new(client: httpx.Client, live: Live, docs: str) -> None:
    first = ask(client, FIRST, session="new", max_new_tokens=20)
    name = first["session"]["id"]
    assert first["session"] | {"expires_in_s": 0, "tokens": 0} == {
        "id": name,
        "turn": 1,
        "expires_in_s": 0,
        "documents": 1,
        "documents_added": 1,
        "documents_known": 0,
        "tokens": 0,
        "tokens_held": 0,
        "tokens_computed": 0,
        "earlier": None,
        "refreshed": False,
    }
    before = live.engine.requests[-1].input_ids
    live.engine.deltas, live.engine.cached = (" Boil", " them", " [2]."), len(before)
    then = ask(client, THEN, session=name, k=3)
    sent = live.engine.requests[-1].input_ids
    assert sent[: len(before)] == before
    added = decoded(sent[len(before) :])
    assert added.startswith(" Alan Stevenson [1].<|eos|><|doc|>Soup\n"), "the answer, and then new documents"
    assert added.endswith(f"<|question|>{THEN}\n<|answer|>")
    assert DOCUMENTS["skerryvore"] not in added, "a passage that is there is not added twice"
    assert {one["title"]: one["index"] for one in then["citations"]} == {"Soup": 2}
    session, context = then["session"], then["context"]
    assert (session["turn"], session["documents"], session["documents_added"]) == (2, 3, 2)
    assert session["documents_known"] == 1
    assert session["tokens_held"] == context["tokens_by_tier"]["session"] == len(before)
    computed = live.engine.requests[-1].spans[0].end - len(before)
    assert session["tokens_computed"] == computed == 10, "the answer and what ends it"
    assert (context["documents_retrieved"], context["documents_kept"]) == (3, 3)
    assert context["tokens_recomputed"] == context["tokens_kept"] == context["tokens_retrieved"]
    assert session["tokens"] > len(sent)

    last = ask(client, "And who built the lighthouse of Bell Rock?", session=name)
    assert last["session"]["documents_added"] == 0
    assert last["context"]["notes"] == []
    assert "<|doc|>" not in decoded(live.engine.requests[-1].input_ids[len(sent) :])
    (listed,) = client.get("/rag/sessions").json()["sessions"]
    assert (listed["id"], listed["turns"], listed["documents"], listed["strategy"]) == (name, 3, 3, "prefix")
    assert listed["expires_at"] > listed["used_at"] >= listed["created_at"]
    assert client.delete(f"/rag/sessions/{name}").json()["id"] == name
    assert client.get("/rag/sessions").json() == {"sessions": []}
    refused(client, 404, "session_not_found", session=name)


def test_the_engine_is_told_whose_kv_a_turn_goes_on_with(client: httpx.Client, live: Live, docs: str) -> None:
    options = {"strategy": "epic", "strategy_options": {"force": True}}
    name = ask(client, FIRST, session="new", **options)["session"]["id"]
    first = live.engine.requests[-1]
    assert first.session == SessionPart(session_key("docs", name), 0)
    assert first.earlier is None
    ask(client, THEN, session=name)
    second = live.engine.requests[-1]
    assert second.strategy == "epic", "a session keeps its strategy"
    assert second.session == SessionPart(session_key("docs", name), first.spans[-1].end)
    assert second.spans[0].start == 0
    assert second.spans[0].end == second.spans[1].start > len(first.input_ids)
    ask(client, "And what of Bell Rock?", session=name, k=3)
    assert live.engine.requests[-1].earlier is not None
    again = live.engine.requests[-1].earlier()
    assert again.input_ids == second.input_ids
    assert (again.spans, again.session, again.sampling.max_new_tokens) == (second.spans, second.session, 1)
    assert again.earlier is not None
    assert again.earlier().input_ids == first.input_ids
    assert again.earlier().earlier is None
    client.delete(f"/rag/sessions/{name}")


def test_over_the_other_routes(client: httpx.Client, live: Live, docs: str) -> None:
    events = sse(
        client.post(
            "/rag/query", json={"query": FIRST, "namespace": docs, "k": 1, "session": "new", "stream": True}
        ).text
    )
    name = events[0][1]["session"]
    assert events[-2][1]["session"]["id"] == name
    before = live.engine.requests[-1].input_ids
    messages = [{"role": "user", "content": "This"}, {"role": "assistant", "content": "is ignored."}]
    chat = {
        "model": "ragserve/docs",
        "messages": [*messages, {"role": "user", "content": THEN}],
        "session": name,
        "k": 1,
    }
    answer = client.post("/v1/chat/completions", json=chat).json()
    assert answer["ragserve"]["session"]["turn"] == 2
    sent = live.engine.requests[-1].input_ids
    assert sent[: len(before)] == before
    assert "ignored" not in decoded(sent)
    unknown = client.post("/v1/chat/completions", json=chat | {"session": "0" * 32})
    assert unknown.json()["error"]["code"] == "session_not_found"
    client.delete(f"/rag/sessions/{name}")


def test_what_a_session_keeps_cannot_change(client: httpx.Client, live: Live, docs: str) -> None:
    name = ask(client, FIRST, session="new", system="Be short.")["session"]["id"]
    for field, value in {
        "history": [{"role": "user", "content": "Hello."}],
        "system": "Be long.",
        "strategy": "full",
    }.items():
        assert refused(client, 400, "invalid_request", session=name, **{field: value})["param"] == field
    assert ask(client, THEN, session=name, system="Be short.", strategy="prefix")["session"]["turn"] == 2
    samkv = {"strategy": "samkv", "strategy_options": {"force": True}}
    assert (
        "keeps part of the documents"
        in refused(client, 400, "invalid_request", session="new", **samkv)["message"]
    )
    assert len(client.get("/rag/sessions").json()["sessions"]) == 1, "a refused first turn leaves no session"
    client.delete(f"/rag/sessions/{name}")


def talked(client: httpx.Client, live: Live, **fields: Any) -> tuple[dict[str, Any], list[list[int]]]:
    """The answer of the last of four turns, and the prompts of all."""
    asked = len(live.engine.requests)
    answer = ask(client, FIRST, session="new", **fields)
    for question in (
        THEN,
        "And who built the lighthouse of Bell Rock?",
        "So who built the lighthouse of Skerryvore?",
    ):
        answer = ask(client, question, session=answer["session"]["id"])
    client.delete(f"/rag/sessions/{answer['session']['id']}")
    return answer, [request.input_ids for request in live.engine.requests[asked:]]


def test_a_budget_shortens_the_turns_before_the_last(client: httpx.Client, live: Live, docs: str) -> None:
    whole, prompts = talked(client, live)
    assert whole["session"]["earlier"] is None
    roomy, same = talked(client, live, session_budget=1000)
    assert same == prompts, "to the token"
    assert {one["reason"] for one in roomy["session"]["earlier"]} == {
        "the earlier turns are within the budget"
    }
    sizes = [one["tokens"] for one in roomy["session"]["earlier"]]
    budget = sizes[0] + sizes[1] - 1  # that of the first two turns is exceeded in the last one
    short, less = talked(client, live, session_budget=budget)
    assert less[:3] == prompts[:3]
    session = short["session"]
    kept = [one["tokens_kept"] for one in session["earlier"]]
    assert [one["tokens"] for one in session["earlier"]] == sizes
    assert kept[2] == sizes[2], "the last turn is whole"
    assert 0 < sum(kept[:2]) <= budget
    # the passage was found again: it stands with the question, and not in its first turn
    assert decoded(less[3]).count(DOCUMENTS["skerryvore"]) == 1
    assert decoded(less[3]).endswith(
        f"<|doc|>Skerryvore\n{DOCUMENTS['skerryvore']}\n"
        "<|question|>So who built the lighthouse of Skerryvore?\n<|answer|>"
    )
    assert (session["documents_added"], session["documents_known"]) == (1, 0)
    assert "1 of its passages stand elsewhere" in session["earlier"][0]["reason"]


def test_passages_of_a_shortened_dialogue_are_numbered_by_their_places(
    client: httpx.Client, live: Live, docs: str
) -> None:
    live.engine.deltas = (" It is so [1] [2]", ".")
    answer = ask(client, FIRST, session="new")
    for question in (THEN, "And who built the lighthouse of Bell Rock?"):
        answer = ask(client, question, session=answer["session"]["id"], session_budget=8)
    prompt = decoded(live.engine.requests[-1].input_ids)
    assert [one["title"] for one in answer["citations"]] == ["Soup", "Bell"]
    assert prompt.index(DOCUMENTS["soup"]) < prompt.index(DOCUMENTS["bell"])
    assert DOCUMENTS["skerryvore"] not in prompt
    assert answer["session"]["documents"] == 2
    name = answer["session"]["id"]
    again = ask(client, "And Skerryvore?", session=name, session_budget=0, k=3)
    assert again["session"]["documents_known"] == 3, "nothing of the dialogue is lost"
    assert again["session"]["earlier"] is None
    client.delete(f"/rag/sessions/{name}")


def test_what_is_left_of_earlier_turns_is_computed_as_a_text_of_its_own(
    client: httpx.Client, live: Live, docs: str
) -> None:
    options = {"strategy": "epic", "strategy_options": {"force": True}, "session_budget": 30}
    name = ask(client, FIRST, session="new", **options)["session"]["id"]
    system = live.engine.requests[-1].spans[0].end
    ask(client, THEN, session=name)
    ask(client, "And who built the lighthouse of Bell Rock?", session=name)
    third = live.engine.requests[-1]
    assert third.session is not None
    assert third.session.key == session_key("docs", name)
    assert third.earlier is not None
    last = third.earlier()
    assert third.session.held == last.spans[-1].end, "up to the last turn's document"
    assert "<|doc|>Soup" in decoded(last.input_ids[last.spans[1].start : last.spans[1].end])
    assert last.earlier is not None
    text = last.earlier()
    assert last.session == SessionPart(third.session.key, len(text.input_ids)), "all of it is needed"
    assert text.session == SessionPart(third.session.key, 0)
    assert [(span.start, span.end) for span in text.spans] == [(0, system)], "no document of the cache"
    assert system < len(text.input_ids) <= system + 30
    assert text.earlier is None
    client.delete(f"/rag/sessions/{name}")


def test_budgets_over_the_other_route_and_without_a_session(
    client: httpx.Client, live: Live, docs: str
) -> None:
    error = refused(client, 400, "invalid_request", session_budget=100)
    assert error["param"] == "session_budget"
    refused(client, 400, "invalid_request", session="new", session_budget=-1)
    messages = [{"role": "user", "content": FIRST}]
    chat = {"model": "ragserve/docs", "messages": messages, "session": "new", "session_budget": 50, "k": 1}
    answer = client.post("/v1/chat/completions", json=chat).json()["ragserve"]["session"]
    assert answer["earlier"] == []
    answer = ask(client, THEN, session=answer["id"])["session"]
    assert [one["turn"] for one in answer["earlier"]] == [1], "a session keeps its budget"
    client.delete(f"/rag/sessions/{answer['id']}")


def test_a_turn_that_fails_changes_nothing(client: httpx.Client, live: Live, docs: str) -> None:
    live.engine.finish_reason = "abort"
    ask(client, FIRST, 502, session="new")
    live.engine.finish_reason = "stop"
    assert client.get("/rag/sessions").json() == {"sessions": []}
    name = ask(client, FIRST, session="new")["session"]["id"]
    live.engine.finish_reason = "abort"
    ask(client, THEN, 502, session=name)
    live.engine.finish_reason = "stop"
    answer = ask(client, THEN, session=name)
    assert (answer["session"]["turn"], answer["session"]["documents"]) == (2, 2)
    client.delete(f"/rag/sessions/{name}")


def test_two_turns_at_once_come_one_after_the_other(client: httpx.Client, live: Live, docs: str) -> None:
    name = ask(client, FIRST, session="new")["session"]["id"]
    live.engine.hold.clear()
    asked = len(live.engine.requests)
    with ThreadPoolExecutor(2) as pool:
        turns = [pool.submit(ask, client, question, session=name) for question in (THEN, "And Bell Rock?")]
        eventually(lambda: live.services.limiter.in_flight == 2, "two turns in flight")
        eventually(lambda: len(live.engine.requests) == asked + 1, "one of them at the engine")
        assert len(live.engine.running) == 1
        live.engine.hold.set()
        answers = sorted((turn.result()["session"] for turn in turns), key=lambda one: one["turn"])
    assert [one["turn"] for one in answers] == [2, 3]
    first, second = (request.input_ids for request in live.engine.requests[asked:])
    assert second[: len(first)] == first
    client.delete(f"/rag/sessions/{name}")


def test_two_turns_at_once_are_shortened_one_after_the_other(
    client: httpx.Client, live: Live, docs: str
) -> None:
    name = ask(client, FIRST, session="new", session_budget=8)["session"]["id"]
    ask(client, THEN, session=name)
    live.engine.hold.clear()
    asked = len(live.engine.requests)
    questions = ("And who built the lighthouse of Bell Rock?", "Is soup made of leeks?")
    with ThreadPoolExecutor(2) as pool:
        turns = [pool.submit(ask, client, question, session=name) for question in questions]
        eventually(lambda: live.services.limiter.in_flight == 2, "two turns in flight")
        eventually(lambda: len(live.engine.requests) == asked + 1, "one of them at the engine")
        live.engine.hold.set()
        answers = sorted((turn.result()["session"] for turn in turns), key=lambda one: one["turn"])
    assert [len(one["earlier"]) for one in answers] == [2, 3]
    first, second = (decoded(request.input_ids) for request in live.engine.requests[asked:])
    last = first[first.rindex("<|question|>") :]
    assert f"{last} Alan Stevenson [1].<|eos|>" in second, "the turn before is whole"
    client.delete(f"/rag/sessions/{name}")


def test_a_turn_that_waits_for_a_first_turn_that_fails_finds_no_session(
    client: httpx.Client, live: Live, docs: str
) -> None:
    live.engine.hold.clear()
    live.engine.finish_reason = "abort"
    body = {"query": FIRST, "namespace": docs, "k": 1, "session": "new", "stream": True}
    with client.stream("POST", "/rag/query", json=body) as response, ThreadPoolExecutor(1) as pool:
        lines = response.iter_lines()
        name = json.loads(next(line for line in lines if line.startswith("data: "))[6:])["session"]
        waiting = pool.submit(refused, client, 404, "session_not_found", session=name)
        eventually(lambda: live.services.limiter.in_flight == 2, "two turns in flight")
        live.engine.hold.set()
        assert "event: error" in list(lines)
        waiting.result()
    assert client.get("/rag/sessions").json() == {"sessions": []}


def test_a_passage_that_is_sent_twice_is_added_once(client: httpx.Client, live: Live, docs: str) -> None:
    one, two = ({"title": name, "text": f"{name} is a rock."} for name in ("One", "Two"))
    name = ask(client, FIRST, session="new", documents=[one])["session"]["id"]
    session = ask(client, THEN, session=name, documents=[two, one, two])["session"]
    assert (session["documents"], session["documents_added"], session["documents_known"]) == (2, 1, 2)
    sent = decoded(live.engine.requests[-1].input_ids)
    assert (sent.count("One is a rock."), sent.count("Two is a rock.")) == (1, 1)
    client.delete(f"/rag/sessions/{name}")


def test_a_first_turn_numbers_equal_passages_by_their_places(client: httpx.Client, docs: str) -> None:
    one, two = ({"title": name, "text": f"{name} is a rock."} for name in ("One", "Two"))
    body = {"query": FIRST, "namespace": docs, "documents": [one, two, one], "stream": True}
    shown = []
    for session in ({}, {"session": "new"}):
        events = sse(client.post("/rag/query", json=body | session).text)
        shown.append([(each["index"], each["title"]) for each in events[0][1]["results"]])
    client.delete(f"/rag/sessions/{events[0][1]['session']}")
    assert shown[0] == shown[1] == [(1, "One"), (2, "Two"), (3, "One")]


def test_a_first_question_without_an_answer_begins_no_session(client: httpx.Client, docs: str) -> None:
    answer = ask(client, FIRST, session="new", min_score=2.0)
    assert answer["session"] is None
    assert answer["context"]["notes"][-1].startswith("No session was begun")
    assert client.get("/rag/sessions").json() == {"sessions": []}
    assert len(ask(client, FIRST, min_score=2.0)["context"]["notes"]) == 1


def test_a_session_is_full_at_the_end_of_the_context(client: httpx.Client, live: Live, docs: str) -> None:
    name = ask(client, FIRST, session="new", max_new_tokens=20)["session"]["id"]
    tales = [{"text": "A tale of the sea. " * 150, "title": f"Tale {i}"} for i in range(3)]
    answer = ask(client, THEN, session=name, documents=tales, documents_overflow="drop", max_new_tokens=20)
    assert "did not fit" in answer["context"]["notes"][0]
    live.index("docs", {f"tale{i}": f"Tale {i} of soup. " * 300 for i in range(2)})
    answer = ask(client, "A tale?", session=name, k=2, max_new_tokens=20)
    assert answer["session"]["documents_added"] == 0
    assert "did not fit" in answer["context"]["notes"][0], "the passages there are answer"
    error = refused(client, 400, "session_full", session=name, max_new_tokens=1400)
    assert "The session is full" in error["message"]
    client.delete(f"/rag/sessions/{name}")


@pytest.fixture
def own(tmp_path: Path, model_path: Path) -> Iterator[Live]:
    with serving(tmp_path, model_path, max_sessions=2, session_ttl_s=3600, session_budget=8) as live:
        live.index("docs", DOCUMENTS)
        live.index("other", DOCUMENTS)
        yield live


@pytest.mark.parametrize("change", ["removed", "replaced", "namespace"])
def test_a_removed_document_does_not_live_on_in_a_session(own: Live, change: str) -> None:
    with own.client() as client:
        name = ask(client, FIRST, session="new")["session"]["id"]
        other = ask(client, THEN, session="new")["session"]["id"]
        dialogue = own.services.dialogues._dialogues[name]
        document = next(d for d in own.services.store.documents("docs") if d.source == "skerryvore")
        if change == "removed":
            client.delete(f"/rag/documents/{document.doc_id}", params={"namespace": "docs"})
            assert (dialogue.ids, dialogue.passages, dialogue.messages) == ([], [], []), "its texts are gone"
        elif change == "replaced":  # by another process: found when the next turn asks
            own.index("docs", {"skerryvore": "Skerryvore was built by somebody else."})
        else:
            client.delete("/rag/namespaces/docs")
        refused(client, 409, "session_outdated", session=name)
        assert not dialogue.ids
        outdated = {one["id"]: one["outdated"] for one in client.get("/rag/sessions").json()["sessions"]}
        assert outdated[name]
        if change == "namespace":
            assert outdated[other]
        else:
            assert ask(client, FIRST, session=other, k=1)["session"]["turn"] == 2


def test_a_document_that_was_left_out_ends_its_session_as_well(own: Live) -> None:
    with own.client() as client:
        name = ask(client, FIRST, session="new")["session"]["id"]
        ask(client, THEN, session=name)
        turn = ask(client, "And who built the lighthouse of Bell Rock?", session=name)["session"]
        assert turn["earlier"][0]["tokens_kept"] == 0, "the server's budget"
        assert DOCUMENTS["skerryvore"] not in decoded(own.engine.requests[-1].input_ids)
        document = next(d for d in own.services.store.documents("docs") if d.source == "skerryvore")
        client.delete(f"/rag/documents/{document.doc_id}", params={"namespace": "docs"})
        refused(client, 409, "session_outdated", session=name)
        assert not own.services.dialogues._dialogues[name].past


def test_others_cannot_name_see_or_end_a_session(own: Live) -> None:
    keys = Tenants(own)
    with keys.client("one", "read", "docs", "other") as one, keys.client("two", "read", "docs") as two:
        name = ask(one, FIRST, session="new")["session"]["id"]
        theirs = refused(two, 404, "session_not_found", session=name)
        unknown = refused(two, 404, "session_not_found", session="f" * 32)
        assert theirs["message"].replace(name, "") == unknown["message"].replace("f" * 32, "")
        assert two.delete(f"/rag/sessions/{name}").status_code == 404
        assert two.get("/rag/sessions").json() == {"sessions": []}
        refused(one, 404, "session_not_found", session=name, namespace="other")
        assert ask(one, THEN, session=name)["session"]["turn"] == 2
        ask(one, FIRST, session="new")
        error = refused(one, 429, "too_many_sessions", session="new")
        assert "max_sessions" in error["message"]
        ask(one, FIRST, session="new", namespace="other")
        ask(two, FIRST, session="new")
        one.delete(f"/rag/sessions/{name}")
        ask(one, FIRST, session="new")


def test_a_session_expires_and_an_answer_under_way_is_finished(own: Live) -> None:
    with own.client() as client, ThreadPoolExecutor(1) as pool:
        name = ask(client, FIRST, session="new")["session"]["id"]
        own.engine.hold.clear()
        turn = pool.submit(ask, client, THEN, session=name)
        eventually(lambda: len(own.engine.running) == 1, "an answer under way")
        own.services.dialogues._ttl_s = 0.0
        assert client.delete(f"/rag/sessions/{name}").status_code == 200
        own.engine.hold.set()
        assert turn.result()["session"]["turn"] == 2
        refused(client, 404, "session_not_found", session=name)
        own.services.dialogues._ttl_s = 3600
        name = ask(client, FIRST, session="new")["session"]["id"]
        own.services.dialogues._ttl_s = 0.0
        threading.Event().wait(0.002)
        refused(client, 404, "session_not_found", session=name)
        assert client.get("/rag/sessions").json() == {"sessions": []}
