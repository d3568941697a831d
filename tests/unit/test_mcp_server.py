"""`ragserve mcp`, by the SDK's own client: in memory, and once as the process that an agent starts."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mcp
import pytest

from ragserve import mcp_server
from ragserve.client import Client
from ragserve.errors import Unavailable
from ragserve.tenants.key_file import KeyFile
from tests.unit.api.scripted_server import DOCUMENTS, Live, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("mcp"), model_path) as live:
        live.index("acme", DOCUMENTS)
        live.index("beta", {"secret": "The lighthouse of nobody."})
        yield live


@pytest.fixture(scope="module")
def secret(served: Live) -> str:
    return KeyFile(served.settings.data_dir).create("agent", ["acme"], ["read"])[1]


def calls(url: str, key: str, *wanted: tuple[str, dict[str, Any]]) -> tuple[list[str], list[Any]]:
    """Names of the tools, and the results of calls."""

    async def run(client: Client) -> tuple[list[str], list[Any]]:
        async with mcp.Client(mcp_server.build(client, "acme")) as agent:
            tools = (await agent.list_tools()).tools
            assert all(tool.description and tool.annotations.read_only_hint for tool in tools)  # type: ignore[union-attr]
            return [tool.name for tool in tools], [await agent.call_tool(*call) for call in wanted]

    with Client(url, api_key=key) as client:
        return asyncio.run(run(client))


def test_an_agent_searches_asks_and_lists(served: Live, secret: str) -> None:
    tools, (found, answered, listed) = calls(
        served.url,
        secret,
        ("search", {"question": "Who built the lighthouse of Skerryvore?", "k": 1}),
        ("ask", {"question": "Which was built at Skeryvore?"}),
        ("list_namespaces", {}),
    )
    assert tools == ["search", "ask", "list_namespaces"]
    (passage,) = found.structured_content["result"]
    assert (passage["number"], passage["source"], passage["text"]) == (
        1,
        "skerryvore",
        DOCUMENTS["skerryvore"],
    )
    assert DOCUMENTS["skerryvore"] in found.content[0].text  # for agents that read text only
    assert answered.structured_content["answer"] == "Alan Stevenson [1]."
    assert answered.structured_content["question"] == "Which was built at Skerryvore?"
    assert [one["source"] for one in answered.structured_content["citations"]] == ["skerryvore"]
    assert listed.structured_content["result"] == [{"name": "acme", "documents": 3}]  # not the others'


def test_an_agent_searches_several_collections_that_its_key_may_read(served: Live) -> None:
    served.index("acme-old", {"bell": "The bell rang in the lighthouse of fog."})
    secret = KeyFile(served.settings.data_dir).create("both", ["acme*"], ["read"])[1]
    question = {"question": "Who built the lighthouse?", "k": 8}
    _, (named, matched, answered, refused) = calls(
        served.url,
        secret,
        ("search", question | {"namespace": "acme+acme-old"}),
        ("search", question | {"namespace": "*"}),
        ("ask", question | {"namespace": "acme*"}),
        ("search", question | {"namespace": "acme+beta"}),
    )
    assert named.structured_content == matched.structured_content
    assert {one["namespace"] for one in named.structured_content["result"]} == {"acme", "acme-old"}
    assert answered.structured_content["citations"][0]["namespace"] in ("acme", "acme-old")
    assert "There is no namespace 'beta'." in refused.content[0].text


def test_the_servers_refusal_reaches_the_model(served: Live, secret: str) -> None:
    _, (other, too_many) = calls(
        served.url,
        secret,
        ("search", {"question": "Who?", "namespace": "beta"}),
        ("search", {"question": "Who?", "k": 65}),
    )
    assert other.is_error
    assert "There is no namespace 'beta'. Ingest something" in other.content[0].text
    assert too_many.is_error


def test_without_the_right_to_list_there_is_no_tool_for_it(
    served: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules["ragserve.api.access"].NEEDS, "GET /rag/namespaces", "operate")
    limited = KeyFile(served.settings.data_dir).create("limited", ["acme"], ["read"])[1]
    tools, _ = calls(served.url, limited)
    assert tools == ["search", "ask"]


def test_without_a_server_or_the_sdk_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(Unavailable, match="ragserve serve"):
        mcp_server.build(client, "acme")
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    with Client("http://127.0.0.1:9") as client, pytest.raises(Unavailable, match=r"ragserve\[mcp\]"):
        mcp_server.build(client, "acme")


def test_over_standard_input_and_output(served: Live, secret: str) -> None:
    command = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "ragserve.cli", "mcp", "--url", served.url, "--namespace", "acme"],
        env={**os.environ, "RAGSERVE_API_KEY": secret},
    )

    async def run() -> Any:
        async with mcp.Client(command) as agent:
            return await agent.call_tool("search", {"question": "lighthouse", "k": 2})

    found = asyncio.run(run())
    assert len(found.structured_content["result"]) == 2
