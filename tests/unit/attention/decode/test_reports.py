"""What a request's report has of steps that the device has not computed when it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.protocol import DecodeOptions, DecodeReport
from tests.unit.attention.decode.test_step import batch, request, runtime_of


class OnDevice(torch.Tensor):
    """Figures that are on their way from a device."""

    is_cuda = True

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self.as_subclass(torch.Tensor)


class Event:
    """That of the first step has passed; those of the others have not."""

    made = 0

    def __init__(self) -> None:
        self.passed = not Event.made
        Event.made += 1

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.passed


def test_a_report_counts_steps_with_the_pages_that_they_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    config = AttentionConfig(options=DecodeOptions(mode="progressive", dense_below=0))
    runtime, backend, _ = runtime_of(config)
    req = request(runtime, "a")
    backend.use = torch.tensor([[5.0], [0.9], [0.0]]).as_subclass(OnDevice)
    for _ in range(3):
        runtime.before_forward(batch([req], [160]))
        runtime.after_forward()
    runtime.on_finished(req, 160)
    said = DecodeReport.from_json(req.customized_info["ragserve_decode"][-1])
    assert (said.steps, said.pages, said.share, round(said.weight or 0, 6)) == (1, 5.0, 0.5, 0.9)
