"""One question over several namespaces: what is found and said of where, whose rights it needs, and what the
others learn of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from ragserve.answering import auto
from ragserve.answering.auto import Chooser
from ragserve.client import Client
from ragserve.programs import Rag
from sglang_ext.wire.joint_names import MOST
from tests.unit.api.scripted_server import DOCUMENTS, Live, Tenants, eventually, serving

QUESTION = "Who built the lighthouse of Skerryvore?"
LIGHTS = {name: DOCUMENTS[name] for name in ("skerryvore", "bell")}
BOTH = {"query": QUESTION, "namespaces": ["docs-lights", "docs-food"]}
JOINT = "docs-food+docs-lights"


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Tenants]:
    options = {"query_log_bytes": 2**20, "feedback_bytes": 2**20}
    with serving(tmp_path_factory.mktemp("several"), model_path, **options) as live:
        live.index("docs-lights", LIGHTS)
        live.index("docs-food", {"soup": DOCUMENTS["soup"]})
        live.index("docs-secret", {"safe": "The lighthouse keeper's word is quillmark."})
        found = Tenants(live)
        found.keys.create("first", (), ["admin"])
        yield found


@pytest.fixture
def live(tenants: Tenants) -> Live:
    tenants.live.engine.reset()
    return tenants.live


@pytest.fixture(scope="module")
def reader(tenants: Tenants) -> Iterator[httpx.Client]:
    with tenants.client("reader", "read", "docs-lights", "docs-food", "docs-none") as client:
        yield client


@pytest.fixture(scope="module")
def admin(tenants: Tenants) -> Iterator[httpx.Client]:
    with tenants.client("operator", "admin") as client:
        yield client


def refused(reply: httpx.Response) -> tuple[int, str, str]:
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["message"]


@pytest.mark.parametrize("retrieval", ["dense", "lexical", "hybrid"])
def test_passages_name_their_namespace_and_are_ordered_over_all(
    reader: httpx.Client, admin: httpx.Client, live: Live, retrieval: str
) -> None:
    live.index("whole", DOCUMENTS)
    found = reader.post("/rag/retrieve", json=BOTH | {"retrieval": retrieval}).json()
    assert (found["namespace"], found["index_version"]) == (JOINT, None)
    assert found["index_versions"] == {"docs-food": 1, "docs-lights": 1}
    assert {one["source"]: one["namespace"] for one in found["results"]} == {
        one["source"]: "docs-food" if one["source"] == "soup" else "docs-lights" for one in found["results"]
    }
    body = {"query": QUESTION, "namespace": "whole", "retrieval": retrieval}
    whole = admin.post("/rag/retrieve", json=body).json()["results"]
    scores = [(one["source"], pytest.approx(one["score"], abs=1e-5)) for one in whole]
    assert [(one["source"], one["score"]) for one in found["results"]] == scores


def test_an_answer_cites_with_namespaces_and_sends_each_documents_own(
    reader: httpx.Client, admin: httpx.Client, live: Live
) -> None:
    answer = reader.post("/rag/query", json=BOTH).json()
    assert (answer["namespace"], answer["citations"][0]["namespace"]) == (JOINT, "docs-lights")
    (request,) = live.engine.requests
    found = reader.post("/rag/retrieve", json=BOTH).json()["results"]
    assert request.namespace == JOINT
    assert request.owners == ("docs-food", *(one["namespace"] for one in found))
    forced = {"strategy": "epic", "strategy_options": {"force": True}}
    admin.post("/rag/query", json=BOTH | forced)
    assert live.engine.requests[-1].owners == request.owners
    alone = reader.post("/rag/query", json={"query": QUESTION, "namespace": "docs-lights"}).json()
    assert (alone["namespace"], alone["index_version"], alone["index_versions"]) == ("docs-lights", 1, None)
    assert live.engine.requests[-1].owners == ()


def test_streams_say_the_same(reader: httpx.Client, live: Live) -> None:
    with Client(str(reader.base_url), api_key=reader.headers["Authorization"].split()[1]) as client:
        events = list(client.stream(QUESTION, namespaces=BOTH["namespaces"]))
        assert {event.namespace for event in events if hasattr(event, "index_versions")} == {JOINT}
        assert client.query(QUESTION, namespaces=["docs-*"]).namespace == JOINT


def test_programs_retrieve_from_several_and_share_their_prefixes(reader: httpx.Client, live: Live) -> None:
    key = reader.headers["Authorization"].split()[1]
    for names in (["docs-lights", "docs-food"], ["docs-*"]):
        rag = Rag(str(reader.base_url), namespaces=names, api_key=key)
        assert {one.namespace for one in rag.retrieve(QUESTION)} == {"docs-lights", "docs-food"}
        assert rag.joint_namespace() == JOINT
        rag.close()


def test_a_pattern_matches_what_the_key_may_read(
    reader: httpx.Client, admin: httpx.Client, live: Live
) -> None:
    def asked(client: httpx.Client, *names: str) -> str:
        reply = client.post("/rag/retrieve", json={"query": QUESTION, "namespaces": names, "k": 64})
        assert reply.status_code == 200, reply.text
        assert ("quillmark" in reply.text) == (client is admin)
        return str(reply.json()["namespace"])

    assert asked(reader, "docs-*") == asked(reader, "*") == JOINT
    assert asked(reader, "docs-f*", "docs-lights") == asked(reader, "docs-lights", "docs-food") == JOINT
    assert asked(reader, "docs-l*", "docs-lights") == "docs-lights"
    assert asked(admin, "docs-*") == "docs-food+docs-lights+docs-secret"


@pytest.mark.parametrize(
    "names",
    [["docs-secret"], ["docs-nobody"], ["docs-lights", "docs-secret"], ["docs-s*"], ["docs-food", "other*"]],
)
def test_others_are_answered_as_if_they_did_not_exist(reader: httpx.Client, names: list[str]) -> None:
    missing = names[-1]
    bodies = {
        "/rag/retrieve": {"query": QUESTION},
        "/rag/query": {"query": QUESTION},
        "/rag/feedback": {"rating": "up", "query": "?", "answer": "!"},
    }
    for path, body in bodies.items():
        status, code, message = refused(reader.post(path, json=body | {"namespaces": names}))
        assert (status, code) == (404, "namespace_not_found")
        assert message.startswith(f"There is no namespace {missing!r}. ")
    model = f"ragserve/{'+'.join(names)}"
    chat = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
    assert refused(reader.post("/v1/chat/completions", json=chat))[:2] == (404, "model_not_found")
    assert refused(reader.get(f"/v1/models/{model}"))[:2] == (404, "model_not_found")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"namespaces": []}, "at least 1 item"),
        ({"namespaces": ["a/b"]}, "should match pattern"),
        ({"namespaces": ["a+b"]}, "should match pattern"),
        ({"namespaces": ["*docs"]}, "should match pattern"),
        ({"namespaces": [f"n{i}" for i in range(MOST + 1)]}, f"at most {MOST} items"),
        ({"namespaces": ["docs-food"], "namespace": "docs-lights"}, "not both"),
        ({"namespaces": ["docs-*"], "documents": [{"text": "x"}]}, "under one namespace's name"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(reader: httpx.Client, body: dict[str, Any], told: str) -> None:
    status, _, message = refused(reader.post("/rag/query", json={"query": QUESTION} | body))
    assert status == 400
    assert told in message


def test_a_question_is_about_so_many_namespaces_at_most(admin: httpx.Client, live: Live) -> None:
    for number in range(MOST + 1):
        live.index(f"many-{number}", {"one": "A text."})
    body = {"query": QUESTION, "namespaces": ["many-*"]}
    assert refused(admin.post("/rag/retrieve", json=body))[:2] == (400, "too_many_namespaces")
    model = {"model": "ragserve/" + "+".join(["x"] * 99), "messages": [{"role": "user", "content": "?"}]}
    assert refused(admin.post("/v1/chat/completions", json=model))[:2] == (400, "too_many_namespaces")
    live.services.store.drop_namespace("many-0")
    assert admin.post("/rag/retrieve", json=body).status_code == 200
    for number in range(1, MOST + 1):
        live.services.store.drop_namespace(f"many-{number}")


def test_the_openai_model_of_several(reader: httpx.Client, live: Live) -> None:
    client = openai.OpenAI(
        base_url=f"{reader.base_url}/v1", api_key=reader.headers["Authorization"].split()[1], max_retries=0
    )
    for model in ("ragserve/docs-lights+docs-food", "ragserve/docs-*"):
        made = client.chat.completions.create(model=model, messages=[{"role": "user", "content": QUESTION}])
        extra = made.model_extra or {}
        assert (made.model, extra["ragserve"]["namespace"]) == (model, JOINT)
        assert extra["citations"][0]["namespace"] == "docs-lights"
        assert client.models.retrieve(model).id == model
    assert "+" not in str([one.id for one in client.models.list()])


def test_settings_hold_where_all_agree_and_conflicts_are_the_requests_to_decide(
    reader: httpx.Client, live: Live
) -> None:
    store = live.services.store
    store.set_settings("docs-lights", {"k": 1, "retrieval": "lexical", "system": "In Gaelic."})
    store.set_settings("docs-food", {"retrieval": "lexical"})
    try:
        status, code, message = refused(reader.post("/rag/retrieve", json=BOTH))
        assert (status, code) == (400, "namespace_settings_differ")
        assert message.startswith("The namespaces differ in their setting 'k', which docs-lights has. ")
        found = reader.post("/rag/retrieve", json=BOTH | {"k": 2}).json()
        assert (found["retrieval"], len(found["results"])) == ("lexical", 2)
        assert "'system'" in refused(reader.post("/rag/query", json=BOTH | {"k": 2}))[2]
        assert reader.post("/rag/query", json=BOTH | {"k": 2, "system": "In Norse."}).status_code == 200
        chat = {"model": f"ragserve/{JOINT}", "messages": [{"role": "user", "content": QUESTION}], "k": 2}
        assert "'system'" in refused(reader.post("/v1/chat/completions", json=chat))[2]
    finally:
        for name in ("docs-lights", "docs-food"):
            store.set_settings(name, {})


def test_auto_takes_what_is_verified_in_all(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"docs-lights": ["epic", "samkv"], "docs-food": ["samkv", "epic"], "docs-secret": ["concat"]}
    out = {"docs-food": {"epic"}}
    costs = SimpleNamespace(composed=("epic", "samkv", "concat"))
    gate = SimpleNamespace(
        verified=known.get, good=lambda labels, name: labels, basis=lambda label, name: f"of {name}"
    )
    info = SimpleNamespace(strategies=("epic", "samkv", "concat"), only_exact="")
    in_use = SimpleNamespace(taken_out=lambda name, _: out.get(name, set()))
    chooser = Chooser(SimpleNamespace(info=info), gate, live.settings.data_dir / "costs.json", in_use)  # type: ignore[arg-type]
    monkeypatch.setattr(auto, "CachingEngine", SimpleNamespace)
    monkeypatch.setattr(chooser, "_profile", lambda: costs)
    assert chooser.candidates("docs-lights").labels == ("epic", "samkv")
    joint = chooser.candidates(JOINT)
    assert (joint.labels, joint.bases["samkv"]) == (
        ("samkv",),
        "docs-food: of docs-food; docs-lights: of docs-lights",
    )
    none = chooser.candidates("docs-lights+docs-secret")
    assert (none.labels, none.reason) == ((), "no strategy is verified in all of these namespaces")


def test_a_session_goes_on_over_the_namespaces_of_its_first_turn(
    reader: httpx.Client, admin: httpx.Client, live: Live
) -> None:
    def turn(session: str, **where: Any) -> httpx.Response:
        return reader.post("/rag/query", json={"query": QUESTION, "session": session, **where})

    begun = turn("new", namespaces=["docs-*"]).json()["session"]["id"]
    listed = reader.get("/rag/sessions").json()["sessions"]
    assert [one["namespace"] for one in listed] == [JOINT]
    assert turn(begun, namespaces=["docs-lights", "docs-food"]).json()["session"]["turn"] == 2
    assert turn(begun, namespaces=["docs-lights"]).status_code == 404
    assert turn(begun, namespace="docs-lights").status_code == 404
    live.index("docs-none", {"new": "A lighthouse of glass."})
    try:
        later = turn(begun, namespaces=["docs-*"]).json()
        assert (later["session"]["turn"], later["namespace"]) == (3, JOINT)
        assert live.engine.requests[-1].session is not None
        begun = turn("new", namespaces=["docs-none", "docs-food"]).json()["session"]["id"]
        assert turn(begun, namespaces=["docs-*"]).json()["namespace"] == "docs-food+docs-none"
    finally:
        admin.delete("/rag/namespaces/docs-none")
    assert refused(turn(begun, namespaces=["docs-*"]))[:2] == (409, "session_outdated")


def test_a_composed_session_computes_each_turn_again_from_each_documents_own_kv(
    admin: httpx.Client, live: Live
) -> None:
    forced = {"strategy": "epic", "strategy_options": {"force": True}}
    body = BOTH | {"k": 1, "session": "new"}
    begun = admin.post("/rag/query", json=body | forced).json()["session"]["id"]
    soup = {"query": "What is a soup of leeks made of?", "namespaces": BOTH["namespaces"]}
    admin.post("/rag/query", json=soup | {"k": 1, "session": begun})
    first, second = [each for each in live.engine.requests if each.session is not None]
    assert first.owners == ("docs-food", "docs-lights")
    assert second.owners == ("docs-food", "docs-food")
    assert second.earlier is not None
    again = second.earlier()
    assert (again.namespace, again.owners, again.spans) == (JOINT, first.owners, first.spans)


def test_removing_a_document_of_one_takes_it_from_answers_and_sessions(
    reader: httpx.Client, admin: httpx.Client, live: Live
) -> None:
    live.index("docs-food", {"light soup": "The soup of the lighthouse of Skerryvore is thin."})
    begun = reader.post("/rag/query", json=BOTH | {"session": "new"}).json()
    found = reader.post("/rag/retrieve", json=BOTH).json()["results"]
    removed = next(one for one in found if one["source"] == "light soup")
    place = f"/rag/documents/{removed['doc_id']}"
    assert admin.delete(place, params={"namespace": "docs-food"}).status_code == 200
    found = reader.post("/rag/retrieve", json=BOTH).json()["results"]
    assert "light soup" not in [one["source"] for one in found]
    again = reader.post("/rag/query", json=BOTH | {"session": begun["session"]["id"]})
    assert refused(again)[:2] == (409, "session_outdated")
    assert "docs-food" in [name for name, _ in live.engine.forgotten]


def test_a_rating_is_kept_in_each_namespace_without_text_of_the_others(
    reader: httpx.Client, admin: httpx.Client, tenants: Tenants, live: Live
) -> None:
    with Client(str(reader.base_url), api_key=reader.headers["Authorization"].split()[1]) as client:
        answer = client.query(QUESTION, namespaces=["docs-lights", "docs-food"])
        rows = {row.namespace: row for row in client.rate(answer, QUESTION, "up").rows}
    cited = {one.doc_id for one in answer.citations if one.namespace == "docs-lights"}
    assert cited
    assert set(rows["docs-lights"].documents) == cited
    assert rows["docs-food"].documents == []
    with tenants.client("curator", "read ingest", "docs-food") as curator:
        listed = curator.get("/rag/feedback", params={"namespace": "docs-food"})
        for _ in range(200):
            if listed.json()["rows"]:
                break
            listed = curator.get("/rag/feedback", params={"namespace": "docs-food"})
        (row,) = listed.json()["rows"]
        assert (row["question"], row["answers"], row["answer"]) == (QUESTION, [], "")
        assert "Alan" not in listed.text
        assert "docs-lights" not in listed.text


def test_logs_have_a_question_where_it_was_read_and_where_it_was_not_found(
    reader: httpx.Client, tenants: Tenants, live: Live
) -> None:
    noted: list[tuple[str, str, dict[str, Any]]] = []
    answerer = live.services.answerer

    def note(namespace: str, question: str, began: float, *more: Any, **fields: Any) -> None:
        noted.append((namespace, question, fields))

    query_log, unanswered = answerer._on_answered.__self__, answerer._on_doubt.__self__
    query_log.note = unanswered.note = note
    try:
        reader.post("/rag/query", json=BOTH | {"k": 1})
        assert [name for name, *_ in noted] == ["docs-lights"]
        noted.clear()
        missing = {"query": "zebra?", "namespaces": ["docs-*"], "min_score": 0.99}
        reader.post("/rag/query", json=missing)
        assert [(name, fields["why"]) for name, _, fields in noted] == [
            ("docs-food", "the passages do not seem to answer"),
            ("docs-lights", "the passages do not seem to answer"),
        ]
    finally:
        del query_log.note, unanswered.note


def test_neighbours_and_filters_are_of_each_namespace(reader: httpx.Client, live: Live) -> None:
    filter = {"op": "in", "field": "source", "values": ["soup", "bell"]}
    found = reader.post("/rag/retrieve", json=BOTH | {"filter": filter, "neighbours": 1}).json()["results"]
    assert {one["source"] for one in found} == {"soup", "bell"}


def test_what_somebody_says_of_several_has_the_labels_that_they_see_in_all(
    tenants: Tenants, live: Live
) -> None:
    """It may rest on a labelled document of one namespace, and curators of another read the log."""
    store = live.services.store
    soup = store.find_source("docs-food", "soup")
    assert soup is not None
    store.set_labels("docs-food", [soup.doc_id], only=("board",))
    said = {"namespaces": ["docs-food", "docs-lights"], "query": "Is it the Quillmark soup?", "rating": "up"}
    try:
        with (
            tenants.client("head", "read ingest", "docs-*", labels=["board"]) as head,
            tenants.client("keeper", "read ingest", "docs-lights") as keeper,
        ):
            assert head.post("/rag/feedback", json=said | {"answer": "Yes."}).status_code == 202
            where = {"params": {"namespace": "docs-lights"}}
            eventually(lambda: "Quillmark" in head.get("/rag/feedback", **where).text, "it is listed")
            assert "Quillmark" not in keeper.get("/rag/feedback", **where).text
    finally:
        store.set_labels("docs-food", [soup.doc_id], only=())
