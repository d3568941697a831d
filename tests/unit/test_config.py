"""Settings: precedence, validation, and what an operator reads when something is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from ragserve.answering.auto import AUTO
from ragserve.best_passages import NOT_COMPOSED
from ragserve.commands.options import settings_from, with_settings
from ragserve.commands.serve import serve
from ragserve.config import Settings, StrategyName, load
from ragserve.errors import InvalidRequest
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.option_checks import RequestOptions
from sglang_ext.wire.prefill_options import PrefillOptions
from sglang_ext.wire.request_options import STRATEGY_OPTIONS, DecodeOptions


def test_flags_win_over_environment_over_file_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().top_k == 5
    Path("ragserve.toml").write_text("top_k = 6\nport = 1234\n")
    assert (load().top_k, load().port) == (6, 1234)
    monkeypatch.setenv("RAGSERVE_TOP_K", "7")
    assert (load().top_k, load().port) == (7, 1234)
    assert load(top_k=8, port=None).top_k == 8


def test_open_address_needs_an_api_key() -> None:
    with pytest.raises(InvalidRequest, match="--api-key"):
        settings_from(host="0.0.0.0")
    assert settings_from(host="0.0.0.0", api_key="secret").host == "0.0.0.0"


@pytest.mark.parametrize("key", ["", " \n"])
def test_an_empty_api_key_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compose makes of a variable that is not set. It would open the server to everyone."""
    monkeypatch.setenv("RAGSERVE_API_KEY", key)
    for host in ("0.0.0.0", "127.0.0.1"):
        with pytest.raises(InvalidRequest, match="api_key is empty"):
            settings_from(host=host)


@pytest.mark.parametrize(
    "name",
    [
        *("registry_url", "tokenizer", "engine_url", "workers", "router_url"),
        *("kernel_cache_dir", "decode_heads", "otlp_endpoint"),
    ],
)
def test_an_empty_address_or_path_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is also how an environment goes without one that the file names."""
    Path("ragserve.toml").write_text(f'{name} = "http://there:1"\n')
    monkeypatch.setenv(f"RAGSERVE_{name.upper()}", "")
    settings = settings_from()
    assert getattr(settings, name) is None
    assert not settings.engine_elsewhere


def test_a_server_without_keys_of_documents_cannot_rerank_by_them() -> None:
    assert load(rerank="keys").rerank == "keys"
    for without in ({"engine_url": "http://localhost:1"}, {"kv_bits": 8, "sparse_attention": "on"}):
        with pytest.raises(ValueError, match="rerank='keys'"):
            load(rerank="keys", **without)


def test_offloaded_requests_need_what_they_read() -> None:
    on = {"sparse_attention": "on", "kv_offload_bytes": 2**30}
    assert load(**on, decode_offload="auto").decode_offload == "auto"
    for wrong in (
        {"kv_offload_bytes": 1},
        {"sparse_attention": "on", "kv_offload_tokens": 8192},
        {"sparse_attention": "on", "decode_offload": "on"},
        on | {"kv_bits": 8},
        on | {"decode_offload": "auto", "decode_heads": Path("heads.json")},
    ):
        with pytest.raises(ValueError, match="offloaded requests need"):
            load(**wrong)


def test_a_storage_that_needs_pages_of_the_models_shape_has_16_bits() -> None:
    with pytest.raises(ValueError, match="aibrix lays pages out"):
        Settings(kv_page_bits=8, kv_storage="aibrix")
    assert Settings(kv_page_bits=8, kv_storage="hf3fs").kv_page_bits == 8


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"decode_scores": "exact", "kv_bits": 8}, "keys are read, of 16 bits"),
        ({"decode_scores": "exact", "decode_offload": "on"}, "keys are read, of 16 bits and on the device"),
        (
            {"decode_observe": "recent", "decode_offload": "auto"},
            "offloaded requests choose pages by queries",
        ),
    ],
    ids=str,
)
def test_pages_are_chosen_by_what_is_there(settings: dict[str, Any], reason: str) -> None:
    offloading = {} if "kv_bits" in settings else {"kv_offload_bytes": 2**30}
    with pytest.raises(ValueError, match=reason):
        load(sparse_attention="on", **offloading, **settings)


def test_sparse_prefill_needs_our_backend_and_keys_of_16_bits() -> None:
    assert load(sparse_attention="on", prefill_mode="vertical_slash").prefill_alpha == 0.955
    for without in ({}, {"sparse_attention": "on", "kv_bits": 8}):
        with pytest.raises(ValueError, match="set --sparse-attention on, and omit kv_bits"):
            load(prefill_mode="block_sparse", **without)


def test_unknown_and_wrong_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("ragserve.toml").write_text('top_q = 6\nindex_type = "annoy"\n')
    with pytest.raises(InvalidRequest, match=r"(?s)index_type.*top_q|top_q.*index_type"):
        settings_from()


@pytest.mark.parametrize(
    ("toml", "variable", "says"),
    [("top_k 6\n", "{}", "ragserve.toml: .*line 1"), ("", "{", 'field "engine_args"')],
    ids=["file", "variable"],
)
def test_settings_that_cannot_be_read_are_said_to_be_wrong(
    toml: str, variable: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("ragserve.toml").write_text(toml)
    monkeypatch.setenv("RAGSERVE_ENGINE_ARGS", variable)
    with pytest.raises(InvalidRequest, match=says):
        settings_from()


def test_secrets_do_not_show() -> None:
    assert "hunter2" not in repr(load(api_key="hunter2"))


@pytest.mark.parametrize("name", ["engine_api_key", "embedder_api_key", "rerank_api_key"])
@pytest.mark.parametrize("key", ["hunter2\n", "hunter2 x", "hunter2\0", "hunter2é"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_repeated(name: str, key: str) -> None:
    """The connection's error would repeat it, to clients."""
    with pytest.raises(ValueError, match=f"{name}: .*no header can have") as wrong:
        load(**{name: key}, host="127.0.0.1")
    assert "hunter2" not in str(wrong.value)


@pytest.mark.parametrize(
    ("prefix", "options", "apart"),
    [
        ("decode_", DecodeOptions, {"dense_below"}),  # a calibration may set it
        ("decode_", AttentionConfig, {"heads"}),
        ("prefill_", PrefillOptions, set()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_setting_and_the_option_of_its_name_are_one(
    prefix: str, options: type[RequestOptions], apart: set[str]
) -> None:
    """The same default, bounds and text, so that neither can change alone."""
    shared = [name for name in options.model_fields if prefix + name in Settings.model_fields]
    assert len(shared) > 4
    for name in {*shared} - apart:
        setting, option = Settings.model_fields[prefix + name], options.model_fields[name]
        assert (setting.default, setting.annotation) == (option.default, option.annotation), name
        assert (setting.metadata, setting.description) == (option.metadata, option.description), name


def test_every_setting_says_what_it_is_for() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("name", ["engine_args", "kv_storage_args"])
def test_settings_that_are_objects_are_given_as_json(name: str) -> None:
    command = with_settings(lambda settings: getattr(settings, name), [name])
    assert command(**{name: '{"page_size": 16}'}) == {"page_size": 16}
    assert command(**{name: None}) == {}
    for wrong in ("{", "[1]"):
        with pytest.raises(InvalidRequest, match="--" + name.replace("_", "-")):
            command(**{name: wrong})


def test_numbers_to_choose_from_are_given_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    command = with_settings(
        lambda settings: (settings.kv_block_tokens, settings.kv_bits),
        ["kv_block_tokens", "kv_bits", "sparse_attention"],
    )
    assert command(kv_block_tokens="32", kv_bits="8", sparse_attention="on") == (32, 8)
    assert with_settings(lambda settings: settings.kv_page_bits, ["kv_page_bits"])(kv_page_bits="8") == 8
    monkeypatch.setenv("RAGSERVE_KV_BLOCK_TOKENS", "16")
    assert command(kv_block_tokens=None, kv_bits=None, sparse_attention=None) == (16, 16)
    for wrong in ("7", "many"):
        with pytest.raises(InvalidRequest, match="kv_bits"):
            command(kv_block_tokens=None, kv_bits=wrong, sparse_attention="on")
    with pytest.raises(InvalidRequest, match="--sparse-attention on"):
        command(kv_block_tokens=None, kv_bits="8", sparse_attention=None)


def test_a_strategy_may_bring_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(strategy="concat:share=0.1,recompute=sentences").default_strategy.options == {
        "recompute": "sentences",
        "share": 0.1,
    }
    monkeypatch.setenv("RAGSERVE_STRATEGY", "samkv:update=fusion")
    assert load().strategy == "samkv:update=fusion"
    for wrong, says in (
        ("magic", "Unknown strategy 'magic'"),
        ("full,prefix", "one strategy"),
        ("prefix:share=0.1", "prefix takes no options"),
        ("auto:keep=1", "auto takes no options"),
        ("samkv:keep", "is not an option"),
        ("", "No strategy"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            settings_from(strategy=wrong)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("concat:bogus=1", "Strategy 'concat' has no option bogus: it has .*keep, kept_positions"),
        ("concat:share=2", "Option share of strategy 'concat' is 2: must be less than or equal to 1"),
        ("samkv:experimental.words=1", "no option experimental.words: it has .*experimental.lexical_weight"),
        ("samkv:kept_positions=compact,selection=layers", "same tokens in every layer"),
    ],
)
def test_a_server_is_not_started_with_bad_options_of_its_strategy(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by its settings nor by the command, which would claim a port and load a model."""
    monkeypatch.setattr("ragserve.commands.serve.serve", lambda settings: pytest.fail("it was started"))
    with pytest.raises(ValidationError, match=says):
        load(strategy=text)
    with pytest.raises(InvalidRequest, match=says):
        with_settings(serve)(**dict.fromkeys(Settings.model_fields) | {"strategy": text})


def test_the_default_strategy_is_parsed_once() -> None:
    settings = load(strategy="samkv:experimental.lexical_weight=1,keep=0.2")
    assert settings.default_strategy is settings.default_strategy
    assert settings.default_strategy.options == {"experimental": {"lexical_weight": 1}, "keep": 0.2}


def test_every_strategy_is_known_to_all() -> None:
    assert set(get_args(StrategyName)) == {*NOT_COMPOSED, *STRATEGY_OPTIONS, AUTO}
