"""Work on namespaces in the background: one piece at a time for each, and none after the close."""

from __future__ import annotations

from threading import Event

from ragserve_index.background_work import BackgroundWork
from tests.unit.api.scripted_server import eventually


def test_a_namespace_has_one_piece_of_work_at_a_time() -> None:
    background, done, go_on = BackgroundWork("test"), list[str](), Event()

    def first() -> None:
        go_on.wait(240)
        done.append("first")
        raise ValueError("work may fail")

    background.start(1, first)
    background.start(1, lambda: done.append("again"))
    background.start(2, lambda: done.append("second"))
    assert background.works_on(1)
    go_on.set()
    eventually(lambda: not background.works_on(1) and not background.works_on(2), "the work is done")
    background.start(1, lambda: done.append("third"))
    background.close()
    assert done == ["first", "second", "third"]


def test_a_search_may_ask_for_work_while_the_store_closes() -> None:
    background = BackgroundWork("test")
    background.close()
    background.start(1, lambda: None)
    assert not background.works_on(1)
