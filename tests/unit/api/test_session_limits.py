"""How many sessions there may be: of a key in a namespace, of a key, and on a server."""

from __future__ import annotations

from pathlib import Path

from ragserve.answering.sessions.dialogues import OF_KEY, OF_SERVER
from tests.unit.api.scripted_server import Tenants, serving
from tests.unit.api.test_sessions import FIRST, ask, refused


def test_a_key_and_the_server_have_limits_over_all_namespaces(tmp_path: Path, model_path: Path) -> None:
    """With documents of its own a session's namespace need not exist, and a key with a pattern names any."""
    given = [{"text": "The keeper of Skerryvore is called Anna."}]
    with serving(tmp_path, model_path, max_sessions=1, session_ttl_s=3600) as live:
        keys = Tenants(live)
        with keys.client("one", "read", "a-*") as one, keys.client("two", "read", "a-*") as two:
            names = []
            for number in range(OF_KEY):
                turn = ask(one, FIRST, session="new", namespace=f"a-{number}", documents=given)
                names.append(turn["session"]["id"])
            error = refused(one, 429, "too_many_sessions", session="new", namespace="a-more", documents=given)
            assert error["message"].startswith(f"There are {OF_KEY} sessions of this API key already.")
            ask(two, FIRST, session="new", namespace="a-more", documents=given)
            assert one.delete(f"/rag/sessions/{names[0]}").status_code == 200
            ask(one, FIRST, session="new", namespace="a-more", documents=given)
            listed = one.get("/rag/sessions").json()["sessions"]
            assert {each["id"] for each in listed} > set(names[1:])
        clients = [keys.client(f"key{n}", "read", "a-*") for n in range(OF_SERVER // OF_KEY)]
        refusals = []
        for client in clients:
            with client:
                for number in range(OF_KEY):
                    body = {"query": FIRST, "namespace": f"a-{number}", "documents": given, "session": "new"}
                    response = client.post("/rag/query", json=body)
                    if response.status_code != 200:
                        refusals.append(response.json()["error"]["message"])
        assert len(refusals) == OF_KEY + 1, "the two keys' sessions before count, too"
        assert all(f"There are {OF_SERVER} sessions on this server" in refusal for refusal in refusals)
