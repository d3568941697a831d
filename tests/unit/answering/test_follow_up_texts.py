"""What a follow-up's rewriter and search read of the dialogue: its end, whatever the messages hold."""

from __future__ import annotations

from time import thread_time

import pytest

from ragserve.answering.follow_ups import _dialogue, is_usable, variants
from ragserve.answering.prompt import Message

SIZE = 65_536


@pytest.mark.parametrize("run", [" ", "\n", "[1]", " [1]", "[", "words [12] "])
def test_long_messages_are_cut_before_they_are_cleaned(run: str) -> None:
    long = "x" + (run * SIZE)[:SIZE] + "x"
    history = [Message(role, long) for role in ("user", "assistant") * 3]
    started = thread_time()
    assert len(_dialogue(history, "Why?")) < 4_000
    assert all(len(text) < 400 for text in variants("Why?", history))
    is_usable("Why x?", "Why?", history)
    assert thread_time() - started < 1


def test_markers_and_blanks_do_not_count_as_text() -> None:
    said = "The  lamp [1] [23]\n of 1844 [4]. It is [1844] bright." + " [7]" * 200
    assert variants("Why?", [Message("user", said)]) == ["The lamp of 1844. It is [1844] bright.\nWhy?"]


def test_a_rewrite_has_no_words_that_the_model_did_not_read() -> None:
    old, near = Message("user", "Skerryvore"), Message("assistant", "It is a lighthouse. " * 50 + "Norvik")
    assert is_usable("Who built the lighthouse?", "Who built it?", [old, near])
    assert not is_usable("Who built Norvik?", "Who built it?", [old, near])
    assert not is_usable("Who built Skerryvore?", "Who built it?", [old, *([near] * 6)])
