"""Sessions on the real engine, with forced retraction, strict memory checks, chunks and pages: exact
strategies and everything recomputed say the same, whatever is evicted; what is held is not computed again.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

import httpx
import pytest

from ragserve.answering.prompt import PromptBuilder, PromptDocument
from sglang_ext.wire.protocol import session_key
from tests.integration.context_client import generate
from tests.integration.engines import PARALLEL_PAGE, SESSION_REFRESH, STRESS_CHUNK, Server
from tests.integration.prompts import rows
from tests.integration.reference import Reference

PAGE = 16
ROWS = rows("onehop")[:2]
TURNS = (  # documents and question of each turn; the second brings one again, the third none
    (ROWS[0]["docs"][:2], ROWS[0]["question"]),
    ([*ROWS[0]["docs"][1:2], *ROWS[1]["docs"][:1]], ROWS[1]["question"]),
    ((), "Which of these did you name first?"),
)
LATER = (  # turns after TURNS; the first of them is computed anew
    (ROWS[1]["docs"][1:2], "Who is named in the last of these?"),
    ((), ROWS[0]["question"]),
)
ALL = {"strategy": "concat", "strategy_options": {"recompute": "all", "force": True}}
SENTENCES = {
    "strategy": "concat",
    "strategy_options": {"recompute": "sentences", "share": 0.3, "force": True},
}


class Talk:
    """A session in a namespace of its own."""

    def __init__(self, server: Server, space: str, **fields: Any) -> None:
        self.server, self.space, self.fields = server, space, fields
        self.name = "new"

    def turn(self, number: int) -> dict[str, Any]:
        response = self.server.client.post("/rag/query", json=self.body(number))
        assert response.status_code == httpx.codes.OK, response.text
        answer = dict(response.json())
        self.name = answer["session"]["id"]
        return answer

    def body(self, number: int) -> dict[str, Any]:
        texts, question = (*TURNS, *LATER)[number]
        documents = [{"title": title, "text": text} for title, text in texts]
        fields = self.fields if number == 0 else {}
        body = {"query": question, "namespace": self.space, "documents": documents, "max_new_tokens": 8}
        return body | fields | {"session": self.name}

    def turns(self) -> int:
        """The session's turns so far."""
        sessions = self.server.client.get("/rag/sessions").json()["sessions"]
        return next(int(each["turns"]) for each in sessions if each["id"] == self.name)

    def forget(self) -> None:
        """Drop the session's KV, on the device and the host."""
        control(self.server, "remove_session", key=session_key(self.space, self.name))

    def end(self) -> None:
        assert self.server.client.delete(f"/rag/sessions/{self.name}").status_code == httpx.codes.OK


def control(server: Server, operation: str, **arguments: Any) -> dict[str, Any]:
    answer = server.client.post("/dumper/ragserve", json={"op": operation, **arguments})
    assert answer.status_code == httpx.codes.OK, answer.text
    return dict(answer.json()[0])


def sessions_on_host(server: Server) -> int:
    return int(control(server, "stat")["host"]["sessions"])


def on_host_of(server: Server) -> int:
    """Entries of the host tier: documents, and turns of sessions."""
    return int(control(server, "stat")["host"]["documents"])


def settled(server: Server) -> None:
    """Nobody is answered, nothing is locked or held, and every slot and page is counted once."""
    deadline = time.monotonic() + 240
    while server.is_answering() or locked(server):
        assert time.monotonic() < deadline, "a slot is lost"
        time.sleep(0.02)
    control(server, "check")


def locked(server: Server) -> int:
    return int(control(server, "stat")["device"]["locked_tokens"] or control(server, "slots")["now"])


def analysed(server: Server, space: str) -> None:
    """Have all documents analysed. Rule `sentences` chooses other tokens of those that are not yet, and an
    idle server sees to them when it finds the time."""
    texts = {tuple(each) for documents, _ in (*TURNS, *LATER) for each in documents}
    documents = [{"title": title, "text": text} for title, text in sorted(texts)]
    options = {"recompute": "sensitivity", "share": 0.1, "force": True}
    body = {"query": "Who?", "namespace": space, "strategy": "concat", "strategy_options": options}
    answer = server.client.post("/rag/query", json=body | {"documents": documents, "max_new_tokens": 1})
    assert answer.json()["context"]["documents_kept"] == len(texts), answer.text


@pytest.fixture(scope="module")
def wanted(stress_server: Server) -> list[dict[str, Any]]:
    """The answers of `full`: every turn is prefilled whole."""
    talk = Talk(stress_server, "sessions-full", strategy="full")
    answers = [talk.turn(number) for number in range(len(TURNS))]
    assert [answer["session"]["tokens_held"] for answer in answers] == [0, 0, 0]
    assert [answer["session"]["documents_added"] for answer in answers] == [2, 1, 0]
    assert all(answer["answer"] for answer in answers)
    talk.end()
    return answers


def test_full_says_what_transformers_says_of_the_whole_dialogue(
    stress_server: Server, wanted: list[dict[str, Any]]
) -> None:
    builder, reference = PromptBuilder.load(str(stress_server.model)), Reference(stress_server.model)
    ids: list[int] = []
    said: list[tuple[str, str]] = []
    for (texts, question), answer in zip(TURNS, wanted, strict=True):
        new = [each for each in map(tuple, texts) if each not in said]
        documents = [PromptDocument("", title, text) for title, text in new]
        lay_out = partial(builder.follow_up, ids) if ids else builder.build
        prompt = lay_out(question, documents, max_prompt_tokens=10**6)
        assert answer["usage"]["prompt"] == len(prompt.input_ids)
        found = reference.plain(prompt.input_ids, answer["usage"]["completion"]).ids
        text = builder.tokenizer.decode(found, skip_special_tokens=True)
        assert text.strip() == answer["answer"]
        ids, said = [*prompt.input_ids, *builder.answer_ids(found, text)], [*said, *new]


@pytest.mark.parametrize(
    ("strategy", "evicted"), [("prefix", ""), ("all", ""), ("all", "lost"), ("all", "host")], ids=str
)
def test_every_turn_says_what_full_prefill_says(
    stress_server: Server, wanted: list[dict[str, Any]], strategy: str, evicted: str
) -> None:
    talk = Talk(
        stress_server,
        f"sessions-{strategy}-{evicted}",
        **(ALL if strategy == "all" else {"strategy": strategy}),
    )
    for number, right in enumerate(wanted):
        if number and evicted == "lost":
            talk.forget()
        elif number and evicted:
            on_host = on_host_of(stress_server)
            control(stress_server, "evict", tiers=["sessions"])
            assert on_host_of(stress_server) > on_host
        got = talk.turn(number)
        assert got["answer"] == right["answer"]
        assert got["usage"]["prompt"] == right["usage"]["prompt"]
        assert got["context"]["notes"] == []
        session, before = got["session"], wanted[number - 1]["session"]["tokens"] if number else 0
        assert session["tokens"] == right["session"]["tokens"]
        if number:
            if evicted == "lost":  # all of it was composed again for this turn
                assert session["tokens_held"] == got["usage"]["cached"] == 0
                assert session["tokens_computed"] >= before
            else:
                assert session["tokens_held"] > before - PAGE - 1
            assert got["usage"]["cached"] >= session["tokens_held"]
            assert got["context"]["tokens_by_tier"]["session"] == session["tokens_held"]
            if evicted == "host":  # brought back, not composed again
                assert session["tokens_computed"] <= PAGE + 8
    on_host = on_host_of(stress_server)
    talk.end()
    settled(stress_server)
    assert (on_host_of(stress_server) < on_host) == (evicted == "host"), "its pages went with the session"


def test_a_turn_reads_its_new_documents_from_the_cache(stress_server: Server) -> None:
    space = "sessions-reuse"
    talk = Talk(stress_server, space, **SENTENCES)
    first, second = talk.turn(0), talk.turn(1)
    talk.end()
    context, session = second["context"], second["session"]
    assert first["session"]["turn"] == 1
    assert session["tokens_computed"] <= PAGE + 8
    assert context["tokens_by_tier"]["computed"] == context["tokens_kept"] == context["tokens_retrieved"]
    assert 0 < context["tokens_recomputed"] < 0.4 * context["tokens_kept"]
    # evicted in between: composed as it was, and so the third turn says the same
    analysed(stress_server, space)
    talk, again = (Talk(stress_server, space, **SENTENCES) for _ in range(2))
    *_, third = [talk.turn(number) for number in range(len(TURNS))]
    talk.end()
    again.turn(0)
    tiers = again.turn(1)["context"]["tokens_by_tier"]
    assert tiers.get("computed", 0) == 0, "they were in the cache"
    again.forget()
    control(stress_server, "evict", tiers=["device"])
    repeated = again.turn(2)
    assert repeated["answer"] == third["answer"]
    assert repeated["session"]["tokens_held"] == 0
    assert repeated["session"]["tokens_computed"] > STRESS_CHUNK
    again.end()
    settled(stress_server)


@pytest.fixture(scope="module")
def wanted_later(stress_server: Server) -> list[dict[str, Any]]:
    """The answers of `full` to the turns of LATER."""
    talk = Talk(stress_server, "sessions-anew-full", strategy="full")
    answers = [talk.turn(number) for number in range(len(TURNS) + len(LATER))]
    talk.end()
    assert not any(answer["session"]["refreshed"] for answer in answers)
    return answers[len(TURNS) :]


def test_a_dialogue_that_was_computed_anew_says_what_full_prefill_says(
    stress_server: Server, wanted_later: list[dict[str, Any]]
) -> None:
    """All that was said so far gets KV under a key of its own; what lay under the former one is dropped, on
    the device and on the host."""
    assert len(TURNS) == SESSION_REFRESH
    control(stress_server, "clear")  # other tests' sessions
    for on_host in (False, True):
        talk = Talk(stress_server, f"sessions-anew-{on_host}", **ALL)
        before = [talk.turn(number) for number in range(len(TURNS))]
        assert not any(answer["session"]["refreshed"] for answer in before)
        if on_host:
            control(stress_server, "evict", tiers=["sessions"])
            assert sessions_on_host(stress_server) == 1
        anew = talk.turn(len(TURNS))
        assert anew["session"]["refreshed"]
        assert anew["session"]["tokens_held"] == anew["usage"]["cached"] == 0
        assert anew["context"]["tokens_by_tier"]["session"] == 0
        assert anew["session"]["tokens_computed"] >= before[-1]["session"]["tokens"]
        if on_host:
            assert sessions_on_host(stress_server) == 0, "pages under the former key are gone"
        control(stress_server, "evict", tiers=["sessions"])
        assert sessions_on_host(stress_server) == 1, "the device had the new key's KV alone"
        after = talk.turn(len(TURNS) + 1)
        assert not after["session"]["refreshed"]
        assert after["session"]["tokens_computed"] <= PAGE + 8, "it goes on from what was computed anew"
        for got, right in zip((anew, after), wanted_later, strict=True):
            assert got["answer"] == right["answer"]
            assert got["session"]["tokens"] == right["session"]["tokens"]
            assert got["context"]["notes"] == []
        assert anew["session"]["documents_added"] == 1
        assert anew["context"]["tokens_recomputed"] == anew["context"]["tokens_kept"] > 0
        talk.end()
        settled(stress_server)
        assert sessions_on_host(stress_server) == 0


def test_what_was_computed_anew_is_computed_as_it_was_once_it_is_lost(stress_server: Server) -> None:
    answers, space = [], "sessions-anew-lost"
    analysed(stress_server, space)
    for is_lost in (False, True):
        talk = Talk(stress_server, space, **SENTENCES)
        *_, anew = [talk.turn(number) for number in range(len(TURNS) + 1)]
        assert anew["session"]["refreshed"]
        if is_lost:
            key = session_key(talk.space, f"{talk.name}-{SESSION_REFRESH}")
            control(stress_server, "remove_session", key=key)
        answers.append(talk.turn(len(TURNS) + 1))
        talk.end()
    (kept, lost), last = answers, anew["session"]["tokens"]
    assert lost["answer"] == kept["answer"]
    assert kept["session"]["tokens_held"] > last - PAGE - 8 - 2
    assert lost["session"]["tokens_held"] == 0 < last <= lost["session"]["tokens_computed"]
    assert kept["context"]["notes"] == lost["context"]["notes"] == []
    settled(stress_server)


def test_the_same_question_outside_a_session_finds_nothing_of_it(stress_server: Server) -> None:
    """Not in the session's own namespace either: only documents are shared there. So waiting times tell
    nothing about what a session has said."""
    for fields in (ALL, {"strategy": "prefix"}):
        is_exact, space = fields is not ALL, f"sessions-apart-{fields['strategy']}"
        talk, other = (Talk(stress_server, space, **fields) for _ in range(2))
        for number in (0, 1):
            own, theirs = talk.turn(number), other.turn(number)
            assert theirs["answer"] == own["answer"]
            assert theirs["session"] == own["session"] | {"id": other.name}
            held = own["session"]["tokens_held"]
            assert theirs["context"]["tokens_by_tier"].get("session", 0) == held
            if is_exact:
                assert theirs["usage"]["cached"] == own["usage"]["cached"] == held
        plain = talk.body(0) | fields
        del plain["session"]
        answer = stress_server.client.post("/rag/query", json=plain).json()
        assert answer["context"]["tokens_by_tier"].get("session", 0) == 0
        if is_exact:
            assert answer["usage"]["cached"] == 0
        for each in (talk, other):
            each.end()
    builder, (texts, question) = PromptBuilder.load(str(stress_server.model)), TURNS[0]
    documents = [PromptDocument("", title, text) for title, text in texts]
    ids = builder.build(question, documents, max_prompt_tokens=10**6).input_ids
    assert len(ids) == answer["usage"]["prompt"]
    assert generate(stress_server.client, list(ids), n_new=1)["meta_info"]["cached_tokens"] == 0
    settled(stress_server)


def test_a_shortened_dialogue_is_computed_as_the_text_that_it_is(stress_server: Server) -> None:
    """Exact strategies and everything recomputed say the same over it, with and without its KV. Without it,
    words choose what stays; with it, so does attention."""
    answers, budget = {}, 40
    for name, fields in {"full": {"strategy": "full"}, "prefix": {"strategy": "prefix"}, "all": ALL}.items():
        talk = Talk(stress_server, f"sessions-short-{name}", **fields, session_budget=budget)
        talk.turn(0)
        talk.turn(1)
        talk.forget()
        answers[name] = talk.turn(2)
        talk.end()
    full = answers["full"]
    first, last = full["session"]["earlier"]
    assert first["tokens"] > budget >= first["tokens_kept"] > 0
    assert last["tokens_kept"] == last["tokens"]
    assert first["rule"] == "words"
    for name, got in answers.items():
        assert got["answer"] == full["answer"], name
        assert got["session"]["earlier"] == full["session"]["earlier"]
        assert got["usage"]["prompt"] == full["usage"]["prompt"]
        assert got["context"]["notes"] == [], name
    # the last turn's document is composed again, behind the text that is left
    talk = Talk(stress_server, "sessions-short-reuse", **SENTENCES, session_budget=budget)
    for number in range(len(TURNS)):
        short = talk.turn(number)
    held = short["session"]["earlier"][0]
    assert (held["rule"], held["tokens"]) == ("attention", first["tokens"])
    assert budget >= held["tokens_kept"] > 0
    assert short["session"]["tokens_computed"] > held["tokens_kept"]
    assert short["session"]["tokens_held"] == 0
    assert short["context"]["notes"] == []
    talk.end()
    settled(stress_server)


@pytest.mark.parametrize("fields", [SENTENCES, {"strategy": "prefix"}], ids=["composed", "prefix"])
def test_a_client_that_leaves_in_a_later_turn_leaves_nothing_behind(
    stress_server: Server, fields: dict[str, Any]
) -> None:
    talk = Talk(stress_server, "sessions-left", **fields)
    talk.turn(0)
    with contextlib.suppress(httpx.TimeoutException):
        stress_server.client.post("/rag/query", json=talk.body(1) | {"max_new_tokens": 400}, timeout=0.3)
    with stress_server.client.stream(
        "POST", "/rag/query", json=talk.body(1) | {"max_new_tokens": 400, "stream": True}
    ) as events:
        next(events.iter_bytes())
    settled(stress_server)
    turns = talk.turns()  # one more, if an answer ended before its client had left
    assert talk.turn(1)["session"]["turn"] == turns + 1
    talk.end()
    settled(stress_server)


@pytest.mark.parametrize("stage", ["admission", "question", "recompute", "forward"])
def test_a_stage_that_fails_in_a_later_turn_takes_nothing_with_it(stress_server: Server, stage: str) -> None:
    analysed(stress_server, "sessions-faults")
    stress_server.analysed()  # or the analysis of another test's document might meet the fault
    talk = Talk(stress_server, "sessions-faults", **SENTENCES)
    talk.turn(0)
    control(stress_server, "fault", stage=stage)
    failed = stress_server.client.post("/rag/query", json=talk.body(1))
    assert failed.status_code == httpx.codes.BAD_GATEWAY, failed.text
    assert stage in failed.json()["error"]["message"]
    assert control(stress_server, "fault") == {"withdrawn": []}
    settled(stress_server)
    session = talk.turn(1)["session"]
    assert session["turn"] == 2
    assert session["tokens_computed"] <= PAGE + 8, "the first turn is still there"
    talk.end()


def test_with_two_ranks(parallel_server: Server) -> None:
    answers = {}
    for name, fields in {"full": {"strategy": "full"}, "all": ALL}.items():
        talk = Talk(parallel_server, f"sessions-ranks-{name}", **fields)
        answers[name] = [talk.turn(number) for number in range(len(TURNS))]
        talk.end()
    assert [a["session"]["refreshed"] for a in answers["all"]] == [False, False, True]
    assert not any(a["session"]["refreshed"] for a in answers["full"])
    assert [a["answer"] for a in answers["all"]] == [a["answer"] for a in answers["full"]]
    uses = [a["session"] for a in answers["all"]]
    assert uses[1]["tokens_held"] > uses[0]["tokens"] - PARALLEL_PAGE - 1
    assert uses[2]["tokens_held"] == 0 < uses[1]["tokens"] <= uses[2]["tokens_computed"]


def test_a_session_that_outgrows_dense_prefill_goes_on_from_sparse_lines(parallel_server: Server) -> None:
    """It is prefilled anew once, sparsely; later turns begin from its lines. Others do not find that KV."""
    space, dense_below = "sessions-sparse", 400
    prefill = {
        "mode": "vertical_slash",
        "alpha": 0.5,
        "observe": 32,
        "dense_last": 64,
        "dense_below": dense_below,
    }
    fields: dict[str, Any] = {"strategy": "prefix", "prefill": prefill}

    def ask(session: str | None, number: int, sentences: int, **fields: Any) -> dict[str, Any]:
        text = " ".join(
            f"Station {number}{i} was built by keeper {7 * i + number}." for i in range(sentences)
        )
        body = {
            "query": f"Who built station {number}?",
            "namespace": space,
            "documents": [{"title": f"Part {number}", "text": text}],
            "max_new_tokens": 8,
        }
        named = {} if session is None else {"session": session}
        response = parallel_server.client.post("/rag/query", json=body | named | fields)
        assert response.status_code == httpx.codes.OK, response.text
        return dict(response.json())

    first = ask("new", 1, 12, **fields)
    name, prompts = first["session"]["id"], [first["usage"]["prompt"]]
    assert prompts[0] <= dense_below
    assert first["prefill"] is None
    second = ask(name, 2, 36, prefill=prefill)
    prompts.append(second["usage"]["prompt"])
    assert prompts[1] > dense_below
    assert second["usage"]["cached"] == second["session"]["tokens_held"] == 0, "nothing of it is dense"
    assert second["prefill"]["tokens"] == prompts[1]
    assert 0.1 < second["prefill"]["share"] < 0.95
    assert second["prefill"]["reused_lines"] == 0 < second["prefill"]["new_lines"]
    third = ask(name, 3, 12, prefill=prefill)
    cached = third["usage"]["cached"]
    assert prompts[1] - PARALLEL_PAGE < cached == third["session"]["tokens_held"]
    assert third["prefill"]["tokens"] == third["usage"]["prompt"] - cached
    assert third["prefill"]["reused_lines"] > 0
    # the session itself, asked exactly, has the KV of its dense turn; another session of this text has none
    exact = ask(name, 4, 4)
    assert exact["prefill"] is None
    assert exact["usage"]["cached"] <= prompts[0] + 8
    other = ask("new", 2, 36, **fields)
    for answer in (other, ask(None, 2, 36, **fields), ask(None, 2, 36, strategy="prefix")):
        assert answer["usage"]["cached"] == 0
    for each in (name, other["session"]["id"]):
        assert parallel_server.client.delete(f"/rag/sessions/{each}").status_code == httpx.codes.OK
    settled(parallel_server)
