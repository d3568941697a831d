"""What may begin a stop string stays out of an answer until it is certain, whatever bytes its tokens have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.sglang_internals.stop_strings import around_begins, around_output, around_tail, held_back


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        ("船長", ["長山"], 1),
        ("船長\N{REPLACEMENT CHARACTER}", ["長山"], 2),
        ("船\N{REPLACEMENT CHARACTER}", ["長山"], 0),
        ("a\n", ["\n\nQ", "\n"], 1),
        ("abab", ["babc", "abx"], 3),
        ("abc", ["x"], 0),
        ("", ["x"], 0),
        ("abc", [], 0),
    ],
)
def test_the_longest_end_that_may_begin_a_stop_string_is_held(text: str, stops: list[str], held: int) -> None:
    assert held_back(text, stops) == held


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_no_shorter_and_no_longer(text: str, stops: list[str]) -> None:
    ends = [n for n in range(1, len(text) + 1) if any(stop.startswith(text[-n:]) for stop in stops)]
    assert held_back(text, stops) == max(ends, default=0)


class Bytes:
    """A tokenizer with a token for each byte."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


def request(*stops: str, stream: bool = True) -> Any:
    """SGLang's own request as far as its methods of stop strings need it. Its tokenizer writes each stop
    string in one token."""
    from sglang.srt.managers.schedule_batch import Req

    class Request(SimpleNamespace):
        tail_str = Req.tail_str
        finished = staticmethod(lambda: False)

        def _stop_match_tail_len(self, new_accepted_len: int) -> int:
            return int(around_tail(Req._stop_match_tail_len, self, new_accepted_len))

        def check_match_stop_str_prefix(self) -> bool:
            return around_begins(Req.check_match_stop_str_prefix, self)

    sampling = SimpleNamespace(
        stop_strs=list(stops), stop_str_max_len=1, stop_regex_strs=[], stop_regex_max_len=0
    )
    return Request(sampling_params=sampling, output_ids=[], tokenizer=Bytes(), stream=stream)


def shown(req: Any, text: str) -> list[str]:
    """The whole texts at which an output is let through, byte by byte."""
    found = []
    for byte in text.encode():
        req.output_ids.append(byte)
        if not req.check_match_stop_str_prefix():
            found.append(Bytes().decode(req.output_ids))
    return found


def test_a_stop_string_of_several_bytes_shows_nothing_of_itself() -> None:
    found = shown(request("長山"), "船長山")
    assert found[2] == "船"
    assert all("長" not in text for text in found)


def test_text_that_turns_out_otherwise_is_shown() -> None:
    assert shown(request("長山"), "船長と")[-1] == "船長と"
    assert shown(request(), "abc") == ["a", "ab", "abc"]


def test_a_stop_string_in_more_tokens_than_usual_is_found() -> None:
    req = request("長山田太郎")
    req.output_ids = list("船長山田太郎".encode())
    assert "長山田太郎" in req.tail_str()


def test_what_is_sent_of_others_now_and_then_begins_no_stop_string() -> None:
    """SGLang sends outputs of requests that are not streamed, too, every so many tokens."""
    sent: list[str] = []

    def accept(accumulator: Any, *, req: Any) -> None:
        if len(req.output_ids) % accumulator.default_force_stream_interval == 0:
            sent.append(Bytes().decode(req.output_ids))

    accumulator, req = SimpleNamespace(default_force_stream_interval=3), request("cde", stream=False)
    for byte in b"abcdxabcd":
        req.output_ids.append(byte)
        around_output(accept, accumulator, req=req)
    assert sent == ["abcdxa"], "not abc, which may become a stop string"
