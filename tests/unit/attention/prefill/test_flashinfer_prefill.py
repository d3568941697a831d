"""FlashInfer's kernels for cached tokens: FA3 where the new tokens fill the GPU, else SGLang's choice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_ext.attention.prefill.flashinfer_prefill import PrefillKernels, with_fa3
from sglang_ext.state import current
from sglang_ext.wire.protocol import PREFILL_KERNELS_VARIABLE

FA2, FA3 = ["fa2"], ["fa3"]


class FakeBackend:
    """SGLang's backend, as far as a prefill's wrappers go: remembers those that it planned with."""

    def __init__(self) -> None:
        self.prefill_wrappers_paged = FA2
        self.planned: list[Any] = []

    def init_forward_metadata(self, batch: Any) -> None:
        self.planned.append(self.prefill_wrappers_paged)


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "prefill_kernels", None)
    monkeypatch.delenv(PREFILL_KERNELS_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("new_tokens", "cached_tokens", "wrappers"),
    [
        ((8192,), (64,), FA3),
        ((384,), (1,), FA3),  # 3 blocks of 32 heads on 132 multiprocessors
        ((383,), (9000,), FA2),
        ((32,), (9000,), FA2),  # a question after a prefix
        ((127,) * 64, (5,) * 64, FA2),  # no block is full
        ((256, 100, 200), (5, 6, 7), FA3),
        ((8192, 700), (5000, 0), FA2),  # FA3 would read KV that is not there
        ((), (), FA2),
    ],
)
def test_fa3_where_full_blocks_fill_the_gpu(
    new_tokens: tuple[int, ...], cached_tokens: tuple[int, ...], wrappers: list[str]
) -> None:
    assert PrefillKernels(FA2, FA3, 32, 132).wrappers(new_tokens, cached_tokens) is wrappers


def test_every_prefill_is_planned_with_the_wrappers_that_fit_it() -> None:
    backend = FakeBackend()
    PrefillKernels(FA2, FA3, 32, 132).install(backend)
    for mode, lengths, cached in (
        (ForwardMode.EXTEND, [8192], [16]),
        (ForwardMode.DECODE, None, None),  # leaves them alone
        (ForwardMode.EXTEND, [32], [16]),
        (ForwardMode.MIXED, [8192, 1], [16, 500]),
        (ForwardMode.EXTEND, [8192, 700], [16, 0]),
        (ForwardMode.EXTEND, None, None),  # lengths that only the device knows
    ):
        batch = SimpleNamespace(forward_mode=mode, extend_seq_lens_cpu=lengths, extend_prefix_lens_cpu=cached)
        backend.init_forward_metadata(batch)
    assert backend.planned == [FA3, FA3, FA2, FA3, FA2, FA2]


def test_a_backend_that_fa3_does_not_know_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    for masked in (
        {"use_mla_backend": True},
        {"skip_prefill": True},
        {"dispatch_reason": "sliding window"},
        {"enable_deterministic": True},
    ):
        runner = SimpleNamespace(use_mla_backend=masked.pop("use_mla_backend", False))
        plain = {"skip_prefill": False, "dispatch_reason": None, "enable_deterministic": False}
        backend = SimpleNamespace(**plain | {"enable_mis": False, "is_dllm_model": False} | masked)
        assert with_fa3(lambda _, backend=backend: backend)(runner) is backend
        assert not hasattr(backend, "init_forward_metadata")
    assert current.prefill_kernels is None
    assert not caplog.records


def test_what_fails_leaves_fa2_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend()  # has none of the fields that a choice needs
    assert with_fa3(lambda _: backend)(SimpleNamespace(use_mla_backend=False)) is backend
    backend.init_forward_metadata(SimpleNamespace())
    assert backend.planned == [FA2]
    assert "stays with FA2" in caplog.text


def test_fa2_by_setting(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(PREFILL_KERNELS_VARIABLE, "fa2")
    backend = FakeBackend()
    assert with_fa3(lambda _: backend)(SimpleNamespace(use_mla_backend=False)) is backend
    assert not caplog.records
