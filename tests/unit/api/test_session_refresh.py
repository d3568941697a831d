"""Sessions whose dialogue is computed anew, exactly, every few turns."""

from __future__ import annotations

from pathlib import Path

from sglang_ext.wire.protocol import session_key
from tests.unit.api.scripted_server import DOCUMENTS, serving
from tests.unit.api.test_sessions import FIRST, THEN, ask


def test_a_dialogue_is_computed_anew_every_so_many_turns(tmp_path: Path, model_path: Path) -> None:
    with serving(tmp_path, model_path, session_refresh_turns=2) as live, live.client() as client:
        live.index("docs", DOCUMENTS)
        requests, uses = [], []
        name = "new"
        for number, question in enumerate((FIRST, THEN, "And what of Bell Rock?", FIRST, THEN)):
            fields = {} if number else {"strategy": "epic", "strategy_options": {"force": True}}
            uses.append(ask(client, question, session=name, k=1 + number // 2, **fields)["session"])
            name = uses[-1]["id"]
            requests.append(live.engine.requests[-1])
        assert [use["refreshed"] for use in uses] == [False, False, True, False, True]
        assert all(request.strategy == "epic" for request in requests)
        key = session_key("docs", name)
        assert [r.session.key for r in requests] == [key, key, f"{key}-2", f"{key}-2", f"{key}-4"]
        third = requests[2]
        text = third.earlier()
        assert text.earlier is None, "in one piece"
        assert text.spans == requests[0].spans[:1], "nothing but the system text is composed"
        assert text.input_ids == third.input_ids[: len(text.input_ids)]
        assert third.session.held == len(text.input_ids) > len(requests[1].input_ids)
        client.delete(f"/rag/sessions/{name}")
