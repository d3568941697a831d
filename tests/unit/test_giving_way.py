"""A composed pass of the server's own ends between two layers once its request is taken back, and SGLang gets
every message that was read early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq

from sglang_ext import background_prefill, giving_way
from sglang_ext.giving_way import TakenBack, watched
from sglang_ext.protocol import BACKGROUND_FIELD
from tests.unit.context.composed_cases import SLOTS, Case, composer_of
from tests.unit.context.small_model import LAYERS, runner_of


class Receiver:
    """SGLang's receiver, and the messages that come by each time that it looks for some."""

    def __init__(self, *coming: list[Any]) -> None:
        self.coming, self.looked = list(coming), 0

    def pull(self) -> list[Any] | None:
        self.looked += 1
        return self.coming.pop(0) if self.coming else []

    def turn(self) -> list[Any]:
        """What SGLang's loop gets at a turn."""
        pulled: list[Any] = giving_way.around_pull(Receiver.pull, self)
        return pulled


def composed(rid: str, *, marked: bool = True) -> Any:
    params = SimpleNamespace(custom_params={BACKGROUND_FIELD: 256} if marked else None)
    made = SimpleNamespace(rid=rid, ragserve=object(), sampling_params=params)
    background_prefill.on_request(made)
    return made


def layers_before_the_end(receiver: Receiver, *reqs: Any) -> int:
    """Recompute a context in the step of ``reqs``; before how many layers it has looked."""
    receiver.turn()
    case = Case([{"recompute": "all"}], 0)
    before = receiver.looked
    with watched(reqs):
        composer_of(runner_of(SLOTS, 0)).fill(case.contexts, case.rows, whole=True)
    return receiver.looked - before


def test_a_pass_ends_before_the_next_layer_and_sglang_gets_what_has_come_in_its_order() -> None:
    user, abort, later = object(), AbortReq(rid="verify-1"), object()
    receiver = Receiver([], [user], [abort], [later])
    with pytest.raises(TakenBack):
        layers_before_the_end(receiver, composed("verify-1"))
    assert receiver.looked == 3 <= LAYERS, "a turn and two layers"
    assert receiver.turn() == [user, abort, later]
    assert receiver.turn() == []


@pytest.mark.parametrize("abort", [AbortReq(rid="verify-10"), AbortReq(rid="another")])
def test_a_pass_that_is_not_taken_back_goes_on(abort: AbortReq) -> None:
    receiver = Receiver([], [abort, object()])
    assert layers_before_the_end(receiver, composed("verify-1")) == LAYERS
    assert len(receiver.turn()) == 2


def test_a_pass_of_several_ends_when_all_are_taken_back() -> None:
    own = composed("verify-1"), composed("verify-2")
    assert layers_before_the_end(Receiver([], [AbortReq(rid="verify-1")]), *own) == LAYERS
    receiver = Receiver([], [AbortReq(rid="verify-2")])
    receiver.turn()  # what the pass before has left is SGLang's
    with pytest.raises(TakenBack):
        layers_before_the_end(Receiver([], [AbortReq(rid="", abort_all=True)]), *own)


def test_users_requests_and_those_beside_them_look_for_nothing() -> None:
    users = composed("user", marked=False)
    for reqs in ([users], [composed("verify-1"), users], []):
        assert layers_before_the_end(Receiver(), *reqs) == 0
