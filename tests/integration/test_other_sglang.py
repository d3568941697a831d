"""ragserve on the older SGLang that its hooks fit. All other tests run on the newer one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.measuring.server import RunningServer
from sglang_ext.protocol import SGLANG_VERSIONS
from tests.integration.context_client import assert_same, composed, generate, result
from tests.integration.prompts import prompt, rows

OLDER = Path(sys.prefix) / f"sglang-{SGLANG_VERSIONS[-1]}"


@pytest.mark.skipif(not OLDER.is_dir(), reason="scripts/install adds the older SGLang where there is no GPU")
def test_a_composed_answer_is_that_of_a_prefill(
    start_server: Callable[..., AbstractContextManager[RunningServer]], builder: PromptBuilder, tmp_path: Path
) -> None:
    ids, spans = prompt(builder, rows("crossdoc")[3], 3)
    older = {"PYTHONPATH": str(OLDER)}
    with start_server(data_dir=tmp_path, env=older) as server, server.client() as client:
        assert client.get("/info").json()["versions"]["sglang"] == SGLANG_VERSIONS[-1]
        plain = generate(client, ids)
        assert_same(result(composed(client, ids, spans, recompute="all")), result(plain))
