"""The kernel benchmarks refuse to measure what would mean nothing."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from ragserve.bench.kernels import compose as kernels_compose
from ragserve.bench.kernels import decode as kernels_decode
from ragserve.bench.kernels import flashinfer as kernels_flashinfer
from ragserve.bench.kernels.decode_cases import DecodeCase, Layer, block_weights
from ragserve.bench.kernels.decode_progressive import fewest_blocks, ladder, quality
from ragserve.bench.kernels.decode_record import Recorded, long_prompts, record, recorded_cases
from ragserve.bench.kernels.parts import run_parts
from ragserve.bench.kernels.timing import agree, bandwidth
from ragserve.config import DEFAULT_MODEL
from ragserve.errors import InvalidRequest, RagserveError
from ragserve_kernels.dispatch import forced_naive


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures on CUDA")
@pytest.mark.parametrize("bench", [kernels_compose, kernels_decode], ids=["compose", "decode"])
def test_without_a_gpu_nothing_is_measured(bench: ModuleType) -> None:
    with pytest.raises(InvalidRequest, match="found no CUDA device"):
        bench.run(None)


def test_a_wrong_result_is_not_timed() -> None:
    want = torch.randn(10)
    agree(want * 1.001, want, "scaled")
    with pytest.raises(RagserveError, match="disagrees with its reference"):
        agree(want * 1.1, want, "scaled")
    with pytest.raises(RagserveError, match="disagrees"):
        agree(want * float("nan"), want, "nan")


def test_bandwidth_is_bytes_over_time() -> None:
    row = bandwidth("case", "variant", 2.0, 4.0, 4000.0)
    assert (row["gb_per_s"], row["of_ceiling"]) == (2000.0, 0.5)


@pytest.mark.parametrize("bench", [kernels_compose, kernels_decode], ids=["compose", "decode"])
def test_an_unknown_part_is_named_with_those_there_are(bench: ModuleType) -> None:
    with pytest.raises(InvalidRequest, match="no part 'dense'"):
        bench.run(None, parts=["dense"])


def test_real_keys_asked_for_need_question_sets() -> None:
    with pytest.raises(InvalidRequest, match="needs question sets"):
        kernels_decode.run(None, parts=[kernels_decode.REAL])


def test_parts_are_written_one_by_one_beside_those_of_earlier_runs(tmp_path: Path) -> None:
    before = {
        "workload": {"measured": {"b": {"gpu": "old", "copy_gb_per_s": 7}}},
        "rows": [
            {"operation": "a", "ms": 1.0},
            {"operation": "b", "ms": 2.0},
            {"operation": "gone", "ms": 3.0},
        ],
    }
    path = tmp_path / "kernels_x.json"
    path.write_text(json.dumps(before))

    def fails() -> list[dict[str, object]]:
        raise RagserveError("a kernel is wrong")

    with pytest.raises(RagserveError, match="a kernel is wrong"):
        run_parts(
            "kernels_x",
            {"a": lambda: [{"ms": 9.0}], "b": fails, "c": fails},
            ["a", "b"],
            workload={"shape": "s"},
            ceilings={"copy_gb_per_s": 5},
            note="n",
            out_dir=tmp_path,
        )
    after = json.loads(path.read_text())
    assert after["rows"] == [{"operation": "a", "ms": 9.0}, {"operation": "b", "ms": 2.0}]
    assert list(after["workload"]["measured"]) == ["a", "b"]
    assert after["workload"]["measured"]["a"]["copy_gb_per_s"] == 5
    assert after["workload"]["measured"]["b"] == {"gpu": "old", "copy_gb_per_s": 7}
    path.write_text("[]")
    with pytest.raises(InvalidRequest, match="not a report of this benchmark"):
        run_parts("kernels_x", {"a": fails}, ["a"], workload={}, ceilings={}, note="", out_dir=tmp_path)


def small_case(*, page: int, lens: Sequence[int]) -> DecodeCase:
    kv = torch.randn(2, 2, 200, 2, 64)
    records = [Recorded(2 * torch.randn(1, 2, 6, 64), kv[0, :, :n], kv[1, :, :n], n - 1) for n in lens]
    return recorded_cases(records, page=page, steps=[0])[0]


class FakeDecode:
    """FlashInfer's interface as its documentation describes it, in plain torch."""

    def __init__(self, workspace: torch.Tensor, layout: str, *, use_tensor_cores: bool) -> None:
        assert layout == "NHD"

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page: int,
        **dtypes: torch.dtype,
    ) -> None:
        self.plans = indptr.tolist(), indices, last.tolist(), heads // kv_heads, head_dim

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        indptr, indices, last, group, head_dim = self.plans
        out = torch.empty_like(q)
        for b in range(len(last)):
            at = indices[indptr[b] : indptr[b + 1]].long()
            tokens = (len(at) - 1) * pages[0].shape[1] + last[b]
            k, v = (x[at].flatten(0, 1)[:tokens].repeat_interleave(group, 1) for x in pages)
            weights = torch.softmax(torch.einsum("hd,thd->ht", q[b], k) / math.sqrt(head_dim), -1)
            out[b] = torch.einsum("ht,thd->hd", weights, v)
        return out


@pytest.mark.parametrize("page_size", [1, 16])
def test_flashinfer_gets_the_same_pages(monkeypatch: pytest.MonkeyPatch, page_size: int) -> None:
    monkeypatch.setitem(
        sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeDecode)
    )
    case = small_case(page=16, lens=[200, 33, 48])
    call = kernels_flashinfer.decode(case, page_size=page_size, tensor_cores=True)
    with forced_naive():
        want = case.attend(case.layers[1])
    agree(call(1), want, "FlashInfer", 1e-5)


def test_without_flashinfer_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(kernels_flashinfer.RivalMissing, match="FlashInfer is not measured"):
        kernels_flashinfer.decode(small_case(page=16, lens=[20]), page_size=16, tensor_cores=True)


def test_block_weights_are_those_of_attention() -> None:
    case = small_case(page=16, lens=[200, 33])
    layer = case.layers[0]
    got = block_weights(case, layer)
    torch.testing.assert_close(got.sum(-1), torch.ones(2, 6))
    assert (got[1, :, 3:] == 0).all(), "33 tokens fill three blocks"
    page = Layer(
        layer.q,
        layer.k,
        (torch.arange(layer.k.shape[0]) // 16)[:, None, None].expand(-1, 2, 64).float().contiguous(),
    )
    with forced_naive():  # values that name their page: attention's output is then the mean page
        named = case.attend(page)[..., 0]
    torch.testing.assert_close(
        (got * case.table[:, None, : got.shape[-1]]).sum(-1), named, rtol=1e-4, atol=1e-4
    )


def test_quality_of_progressive_decode() -> None:
    case = small_case(page=16, lens=[200, 133])
    with forced_naive():
        every = quality([case], "minmax", "lowest", 1.0)
        held = {threshold: quality([case], "true", "lowest", threshold) for threshold in (0.5, 0.9)}
        steps = ladder([case], "center")
        fewest = {threshold: fewest_blocks([case], threshold) for threshold in (0.5, 0.9)}
    assert every["blocks_used"] == 11.0, "13 and 9 blocks"
    assert every["error"] < 1e-3
    assert every["weight_min"] > 0.999
    assert fewest[0.5] < fewest[0.9] < 11
    for threshold, found in held.items():
        assert fewest[threshold] <= found["blocks_used"] <= 11
        assert found["heads_below"] <= 0.5
    assert steps[0].blocks == 4
    assert steps[-1].blocks == 13
    assert steps[-1].error < 1e-6 < steps[0].error


def test_recorded_queries_and_keys_are_what_the_model_attends_with(tmp_path: Path) -> None:
    row = {
        "docs": [["Town", "Arvo Pell lives in Dunmar. " * 4], ["River", "The Oss is long."]],
        "question": "Where?",
        "answers": ["Dunmar"],
    }
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "docs": row["docs"][1:]}))
    prompts = long_prompts(DEFAULT_MODEL, path, count=1)
    assert len(prompts) == 1
    assert len(prompts[0]) > 40, "the longer one"
    [got] = record(DEFAULT_MODEL, prompts, steps=2, device=torch.device("cpu"), dtype=torch.float32)
    assert got.k.shape == (15, len(prompts[0]) + 2, 2, 64)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        DEFAULT_MODEL, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        ids = torch.tensor([prompts[0]])
        for _ in range(2):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
        attentions = model(ids, output_attentions=True).attentions
    for step, place in ((0, -2), (1, -1)):
        [case] = recorded_cases([got], page=16, steps=[step])
        for layer, probabilities in zip(case.layers, attentions, strict=True):
            want = probabilities[0, :, place, : got.tokens(step)]
            want = torch.nn.functional.pad(want, (0, -want.shape[-1] % 16)).view(6, -1, 16).sum(-1)
            torch.testing.assert_close(block_weights(case, layer)[0], want, rtol=1e-3, atol=1e-4)
