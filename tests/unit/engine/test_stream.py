"""Streams of SGLang become chunks, timings and errors of ours."""

from __future__ import annotations

from typing import Any

import pytest

from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.stream import StreamReader, payload
from ragserve.errors import EngineError, InvalidRequest, TooManyRequests, Unavailable


def out(text: str, reason: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    return {
        "text": text,
        "meta_info": {
            "prompt_tokens": 7,
            "cached_tokens": 3,
            "completion_tokens": 1,
            "finish_reason": reason,
            **meta,
        },
    }


def test_cumulative_text_becomes_deltas() -> None:
    reader = StreamReader(7)
    chunks = [reader.read(out("A")), reader.read(out("A b")), reader.read(out("A bc", {"type": "stop"}))]
    assert [c.text for c in chunks] == ["A", " b", "c"]
    assert [c.finish_reason for c in chunks] == [None, None, "stop"]
    assert (chunks[-1].usage.prompt, chunks[-1].usage.cached, chunks[-1].usage.completion) == (7, 3, 1)


def test_queue_time_counts_only_where_the_engine_knows_it() -> None:
    assert StreamReader(7).read(out("A", queue_time=0.0)).timings.queue_ms is None
    known = StreamReader(7).read(out("A", queue_time=0.25, forward_entry_time=1.0)).timings
    assert known.queue_ms == 250.0
    assert known.prefill_ms == 0.0, "the queue is not counted twice"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ({"type": "abort", "status_code": 400, "message": "too long"}, InvalidRequest),
        ({"type": "abort", "status_code": 503, "message": "The request queue is full."}, TooManyRequests),
        ({"type": "abort", "status_code": 503, "message": "shutting down"}, Unavailable),
        ({"type": "abort", "status_code": 500, "message": "boom"}, EngineError),
    ],
)
def test_aborts_with_a_status_are_errors(reason: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r".+"):
        StreamReader(7).read(out("", reason))


def test_error_event_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match="context"):
        StreamReader(7).read({"error": {"message": "over the context", "code": 400}})


def test_namespaces_and_full_requests_never_share_cached_tokens() -> None:
    def key(namespace: str, strategy: str, rid: str) -> str:
        return str(payload(GenerateRequest("r", [1], namespace, strategy), rid)["extra_key"])

    assert key("a", "prefix", "1") == key("a", "prefix", "2")
    assert key("a", "prefix", "1") != key("b", "prefix", "1")
    assert len({key("a", "full", "1"), key("a", "full", "2"), key("a", "prefix", "1")}) == 3


def test_sampling_fields_reach_sglang_by_its_names() -> None:
    sampling = payload(GenerateRequest("r", [1], "n", sampling=Sampling(9, 0.5, 0.8, 4, ("x",), 3)), "rid")[
        "sampling_params"
    ]
    assert sampling["max_new_tokens"] == 9
    assert sampling["stop"] == ["x"]
    assert sampling["sampling_seed"] == 3
    assert "sampling_seed" not in payload(GenerateRequest("r", [1], "n"), "rid")["sampling_params"]


def test_decode_options_travel_and_their_report_comes_with_the_last_chunk() -> None:
    request = GenerateRequest(
        "r", [1], "n", decode={"mode": "progressive"}, sampling=Sampling(ignore_eos=True)
    )
    sampling = payload(request, "r")["sampling_params"]
    assert sampling["custom_params"] == {"ragserve_decode": '{"mode": "progressive"}'}
    assert sampling["ignore_eos"] is True
    assert "custom_params" not in payload(GenerateRequest("r", [1], "n"), "r")["sampling_params"]
    reader = StreamReader(7)
    assert reader.read(out("A", ragserve_decode=[None])).decode is None
    said = (
        '{"mode":"progressive","steps":2,"sparse_steps":2,"pages":3.0,"pages_held":6.0,'
        '"share":0.5,"weight":0.97}'
    )
    last = reader.read(out("A b", {"type": "length"}, ragserve_decode=[None, None, said])).decode
    assert last is not None
    assert (last.mode, last.share, last.weight) == ("progressive", 0.5, 0.97)


@pytest.mark.parametrize(
    ("texts", "reason", "want"),
    [
        (["船", "船長", "船長"], {"type": "stop", "matched": "長山"}, "船"),  # it had been sent
        (["船", "船"], {"type": "stop", "matched": "長山"}, "船"),
        (["船", "船長", "船長と"], {"type": "stop", "matched": 2}, "船長と"),
        (["船", "船長"], {"type": "length"}, "船長"),
    ],
    ids=str,
)
def test_what_may_begin_a_stop_string_waits(texts: list[str], reason: dict[str, Any], want: str) -> None:
    reader = StreamReader(7, ["長山", "\n\n"])
    deltas = [reader.read(out(text)).text for text in texts[:-1]]
    assert "長" not in "".join(deltas)
    assert "".join([*deltas, reader.read(out(texts[-1], reason)).text]) == want
