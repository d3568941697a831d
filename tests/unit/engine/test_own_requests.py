"""The engine's own requests may measure; those that come by SGLang's routes at the same time may not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.config import load
from ragserve.engine.local import LocalEngine
from ragserve.errors import RagserveError
from sglang_ext.wire.measuring import check_measuring
from sglang_ext.wire.protocol import DISTRIBUTION_FIELD

PARAMS = {"custom_params": {DISTRIBUTION_FIELD: 2}}


class Manager:
    """Checks a request when it is given, as `request_checks` does."""

    def generate_request(self, obj: Any, request: Any) -> AsyncIterator[dict[str, Any]]:
        check_measuring(obj.sampling_params, 1)

        async def outputs() -> AsyncIterator[dict[str, Any]]:
            with pytest.raises(ValueError, match="the server's own"):
                check_measuring(PARAMS, 1)  # what runs beside it
            yield {"text": "x", "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 1}}

        return outputs()


def test_of_several_documents_the_one_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate_request(obj: Any, request: Any) -> AsyncIterator[dict[str, Any]]:
        for rid in obj.rid:
            reason = (
                {"type": "length"} if rid == "a" else {"type": "abort", "status_code": 500, "message": rid}
            )
            yield {"text": "", "meta_info": {"id": rid, "finish_reason": reason}}

    manager = SimpleNamespace(generate_request=generate_request)
    monkeypatch.setattr("ragserve.engine.local._manager", lambda: manager)

    async def run() -> dict[str, RagserveError]:
        fields = {"input_ids": [1], "sampling_params": {}}
        return await LocalEngine(load())._run_together([fields | {"rid": rid} for rid in ("a", "b", "c")])

    failed = asyncio.run(run())
    assert {rid: str(error) for rid, error in failed.items()} == {
        rid: f"The engine failed: {rid}. See the server's log." for rid in ("b", "c")
    }


def test_the_engine_measures_and_nobody_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragserve.engine.local._manager", Manager)

    async def run() -> list[Any]:
        engine = LocalEngine(load())
        fields = {"rid": "own-request", "input_ids": [1], "sampling_params": PARAMS}
        return [out async for out in engine.outputs(fields)]

    assert [out["text"] for out in asyncio.run(run())] == ["x"]
    with pytest.raises(ValueError, match="the server's own"):
        check_measuring(PARAMS, 1)
