"""A server that keeps documents' KV refuses other weights, by whichever way they come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext import versions
from sglang_ext.process import hooks
from sglang_ext.state import current


def requests() -> dict[str, Any]:
    from sglang.srt.managers import io_struct

    newer = {}
    if "begin_weight_update" in versions.WEIGHT_ENTRIES:
        newer["begin_weight_update"] = io_struct.BeginWeightUpdateReqInput()
    return newer | {
        "update_weights_from_disk": io_struct.UpdateWeightFromDiskReqInput(model_path="other"),
        "update_weights_from_distributed": io_struct.UpdateWeightsFromDistributedReqInput(
            names=["a"], dtypes=["float32"], shapes=[[1]]
        ),
        "update_weights_from_ipc": io_struct.UpdateWeightsFromIPCReqInput(zmq_handles={}),
        "update_weights_from_tensor": io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[]),
        "init_weights_update_group": io_struct.InitWeightsUpdateGroupReqInput(
            master_address="a", master_port=1, rank_offset=1, world_size=2
        ),
        "check_weights": io_struct.CheckWeightsReqInput(action="reset_tensors"),
    }


def sent(monkeypatch: pytest.MonkeyPatch, name: str, req: Any, *, composes: bool) -> tuple[Any, list[str]]:
    """The scheduler's answer, as its hook leaves it, and what SGLang was let do."""
    monkeypatch.setattr(current, "runtime", SimpleNamespace(composition=object() if composes else None))
    done: list[str] = []

    def change(updater: Any, req: Any) -> Any:
        done.append(name)
        return SimpleNamespace(success=True)

    (hook,) = (each for each in hooks.HOOKS if each.target.endswith(f"SchedulerWeightUpdaterManager.{name}"))
    return hook.function(change, None, req), done


@pytest.mark.parametrize("name", requests())
def test_new_weights_are_refused_with_advice_where_documents_are_kept(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    answer, done = sent(monkeypatch, name, requests()[name], composes=True)
    assert not answer.success
    assert "restart" in answer.message
    assert done == []


@pytest.mark.parametrize("name", requests())
def test_they_are_taken_where_only_exact_strategies_answer(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    answer, done = sent(monkeypatch, name, requests()[name], composes=False)
    assert answer.success
    assert done == [name]


def test_weights_may_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    answer, done = sent(monkeypatch, "check_weights", CheckWeightsReqInput(action="checksum"), composes=True)
    assert answer.success
    assert done == ["check_weights"]


def test_every_entry_of_sglang_that_changes_weights_is_hooked() -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    hooked = {hook.target.rpartition(".")[2] for hook in hooks.HOOKS}
    begin = ("update_weights", "begin_")
    updates = {name for name in vars(SchedulerWeightUpdaterManager) if name.startswith(begin)}
    assert len(updates) >= 4
    assert updates <= hooked
