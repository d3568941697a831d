"""`ragserve mcp`: search and ask a running server from an agent, by the Model Context Protocol."""

from __future__ import annotations

import typer
from rich.markup import escape

from ragserve.client import Client
from ragserve.commands.options import DEFAULT_URL, ApiKey, Namespace, ServerUrl

_HELP = (
    "Give a running server to an agent: a Model Context Protocol server over standard input and output, with "
    "the tools search, ask and list_namespaces. Needs `pip install 'ragserve[mcp]'`."
)


def register(app: typer.Typer) -> None:
    app.command("mcp", help=escape(_HELP))(mcp)


def mcp(url: ServerUrl = DEFAULT_URL, api_key: ApiKey = None, namespace: Namespace = "default") -> None:
    """Serve until standard input ends; the help text is ``_HELP``."""
    from ragserve.mcp_server import build

    with Client(url, api_key=api_key) as client:
        build(client, namespace).run("stdio")
