"""Documents of a batch are prefilled by the pass that analyses them, which takes no other batch."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.analysis.analyser import Analyser
from sglang_ext.analysis.document_analysis import Cut
from sglang_ext.analysis.forward import LayerState, Text, run
from sglang_ext.analysis.texts import Texts
from sglang_ext.context.scheduler import document_pass
from sglang_ext.context.scheduler.document_pass import DocumentPass
from sglang_ext.context.scheduler.sglang_req import DocumentRequest
from sglang_ext.versions import row_of
from tests.unit import request_shapes
from tests.unit.context.small_model import KV_HEADS, LAYERS, ROTATION, VOCABULARY, runner_of

LENGTHS = (63, 40, 111)


@pytest.fixture(scope="module")
def runner() -> Any:
    runner = runner_of(400, seed=3)
    runner.token_to_kv_pool.head_num, runner.token_to_kv_pool.dtype = KV_HEADS, torch.float32
    runner.model_config = SimpleNamespace(vocab_size=VOCABULARY)
    return runner


@pytest.fixture(scope="module")
def analyser(runner: Any) -> Analyser:
    unrelated = torch.randint(0, VOCABULARY, (2, 90), generator=torch.Generator().manual_seed(4)).tolist()
    texts = Texts(unrelated, torch.zeros(VOCABULARY, dtype=torch.bool))
    return Analyser(runner, lambda: texts, Cut(), [(1, 0), (2, 1)], rotation=ROTATION)


def request(number: int, n: int) -> Any:
    ids = torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    return request_shapes.request(
        row=number,
        end=n,
        ragserve=DocumentRequest(f"{number}", "n", array("q", ids), analyse=True),
        grammar=None,
        output_ids=[],
        sampling_params=SimpleNamespace(max_new_tokens=1, custom_params=None),
    )


def batch() -> Any:
    return SimpleNamespace(
        reqs=[request(number, n) for number, n in enumerate(LENGTHS)],
        forward_mode=SimpleNamespace(name="EXTEND"),
        return_logprob=False,
        return_hidden_states=False,
    )


def pass_of(runner: Any, analyser: Analyser, table: torch.Tensor, **options: Any) -> DocumentPass:
    def analyse(documents: Any, keep: Any, *, whole: bool) -> Any:
        every = [document.ids for document in documents]
        return analyser.analyse_all(every, keep=keep, whole=whole)

    return DocumentPass(runner, table, analyse, **{"possible": True} | options)


def replace(work: DocumentPass, todo: Any) -> None:
    work.run(todo.reqs)
    work.replaced(todo)


@pytest.fixture(params=[4096, 111], ids=["together", "in two passes"])
def done(
    request: pytest.FixtureRequest, runner: Any, analyser: Analyser, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, torch.Tensor, DocumentPass]:
    monkeypatch.setattr(document_pass, "TOGETHER", request.param)
    table = torch.randperm(400, generator=torch.Generator().manual_seed(5))[: 3 * 130].view(3, 130).int()
    work, todo = pass_of(runner, analyser, table), batch()
    assert work.takes(todo)
    replace(work, todo)
    return todo, table, work


def test_the_slots_hold_each_documents_own_kv(
    runner: Any, done: tuple[Any, torch.Tensor, DocumentPass]
) -> None:
    todo, table, _ = done
    pool = runner.token_to_kv_pool
    for req in todo.reqs:
        ids = torch.tensor(req.ragserve.ids)
        slots = table[row_of(req), : len(ids)].long()

        def compare(layer: int, states: Any, slots: torch.Tensor = slots) -> None:
            state: LayerState = states[0]
            assert torch.allclose(pool.get_key_buffer(layer)[slots], state.k, atol=1e-5)
            assert torch.allclose(pool.get_value_buffer(layer)[slots], state.v, atol=1e-5)

        run(runner, [Text(ids, torch.arange(len(ids)))], compare)


def test_analyses_are_those_of_each_document_by_itself(
    analyser: Analyser, done: tuple[Any, torch.Tensor, DocumentPass]
) -> None:
    todo, _, _ = done
    for req in todo.reqs:
        found, alone = req.ragserve.analysis, analyser.analyse(req.ragserve.ids)
        assert (found.n_tokens, found.block, found.layers, found.basis) == (
            alone.n_tokens,
            alone.block,
            LAYERS,
            alone.basis,
        )
        for name, wanted in alone._tensors().items():
            got = getattr(found, name)
            assert got.shape == wanted.shape, name
            if wanted.dtype in (torch.int8, torch.uint8):
                assert (got.int() - wanted.int()).abs().max() <= 1, name
            else:
                assert torch.allclose(got.float(), wanted.float(), rtol=2e-3, atol=1e-5), name
        assert got.untyped_storage().nbytes() == got.nbytes, "no analysis holds those of its batch"


def test_sglang_gets_a_token_for_each_once(done: tuple[Any, torch.Tensor, DocumentPass]) -> None:
    _, _, work = done
    assert work.output().logits_output.next_token_logits.shape == (3, VOCABULARY)
    assert work.output() is None


@pytest.mark.parametrize(
    ("left", "beside", "waits"),
    [
        (39, [70], True),
        (40, [70], False),
        (39, [], False),
        (None, [70], False),
        (None, [None], True),
        (400, [70, None], False),
    ],
    ids=["cut", "fits", "alone", "unlimited", "beside a question", "where they are mixed already"],
)
def test_a_document_waits_for_a_step_of_its_own(
    left: int | None, beside: list[int | None], waits: bool
) -> None:
    document, others = request(0, 40), [request(1, n or 50) for n in beside]
    for other, n in zip(others, beside, strict=True):
        other.ragserve = other.ragserve if n else None
    adder = SimpleNamespace(rem_chunk_tokens=left, can_run_list=others)
    assert document_pass.waits_for_own_step(adder, document) == waits


def test_a_question_waits_for_documents_but_not_for_ever() -> None:
    question, document = request(0, 40), request(1, 40)
    question.ragserve = None
    adder = SimpleNamespace(rem_chunk_tokens=400, can_run_list=[document])
    waited = [document_pass.waits_for_own_step(adder, question) for _ in range(6)]
    assert waited == [True, True, True, True, False, False]


@pytest.mark.parametrize(
    "change",
    [
        lambda todo: request_shapes.extend(todo.reqs[1], 16, LENGTHS[1]),
        lambda todo: request_shapes.extend(todo.reqs[2], 0, 100),
        lambda todo: setattr(todo.reqs[0].ragserve, "first", True),
        lambda todo: setattr(todo.reqs[0], "ragserve", None),
        lambda todo: setattr(todo.reqs[0], "grammar", object()),
        lambda todo: setattr(todo.reqs[0].sampling_params, "max_new_tokens", 2),
        lambda todo: setattr(todo, "return_logprob", True),
        lambda todo: setattr(todo.forward_mode, "name", "MIXED"),
    ],
    ids=["cached prefix", "a chunk", "a beginning", "a question", "grammar", "answer", "logprobs", "mixed"],
)
def test_other_batches_are_left_to_sglang(runner: Any, analyser: Analyser, change: Any) -> None:
    work, todo = pass_of(runner, analyser, torch.zeros(3, 130)), batch()
    assert work.takes(todo)
    change(todo)
    assert not work.takes(todo)
    assert not pass_of(runner, analyser, torch.zeros(3, 130), possible=False).takes(batch())


PREFIX = torch.randint(0, VOCABULARY, (37,), generator=torch.Generator().manual_seed(6)).tolist()


@pytest.fixture(scope="module")
def behind(runner: Any) -> Analyser:
    """An analyser with a prefix."""
    texts = Texts([PREFIX, PREFIX], torch.zeros(VOCABULARY, dtype=torch.bool))
    return Analyser(runner, lambda: texts, Cut(), [(1, 0)], rotation=ROTATION, prefix=PREFIX)


def prefixed(runner: Any, behind: Analyser, table: torch.Tensor, **options: Any) -> DocumentPass:
    def analyse(documents: Any, keep: Any, *, whole: bool) -> Any:
        return behind.analyse_all([each.ids for each in documents], keep=keep, whole=whole)

    return DocumentPass(runner, table, analyse, behind.prefill, **{"possible": True} | options)


def check(runner: Any, table: torch.Tensor, reqs: Any) -> None:
    """The slots of the documents hold KV behind the prefix, keys as at positions from 0 on."""
    pool = runner.token_to_kv_pool
    for req in reqs:
        ids, n = torch.tensor([*PREFIX, *req.ragserve.ids]), len(PREFIX)
        slots = table[row_of(req), : len(req.ragserve.ids)].long()

        def compare(layer: int, states: Any, slots: torch.Tensor = slots, n: int = n) -> None:
            k, v = states[0].k[n:] - n / 100, states[0].v[n:]
            torch.testing.assert_close(pool.get_key_buffer(layer)[slots], k, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(pool.get_value_buffer(layer)[slots], v, rtol=1e-4, atol=1e-4)

        run(runner, [Text(ids, torch.arange(len(ids)))], compare)


def table_of() -> torch.Tensor:
    return torch.randperm(400, generator=torch.Generator().manual_seed(8))[: 3 * 130].view(3, 130).int()


@pytest.mark.parametrize("analysed", [(True, True, True), (False, True, False), (False,) * 3], ids=str)
def test_documents_are_prefilled_behind_the_prefix(
    runner: Any, behind: Analyser, analysed: tuple[bool, ...]
) -> None:
    table, todo = table_of(), batch()
    for req, analyse in zip(todo.reqs, analysed, strict=True):
        req.ragserve.analyse = analyse
    work = prefixed(runner, behind, table)
    assert work.takes(todo)
    replace(work, todo)
    check(runner, table, todo.reqs)
    assert [req.ragserve.analysis.is_whole for req in todo.reqs] == list(analysed)
    assert work.follow(todo) == [], "done already"


def test_a_document_longer_than_a_pass_is_prefilled_without_an_analysis(
    runner: Any, behind: Analyser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_pass, "TOGETHER", 100)
    table, todo = table_of(), batch()
    work = prefixed(runner, behind, table)
    assert work.takes(todo)
    replace(work, todo)
    check(runner, table, todo.reqs)
    assert [req.ragserve.analysis is not None for req in todo.reqs] == [True, True, False]


def test_chunks_and_what_follows_cached_pages_are_prefilled_behind_the_prefix(
    runner: Any, behind: Analyser
) -> None:
    table, todo = table_of(), batch()
    work = prefixed(runner, behind, table)
    for start, end in ((0, 30), (30, 64), (64, 128)):  # the last of them with padding
        for req in todo.reqs:
            n = len(req.ragserve.ids)
            request_shapes.extend(req, min(start, n), min(end, n + 15))
        assert work.takes(todo)
        replace(work, todo)
    check(runner, table, todo.reqs)


@pytest.mark.parametrize("possible", [True, False])
def test_documents_beside_questions_are_computed_after_sglangs_pass(
    runner: Any, behind: Analyser, possible: bool
) -> None:
    table, todo = table_of(), batch()
    work = prefixed(runner, behind, table, possible=possible)
    removed, question, document = todo.reqs
    question.ragserve, removed.ragserve_private = None, True
    assert not work.takes(todo)
    assert work.follow(todo) == [document]
    work.run([document])
    check(runner, table, [document])


def test_without_a_prefix_nothing_follows(runner: Any, analyser: Analyser) -> None:
    assert pass_of(runner, analyser, table_of()).follow(batch()) == []
