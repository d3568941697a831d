"""A namespace's own settings: used where a request says nothing, on every route, and never for another
one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from ragserve.client import Client
from ragserve.commands import docs as docs_commands
from ragserve.config import DEFAULT_MODEL, Settings
from ragserve.errors import InvalidRequest
from ragserve.programs import Rag
from ragserve.setting_groups.per_namespace import NamespaceSettings
from tests.unit.api.scripted_server import DOCUMENTS, Live, Tenants, serving
from tests.unit.programs.test_said_turns import State

QUESTION = "Who built the lighthouse of Skerryvore?"
PATH = "/rag/namespaces/docs/settings"
NOTHING: dict[str, Any] = dict.fromkeys(NamespaceSettings.model_fields)


@pytest.fixture
def space(live: Live, docs: str) -> Iterator[str]:
    yield docs
    live.services.store.set_settings(docs, {})


def put(client: httpx.Client, **settings: Any) -> None:
    reply = client.put(PATH, json=settings)
    assert reply.status_code == 200, reply.text
    assert reply.json() == NOTHING | settings
    assert client.get(PATH).json() == NOTHING | settings


def prompts(live: Live) -> list[str]:
    tokenizer = live.services.answerer._prompts
    return [tokenizer.words(request.input_ids) for request in live.engine.requests]


def test_they_are_used_where_a_request_says_nothing(client: httpx.Client, live: Live, space: str) -> None:
    live.index("others", DOCUMENTS)
    put(client, system="Say it in Gaelic.", k=1, retrieval="lexical", strategy="full")
    body = {"query": QUESTION, "namespace": space}
    answer = client.post("/rag/query", json=body).json()
    assert (answer["retrieval"], answer["context"]["strategy"]) == ("lexical", "full")
    assert answer["context"]["documents_retrieved"] == 1
    chat = {"model": f"ragserve/{space}", "messages": [{"role": "user", "content": QUESTION}]}
    extras = client.post("/v1/chat/completions", json=chat).json()["ragserve"]
    assert (extras["retrieval"], extras["context"]["documents_retrieved"]) == ("lexical", 1)
    assert ["Say it in Gaelic." in prompt for prompt in prompts(live)] == [True, True]
    found = client.post("/rag/retrieve", json=body).json()
    assert (found["retrieval"], len(found["results"])) == ("lexical", 1)

    live.engine.requests.clear()
    own = {"system": "In Norse.", "k": 2, "retrieval": "dense", "strategy": "prefix"}
    answer = client.post("/rag/query", json=body | own).json()
    assert (answer["retrieval"], answer["context"]["strategy"]) == ("dense", "prefix")
    assert answer["context"]["documents_retrieved"] == 2
    other = client.post("/rag/query", json=body | {"namespace": "others"}).json()
    assert (other["retrieval"], other["context"]["documents_retrieved"]) == ("dense", 3)
    assert ["Gaelic" in prompt for prompt in prompts(live)] == [False, False]


def begun(rag: Rag) -> str:
    """A prompt of a program."""
    state = State()
    rag.insert(state, [("Bell Rock", "A lighthouse.")])
    return state.text()


def test_a_program_begins_its_prompts_as_queries_do(client: httpx.Client, live: Live, space: str) -> None:
    live.index("others", DOCUMENTS)
    put(client, system="Say it in Gaelic.")
    given: dict[str, Any] = {"url": live.url, "tokenizer": DEFAULT_MODEL}
    for where, own, said in (
        ({"namespace": space}, None, True),
        ({"namespace": space}, "In Norse.", False),
        ({"namespace": "others"}, None, False),
        ({"namespace": "of-no-documents"}, None, False),
        ({"namespaces": ["nobody*"]}, None, False),
    ):
        with closing(Rag(**given, **where, system=own)) as rag:
            text = begun(rag)
            assert ("Say it in Gaelic." in text, "In Norse." in text) == (said, own is not None), where
    both = {"namespaces": [space, "others"]}
    with closing(Rag(**given, **both)) as rag, pytest.raises(InvalidRequest) as differ:
        begun(rag)
    assert differ.value.code == "namespace_settings_differ"
    with closing(Rag(**given, **both, system="In Norse.")) as rag:
        assert "In Norse." in begun(rag)
    try:
        live.services.store.set_settings("others", {"system": "Say it in Gaelic.", "k": 1})
        with closing(Rag(**given, namespaces=[space, "other*"])) as rag:
            assert "Say it in Gaelic." in begun(rag)
    finally:
        live.services.store.set_settings("others", {})


def test_a_floor_is_the_namespaces(client: httpx.Client, live: Live, space: str) -> None:
    put(client, min_score=0.999)
    body = {"query": QUESTION, "namespace": space}
    assert client.post("/rag/query", json=body).json()["usage"]["prompt"] == 0
    assert client.post("/rag/query", json=body | {"min_score": -1}).json()["usage"]["prompt"] > 0


def test_a_session_keeps_the_system_text_that_it_began_with(
    client: httpx.Client, live: Live, space: str
) -> None:
    put(client, system="Say it in Gaelic.")
    body = {"query": QUESTION, "namespace": space, "strategy": "prefix"}
    session = client.post("/rag/query", json=body | {"session": "new"}).json()["session"]["id"]
    put(client, system="Say it in Norse.")
    later = client.post("/rag/query", json=body | {"session": session, "query": "And Bell Rock?"})
    assert later.status_code == 200, later.text
    assert "Gaelic" in prompts(live)[-1]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"k": 0}, "greater than or equal to 1"),
        ({"retrieval": "fuzzy"}, "retrieval"),
        ({"strategy": "fastest"}, "fastest"),
        ({"temperature": 1}, "temperature"),
    ],
)
def test_wrong_ones_are_refused(
    client: httpx.Client, space: str, settings: dict[str, Any], says: str
) -> None:
    reply = client.put(PATH, json=settings)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]
    assert client.get(PATH).json() == NOTHING


def test_a_namespace_that_is_not_there_has_none(client: httpx.Client) -> None:
    for reply in (
        client.get("/rag/namespaces/none/settings"),
        client.put("/rag/namespaces/none/settings", json={}),
    ):
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "namespace_not_found")


def test_they_are_changed_by_those_who_may_ingest(tmp_path: Path, model_path: Path) -> None:
    with serving(tmp_path, model_path) as live:
        live.index("docs", DOCUMENTS)
        live.index("theirs", DOCUMENTS)
        tenants = Tenants(live)
        with tenants.client("r", "read", "docs") as reader, tenants.client("w", "ingest", "docs") as writer:
            assert reader.get(PATH).status_code == writer.get(PATH).status_code == 200
            assert reader.put(PATH, json={"k": 2}).status_code == 403
            assert writer.put(PATH, json={"k": 2}).status_code == 200
            for client in (reader, writer):
                for reply in (
                    client.get("/rag/namespaces/theirs/settings"),
                    client.put("/rag/namespaces/theirs/settings", json={"k": 2}),
                ):
                    assert reply.status_code in (403, 404)
        assert live.services.store.settings("theirs") == {}
        assert live.services.store.settings("docs") == {"k": 2}


def test_clients_and_commands_change_them(live: Live, space: str) -> None:
    with Client(live.url) as client:
        assert client.set_namespace_settings(space, k=3, retrieval="hybrid").k == 3
        assert client.namespace_settings(space).retrieval == "hybrid"
    app = typer.Typer()
    docs_commands.register(app)

    def run(*arguments: str) -> str:
        data = ("--data-dir", str(live.settings.data_dir))
        done = CliRunner().invoke(app, ["docs", "settings", space, *arguments, *data])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "k: 3\n" in run()
    assert "retrieval: (the server's)\n" in run("--k", "7", "--unset", "retrieval")
    assert live.services.store.settings(space) == {"k": 7}
    wrong = CliRunner().invoke(
        app, ["docs", "settings", space, "--k", "99", "--data-dir", str(live.settings.data_dir)]
    )
    assert "k: Input should be less than or equal to 64" in str(wrong.exception)


def test_the_servers_own_settings_stay_as_they_are() -> None:
    server = Settings(strategy="prefix")
    assert server.default_strategy.name == "prefix"
    over = NamespaceSettings(strategy="concat:share=0.1", k=9).over(server)
    assert (over.default_strategy.name, over.top_k) == ("concat", 9)
    assert (server.default_strategy.name, server.top_k) == ("prefix", 5)
    assert NamespaceSettings(system="x").over(server) is server


def test_what_several_have_alike_is_theirs_though_a_request_gives_its_own() -> None:
    """Verdicts are looked up by it."""
    each = {"a": NamespaceSettings(k=20, system="Briefly."), "b": NamespaceSettings(k=20)}
    assert NamespaceSettings.shared(each, {"k", "system"}) == NamespaceSettings(k=20)
    with pytest.raises(InvalidRequest, match="'system'"):
        NamespaceSettings.shared(each, {"k"})
