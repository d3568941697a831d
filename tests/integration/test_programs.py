"""SGLang frontend programs against the real server, over documents of the example corpus."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from ragserve.client import Client
from ragserve.errors import InvalidRequest, NotFound, PromptTooLong, Unauthorized
from ragserve.programs import Rag
from tests.conftest import EXHAUSTIVE

# isort: split
import sglang as sgl

REPO = Path(__file__).resolve().parents[2]
CORPUS = REPO / "examples" / "corpus" / "files"
DOCUMENTS = ("iceland.md", "denmark.html", "norway.html", "portugal.docx")
NAMESPACE = "programs"
ASKED = "Which country ruled Iceland before independence?"


@pytest.fixture(scope="module")
def documents(server: Any) -> None:
    with Client(server.url) as client:
        job = client.ingest_files([CORPUS / name for name in DOCUMENTS], namespace=NAMESPACE)
        assert client.wait(job, timeout_s=240).counts["indexed"] == len(DOCUMENTS)


@pytest.fixture
def rag(server: Any, documents: None) -> Iterator[Rag]:
    with closing(Rag(server.url, namespace=NAMESPACE)) as opened:
        yield opened


def command_of(server: Any, name: str, *arguments: str) -> list[str]:
    place = str(REPO / "examples" / "programs" / name)
    return [place, "--url", server.url, "--namespace", NAMESPACE, *arguments]


def run_here(command: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """Run an example in this process, which has imported SGLang: its exit status and output."""
    opened: list[Rag] = []

    class Noted(Rag):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            opened.append(self)

    monkeypatch.setattr("ragserve.programs.Rag", Noted)
    monkeypatch.setattr(sys, "argv", command)
    try:
        with (
            redirect_stdout(StringIO()) as out,
            redirect_stderr(StringIO()) as err,
            pytest.raises(SystemExit) as ended,
        ):
            runpy.run_path(command[0], run_name="__main__")
    finally:  # connections that the end of a process would close
        for rag in opened:
            rag.close()
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def test_multi_hop_example(server: Any, documents: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second hop can only be asked, and found, with the answer of the first. In the exhaustive form as a
    process: SGLang is imported after ragserve."""
    command = command_of(server, "multi_hop.py")
    if EXHAUSTIVE:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240)
        status, out, err = done.returncode, done.stdout, done.stderr
    else:
        status, out, err = run_here(command, monkeypatch)
    assert status == 0, err
    lines = out.splitlines()
    assert lines[:2] == ["Which country ruled Iceland before independence?", "  -> Denmark"]
    assert "     from iceland.md" in lines
    assert lines[lines.index("Who is the head of state of Denmark?") + 1] == "  -> King FREDERIK X"
    assert "     from denmark.html" in lines
    assert lines[-1] == "answer: King FREDERIK X"


def test_fork_join_example(server: Any, documents: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every passage gives an answer, right or wrong; the join chooses the right one."""
    status, out, err = run_here(command_of(server, "fork_join.py"), monkeypatch)
    assert status == 0, err
    lines = out.splitlines()
    answers = {line.split("  from ")[0].strip() for line in lines[1:4]}
    assert len(answers) > 1
    assert "Copenhagen" in answers
    assert "answer: Copenhagen" in lines
    assert lines[-1] == "     from denmark.html"


def test_examples_say_what_is_wrong_in_one_line(
    server: Any, documents: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = command_of(server, "multi_hop.py", "--namespace", "nowhere")
    status, _, err = run_here(command, monkeypatch)
    assert status == 1
    assert err.startswith("error: ")
    assert "nowhere" in err
    assert len(err.splitlines()) == 1


def test_a_program_gives_the_answer_of_rag_query_out_of_the_same_cache(server: Any, rag: Rag) -> None:
    @sgl.function
    def ask(s: Any, question: str) -> Any:
        context = rag.context(s, question, k=3)
        rag.answer(s, question, "answer", max_tokens=24)
        return context

    with Client(server.url) as client:
        asked = "Who is the head of state of Denmark?"
        served = client.query(asked, namespace=NAMESPACE, k=3, max_new_tokens=24)
    state = ask.run(asked, backend=rag.endpoint())
    assert rag.read(state, "answer") == served.answer == "King FREDERIK X"
    context = state.ret_value
    assert [p.index for p in context.passages] == [1, 2, 3]
    cited = context.cited("King FREDERIK X", asked)
    assert {p.chunk_id for p in cited} == {c.chunk_id for c in served.citations}
    assert cited
    meta = state.get_meta_info("answer")
    assert meta["prompt_tokens"] == served.usage.prompt
    # /rag/query has prefilled all of it; SGLang always computes the last token anew
    assert meta["cached_tokens"] >= served.usage.prompt - 1


def test_a_plain_runtime_endpoint_works_as_well(server: Any, rag: Rag) -> None:
    @sgl.function
    def ask(s: Any) -> None:
        rag.context(s, ASKED, k=3)
        rag.answer(s, ASKED, "answer", max_tokens=24)

    state = ask.run(backend=sgl.RuntimeEndpoint(server.url))
    assert rag.read(state, "answer") == "Denmark"


def test_a_follow_up_is_what_the_servers_history_is(server: Any, rag: Rag) -> None:
    documents = [
        {"title": "Refland", "text": "Refland lies in the region of Skailuia. Refland is famous for rope."}
    ]

    @sgl.function
    def ask(s: Any) -> None:
        rag.insert(s, [(d["title"], d["text"]) for d in documents])
        rag.answer(s, "In which region does Refland lie?", "first")
        rag.follow_up(s, "What is Refland famous for?", "second")

    state = ask.run(backend=rag.endpoint())
    assert rag.read(state, "first") == "Skailuia"
    history = [
        {"role": "user", "content": "In which region does Refland lie?"},
        {"role": "assistant", "content": "Skailuia"},
    ]
    with Client(server.url) as client:
        served = client.query(
            "What is Refland famous for?", documents=documents, history=history, max_new_tokens=64
        )
    assert rag.read(state, "second") == served.answer == "rope"
    assert state.get_meta_info("second")["prompt_tokens"] == served.usage.prompt


def test_a_follow_up_on_further_passages_is_a_session_s_turn(server: Any, rag: Rag) -> None:
    documents = [
        {"title": "Refland", "text": "Refland lies in the region of Skailuia. Refland is famous for rope."},
        {"title": "Westert", "text": "Westert is twinned with Weabrouckmere Falls."},
    ]
    pairs = [(d["title"], d["text"]) for d in documents]
    asked = ("In which region does Refland lie?", "With which town is Westert twinned?")

    @sgl.function
    def ask(s: Any) -> Any:
        context = rag.insert(s, pairs[:1])
        rag.answer(s, asked[0], "first")
        return rag.follow_up(s, asked[1], "second", pairs, context=context)

    state = ask.run(backend=rag.endpoint())
    assert rag.read(state, "second") == "Weabrouckmere Falls"
    assert [(p.index, p.title) for p in state.ret_value.passages] == [(1, "Refland"), (2, "Westert")]
    with Client(server.url) as client:
        fields: dict[str, Any] = {"namespace": NAMESPACE, "strategy": "prefix", "max_new_tokens": 64}
        first = client.query(asked[0], documents=documents[:1], session="new", **fields)
        assert first.session is not None
        served = client.query(asked[1], documents=documents, session=first.session.id, **fields)
        client.call("DELETE", f"/rag/sessions/{first.session.id}")
    assert rag.read(state, "second") == served.answer
    then = state.get_meta_info("second")
    assert then["prompt_tokens"] == served.usage.prompt
    assert served.session is not None
    assert then["cached_tokens"] >= served.session.tokens_held >= first.usage.prompt


def test_run_batch(rag: Rag) -> None:
    """SGLang traces a program for a common prefix first; retrieval must not be in its way."""

    @sgl.function
    def ask(s: Any, question: str) -> None:
        rag.context(s, question, k=2)
        rag.answer(s, question, "answer", max_tokens=24)

    questions = [ASKED, "What is the capital of Denmark?"]
    states = ask.run_batch([{"question": question} for question in questions], backend=rag.endpoint())
    assert [rag.read(state, "answer") for state in states] == ["Denmark", "Copenhagen"]


def test_choose_takes_the_likeliest_whole_answer(rag: Rag) -> None:
    @sgl.function
    def choose(s: Any, choices: list[str]) -> None:
        rag.insert(
            s, [("Westert", "Westert is twinned with Weabrouckmere Falls. Westert was founded in 2020.")]
        )
        rag.choose(s, "With which town is Westert twinned?", choices)

    for choices in (["2020", "Weabrouckmere Falls"], ["Weabrouckmere Falls", "Weabrouckmere", "Westert"]):
        state = choose.run(choices, backend=rag.endpoint())
        assert rag.read(state, "choice") == "Weabrouckmere Falls"


def test_documents_come_first_and_must_fit(rag: Rag) -> None:
    @sgl.function
    def late(s: Any) -> None:
        s += "Some text."
        rag.context(s, ASKED)

    with pytest.raises(InvalidRequest, match="documents come first"):
        late.run(backend=rag.endpoint())

    @sgl.function
    def long(s: Any, reserve: int) -> Any:
        return rag.insert(s, [(f"Part {i}", "word " * 2000) for i in range(8)], reserve=reserve)

    context = long.run(500, backend=rag.endpoint()).ret_value
    assert context.passages
    assert context.dropped
    assert [p.index for p in context.passages + context.dropped] == list(range(1, 9))
    with pytest.raises(PromptTooLong):
        long.run(8192, backend=rag.endpoint())


def test_bad_namespaces_and_filters(server: Any, rag: Rag) -> None:
    with closing(Rag(server.url, namespace="nowhere")) as other, pytest.raises(NotFound, match="nowhere"):
        other.retrieve(ASKED)
    with pytest.raises(InvalidRequest):
        rag.retrieve(ASKED, filter={"op": "like", "field": "source", "value": "x"})
    found = rag.retrieve(ASKED, k=4, filter={"op": "eq", "field": "source", "value": "norway.html"})
    assert {p.source for p in found} == {"norway.html"}


def test_an_error_of_the_engine_reaches_the_reader(rag: Rag) -> None:
    @sgl.function
    def too_long(s: Any) -> None:
        s += "word " * 20_000
        s += sgl.gen("answer", max_tokens=8)

    endpoint = rag.endpoint()
    with pytest.warns(UserWarning, match="Error in stream_executor"), pytest.raises(RuntimeError):
        rag.read(too_long.run(backend=endpoint), "answer")


def test_with_an_api_key(locked_server: Any) -> None:
    with Client(locked_server.url, api_key="secret") as client:
        job = client.ingest_texts(
            [{"name": "oslo", "title": "Oslo", "text": "Oslo is the capital of Norway."}], namespace=NAMESPACE
        )
        client.wait(job, timeout_s=240)
        asked = "What is the capital of Norway?"
        served = client.query(asked, namespace=NAMESPACE, k=1, strategy="prefix", max_new_tokens=8)
        assert served.answer

    @sgl.function
    def ask(s: Any, rag: Rag) -> None:
        rag.context(s, asked, k=1)
        rag.answer(s, asked, "answer", max_tokens=8)

    with closing(Rag(locked_server.url, namespace=NAMESPACE, api_key="secret")) as rag:
        assert rag.read(ask.run(rag, backend=rag.endpoint()), "answer") == served.answer
    with (
        closing(Rag(locked_server.url, namespace=NAMESPACE, api_key="wrong")) as rag,
        pytest.raises(Unauthorized),
    ):
        rag.retrieve("What is the capital of Norway?")
