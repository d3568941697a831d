"""A background composed pass ends between two layers once its request is cancelled, and SGLang gets
every message that was read early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import AbortReq

from sglang_ext.context.scheduler.composition import Composition
from sglang_ext.context.scheduler.release_queue import ReleaseQueue
from sglang_ext.sglang_internals import background_prefill
from sglang_ext.stages import cancelled_pass
from sglang_ext.stages.cancelled_pass import Cancelled, watched
from sglang_ext.wire.protocol import BACKGROUND_FIELD
from tests.unit import request_shapes
from tests.unit.context.composed_cases import SLOTS, Case, assert_same_pools, composer_of
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
        pulled: list[Any] = cancelled_pass.around_pull(Receiver.pull, self)
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
    with pytest.raises(Cancelled):
        layers_before_the_end(receiver, composed("verify-1"))
    assert receiver.looked == 3 <= LAYERS, "a turn and two layers"
    assert receiver.turn() == [user, abort, later]
    assert receiver.turn() == []


@pytest.mark.parametrize("abort", [AbortReq(rid="verify-10"), AbortReq(rid="another")])
def test_a_pass_that_is_not_cancelled_goes_on(abort: AbortReq) -> None:
    receiver = Receiver([], [abort, object()])
    assert layers_before_the_end(receiver, composed("verify-1")) == LAYERS
    assert len(receiver.turn()) == 2


def test_a_pass_of_several_ends_when_all_are_cancelled() -> None:
    own = composed("verify-1"), composed("verify-2")
    assert layers_before_the_end(Receiver([], [AbortReq(rid="verify-1")]), *own) == LAYERS
    receiver = Receiver([], [AbortReq(rid="verify-2")])
    receiver.turn()  # what the pass before has left is SGLang's
    with pytest.raises(Cancelled):
        layers_before_the_end(Receiver([], [AbortReq(rid="", abort_all=True)]), *own)


def test_a_batch_that_is_cancelled_ends_its_requests_and_lets_documents_go() -> None:
    """Its slots are SGLang's again when the requests end; the contexts are composed as ever afterwards."""
    case = Case([{"recompute": "all"}, {"recompute": "all"}], 0)
    width = max(len(row) for row in case.rows)
    table = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in case.rows])
    unlocked: list[Any] = []
    composition: Any = Composition.__new__(Composition)
    composition.composer = composer_of(runner_of(SLOTS, 0))
    composition.releases, composition._alone, composition._device = ReleaseQueue(), True, torch.device("cpu")
    composition._tree = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    composition._locator = SimpleNamespace(unlock=unlocked.append)
    composition._documents = SimpleNamespace(takes=lambda batch: False)
    composition._offsets, composition._timer = torch.zeros(2, dtype=torch.int64), None

    def over(coming: list[Any]) -> tuple[bool, list[Any]]:
        """Whether nothing is left of a batch of both contexts while messages come, and its requests."""
        reqs = [composed(f"verify-{row}") for row in range(2)]
        for row, req in enumerate(reqs):
            case.contexts[row].filled = False
            req.ragserve, req.to_finish, req.finished = case.contexts[row], None, lambda: False
            request_shapes.put(req, row)
            request_shapes.extend(req, 0, len(case.rows[row]))
        Receiver([], coming).turn()
        mode = SimpleNamespace(name="EXTEND")
        batch = SimpleNamespace(reqs=reqs, forward_mode=mode, req_pool_indices=torch.arange(2))
        return composition.before_forward(batch), reqs

    is_over, reqs = over([AbortReq(rid="", abort_all=True)])
    assert is_over
    assert ["cancelled" in req.to_finish.message for req in reqs] == [True, True]
    assert unlocked == case.contexts
    assert composition._timer is None, "nothing to report"
    assert composition.composer.fused_question.output(SimpleNamespace(input_ids=[0])) is None
    is_over, reqs = over([])
    assert (is_over, [req.to_finish for req in reqs]) == (False, [None, None])
    plain = runner_of(SLOTS, 0)
    same = Case([{"recompute": "all"}, {"recompute": "all"}], 0)
    composer_of(plain).fill(same.contexts, same.rows, whole=True)
    assert_same_pools(composition.composer.gather._pool, plain.token_to_kv_pool)


def test_users_requests_and_those_beside_them_look_for_nothing() -> None:
    users = composed("user", marked=False)
    for reqs in ([users], [composed("verify-1"), users], []):
        assert layers_before_the_end(Receiver(), *reqs) == 0
