"""Settings that SGLang cannot start with end the command with what is wrong, not with a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ragserve.config import load
from ragserve.engine.server_args import server_args
from ragserve.errors import InvalidRequest
from sglang_ext.wire.protocol import KV_CONFIG_VARIABLE, PREFILL_KERNELS_VARIABLE


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine_args": {"bogus": 1, "tp_size": 1}}, "engine_args: SGLang has no setting 'bogus'"),
        ({"engine_args": {"quantization": "bogus"}}, "bogus"),
        ({"context_length": 10_000_000}, "context_length (10000000) is greater than"),
    ],
)
def test_what_sglang_refuses_is_said(
    tmp_path: Path, given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KV_CONFIG_VARIABLE, "")
    monkeypatch.setenv(PREFILL_KERNELS_VARIABLE, "auto")
    with pytest.raises(InvalidRequest) as refused:
        server_args(load(data_dir=tmp_path, **given))
    assert said in str(refused.value)
