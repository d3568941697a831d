"""Old names of settings and options work for one release, with a warning; settings are in groups."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from ragserve.api.schemas import QueryRequest
from ragserve.commands.options import settings_from
from ragserve.config import Settings, load
from ragserve.errors import InvalidRequest
from ragserve.setting_groups.levels import COMMON, EXPERIMENTAL
from sglang_ext.wire import renamed
from sglang_ext.wire.option_checks import PlanError
from sglang_ext.wire.prefill_options import PrefillOptions
from sglang_ext.wire.request_options import DecodeOptions

REPO = Path(__file__).resolve().parents[2]


def app_with_commands() -> typer.Typer:
    from ragserve.cli import _register, app

    if not app.registered_commands:
        _register()
    return app


@pytest.fixture(autouse=True)
def _warn_anew() -> None:
    renamed.warn.cache_clear()


def test_new_names_exist_and_old_ones_do_not() -> None:
    assert set(renamed.SETTINGS.values()) <= set(Settings.model_fields)
    assert not set(renamed.SETTINGS) & set(Settings.model_fields)
    assert set(renamed.DECODE.values()) <= set(DecodeOptions.model_fields)
    assert not set(renamed.DECODE) & set(DecodeOptions.model_fields)


@pytest.mark.parametrize("by", ["flag", "environment", "file"])
def test_a_setting_by_its_old_name(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"sparse_attention": "on"}
    if by == "flag":
        flags["kv_hosted_bytes"] = "1024"
    elif by == "environment":
        monkeypatch.setenv("RAGSERVE_KV_HOSTED_BYTES", "1024")
    else:
        (tmp_path / "ragserve.toml").write_text("kv_hosted_bytes = 1024\n")
    with caplog.at_level(logging.WARNING):
        assert load(**flags).kv_offload_bytes == 1024
    assert "kv_hosted_bytes is an old name" in caplog.text
    assert "write kv_offload_bytes" in caplog.text


def test_an_old_flag_is_taken_and_not_shown() -> None:
    app = app_with_commands()
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    flags = {flag: each for each in serve.params for flag in each.opts}
    assert flags["--kv-hosted-bytes"].hidden
    assert not flags["--kv-offload-bytes"].hidden
    assert "--kv-hosted-bytes" not in CliRunner().invoke(app, ["serve", "--help"]).output


def test_both_names_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="kv_hosted_bytes is the old name of kv_offload_bytes"):
        load(sparse_attention="on", kv_hosted_bytes=1, kv_offload_bytes=2)
    said = "kv_hosted_bytes is the old name of kv_offload_bytes"
    with pytest.raises(InvalidRequest, match=said):
        settings_from(kv_hosted_bytes=1, kv_offload_bytes=2)
    monkeypatch.setenv("RAGSERVE_KV_HOSTED_BYTES", "1")
    monkeypatch.setenv("RAGSERVE_KV_OFFLOAD_BYTES", "2")
    with pytest.raises(InvalidRequest, match=said):
        settings_from()
    done = CliRunner().invoke(app_with_commands(), ["doctor", "--json"])
    assert said in json.loads(done.stdout)["checks"][0]["found"]
    with pytest.raises(PlanError, match="hosted is the old name of offloaded"):
        DecodeOptions().from_request('{"mode": "hierarchical", "hosted": true, "offloaded": true}')


def test_options_by_their_old_names() -> None:
    asked = '{"mode": "hierarchical", "hosted": true, "columns": 3}'
    options = DecodeOptions(offloaded="auto").from_request(asked)
    assert (options.offloaded, options.resident_blocks) == (True, 3)
    body = {"query": "q", "namespace": "n", "decode": {"mode": "hierarchical", "hosted": "auto"}}
    assert QueryRequest.model_validate(body).decode.offloaded == "auto"
    assert PrefillOptions().updated({"mode": "lines"}).mode == "vertical_slash"
    assert load(sparse_attention="on", prefill_mode="blocks").prefill_mode == "block_sparse"
    with pytest.raises(ValidationError):
        DecodeOptions.model_validate({"hostd": True})


def test_settings_are_in_one_group_each_and_help_shows_them() -> None:
    assert set(COMMON) | set(EXPERIMENTAL) <= set(Settings.model_fields)
    assert not set(COMMON) & set(EXPERIMENTAL)
    shown = CliRunner().invoke(app_with_commands(), ["serve", "--help"], env={"COLUMNS": "200"}).output
    common, experimental = shown.index("Settings: common"), shown.index("Settings: experimental")
    assert common < shown.index("--model ") < shown.index("Settings: files and models") < experimental
    assert experimental < shown.index("--decode-heads-pool")
    text = (REPO / "docs" / "settings.md").read_text(encoding="utf-8")
    assert text.index("## Common") < text.index("| `model` |") < text.index("## Server")
    assert text.index("## Experimental") < text.index("| `decode_bound` |")
