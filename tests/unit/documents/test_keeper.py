"""The keeper of the shared store notices when it goes and when it is back."""

from __future__ import annotations

import threading
from typing import Any

from sglang_ext.documents.disk.disk import Faults
from sglang_ext.documents.remote.deletions import Deletions
from sglang_ext.documents.remote.keeper import Keeper
from sglang_ext.documents.remote.remote_backend import StoreAway


class Backend:
    """A store that an IO thread misses while the keeper looks at it for the second time."""

    def __init__(self) -> None:
        self.keeper: Any = None
        self.made, self.looked_again = threading.Event(), threading.Event()
        self.away: list[bool] = []  # at each look, what the keeper took it for

    def check(self) -> None:
        assert self.made.wait(240)
        self.away.append(self.keeper.away)
        if len(self.away) == 2:
            self.keeper.went(StoreAway("unmounted"))
        elif len(self.away) > 2:
            self.looked_again.set()
            raise StoreAway("unmounted")


def test_a_look_that_began_before_the_store_went_does_not_say_that_it_is_back() -> None:
    backend: Any = Backend()
    faults = Faults(lambda reason: None)
    backend.keeper = Keeper(backend, Deletions(None), threading.RLock(), lambda each: False, faults, 0.01)
    backend.made.set()
    try:
        assert backend.looked_again.wait(240)
    finally:
        backend.keeper.close()
    assert backend.away[:3] == [True, False, True]
