"""The scripted HTTP server of the clients' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.client.scripted_http import ScriptedHttp


@pytest.fixture
def scripted() -> Iterator[ScriptedHttp]:
    server = ScriptedHttp()
    yield server
    server.close()
