"""The file of sessions: what comes back, what a kill leaves, and files, disks and texts that are broken."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragserve.answering.prompt import Message
from ragserve.answering.results import RetrievedPassage
from ragserve.answering.sessions import session_store
from ragserve.answering.sessions.kept_dialogue import Dialogue
from ragserve.answering.sessions.past_turns import PastTurn
from ragserve.answering.sessions.session_record import SessionRecord, dialogue_of
from ragserve.answering.sessions.session_store import ASIDE, FILE_NAME, SessionStore
from ragserve.strategy_spec import StrategySpec
from sglang_ext.wire.protocol import Span
from tests.conftest import EXHAUSTIVE

SECRET = "the wine cellar under the west wing"


def turn(number: int, text: str = SECRET) -> PastTurn:
    passage = RetrievedPassage(index=number + 1, chunk_id=number, title=f"t{number}", text=text, score=0.1)
    ids, spans = list(range(100 * number, 100 * number + 37)), (Span(0, 4), Span(4, 20))
    return PastTurn(ids, 30, spans, range(number), (passage,), f"q{number}?")


def session(turns: int = 2, name: str = "a", **fields: Any) -> Dialogue:
    made = Dialogue(name, "owner", "docs", **fields)
    for number in range(turns):
        add(made, turn(number))
    return made


def add(dialogue: Dialogue, *turns: PastTurn) -> None:
    for each in turns:
        dialogue.messages += [*each.history, Message("user", each.question), Message("assistant", "So.")]
        dialogue.past.append(each)
        dialogue.prompts.append(tuple(dialogue.past))
        dialogue.turns += 1


def same(one: Dialogue, other: Dialogue) -> bool:
    """All that a turn reads. Places and ids may be of another type of sequence."""

    def parts(dialogue: Dialogue) -> Any:
        apart = ("lock", "prompts", "past")
        rest = {name: value for name, value in vars(dialogue).items() if name not in apart}
        past = [
            replace(each, ids=list(each.ids), unregistered=list(each.unregistered)) for each in dialogue.past
        ]
        return rest, past, [[list(each.ids) for each in prompt] for prompt in dialogue.prompts]

    return bool(parts(one) == parts(other))


def run(folder: Path, *steps: Callable[[SessionStore], Any], model: str = "m") -> list[Dialogue]:
    """The sessions that a server finds on disk. It takes the steps before it ends."""

    async def main() -> list[Dialogue]:
        store = SessionStore(folder, lambda: model)
        found = await store.open()
        for step in steps:
            await step(store)
        await store.close()
        return found

    return asyncio.run(main())


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.glob(f"{FILE_NAME}*"))


texts = st.text(max_size=30)
numbers = st.integers(-(2**40), 2**40)
places = st.builds(Span, st.integers(0, 999), st.integers(0, 999))
messages = st.builds(Message, st.sampled_from(("user", "assistant")), texts)
metadata = st.dictionaries(texts, st.none() | st.booleans() | numbers | texts | st.lists(texts, max_size=2))
passages = st.builds(
    RetrievedPassage,
    index=st.integers(1, 99),
    chunk_id=st.none() | numbers,
    title=texts,
    text=texts,
    score=st.none() | st.floats(allow_nan=False),
    metadata=metadata,
)
past_turns = st.builds(
    PastTurn,
    ids=st.lists(st.integers(0, 2**18), max_size=20),
    asked=st.integers(0, 20),
    spans=st.lists(places, min_size=1, max_size=3).map(tuple),
    unregistered=st.lists(st.integers(0, 9), max_size=3) | st.builds(range, st.integers(0, 3)),
    passages=st.lists(passages, max_size=3).map(tuple),
    question=texts,
)
specs = st.none() | st.builds(StrategySpec, texts, metadata)
sessions = st.builds(
    Dialogue,
    st.text("abcdef0123456789", min_size=1),
    texts,
    texts,
    st.integers(0, 9999),
    created_at=st.floats(0, 2e9),
    used_at=st.floats(0, 2e9),
    system=st.none() | texts,
    named=specs,
    spec=specs,
    exact=st.integers(0, 9),
    keys=st.sets(texts, max_size=3),
    namespaces_made_at=st.dictionaries(st.sampled_from(["a", "b"]), st.floats(0, 2e9)),
)


@given(sessions, st.lists(past_turns, min_size=1, max_size=4), st.lists(messages, max_size=3))
def test_any_session_is_read_as_it_was(made: Dialogue, turns: list[PastTurn], history: list[Message]) -> None:
    add(made, replace(turns[0], history=tuple(history)), *turns[1:])
    record = SessionRecord.of(made)
    read = dialogue_of(made.id, record.session_json(), map(record.turn_json, range(len(turns))))
    assert same(read, made)
    assert all(a is b for prompt in read.prompts for a, b in zip(prompt, read.past, strict=False))


def test_a_server_finds_the_sessions_of_the_one_before(tmp_path: Path) -> None:
    one, other = session(2, "a", exact=1), session(1, "b", budget=9, system="Be short.")
    assert run(tmp_path, lambda store: store.keep(one), lambda store: store.keep(other)) == []
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    add(one, turn(2))
    found = run(tmp_path, lambda store: store.keep(one), lambda store: store.remove(["b"]))
    assert [each.id for each in found] == ["a", "b"]
    assert not same(found[0], one), "its third turn came later"
    assert same(found[1], other)
    (left,) = run(tmp_path)
    assert same(left, one)


def test_a_kill_leaves_all_that_was_written(tmp_path: Path) -> None:
    made, copies = session(0), 5 if not EXHAUSTIVE else 40

    async def keep(store: SessionStore) -> None:
        for number in range(copies):
            add(made, turn(number))
            await store.keep(made)
            folder = tmp_path / f"killed-{number}"
            folder.mkdir()
            for path in (tmp_path / "data").iterdir():
                shutil.copyfile(path, folder / path.name)

    run(tmp_path / "data", keep)
    for number in range(copies):
        (found,) = run(tmp_path / f"killed-{number}")
        assert [each.question for each in found.past] == [f"q{n}?" for n in range(number + 1)]


@pytest.mark.parametrize("is_ended", [True, False])
def test_no_removed_text_is_left_on_disk(tmp_path: Path, is_ended: bool) -> None:
    made, other = session(9), session(1, "b")
    add(other, turn(1, "something else"))
    other.past.pop(0)

    async def end(store: SessionStore) -> None:
        await store.keep(made)
        assert SECRET.encode() in on_disk(tmp_path)
        if is_ended:
            await store.remove(["a"])
        else:
            made.end("its document was removed.")
            await store.keep(made)
        assert SECRET.encode() not in on_disk(tmp_path)

    run(tmp_path, end)
    assert SECRET.encode() not in on_disk(tmp_path)
    found = run(tmp_path)
    if is_ended:
        assert found == []
    else:
        assert (found[0].outdated, found[0].turns, found[0].past) == ("its document was removed.", 9, [])


def test_ids_of_another_model_mean_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, lambda store: store.keep(session()))
    with caplog.at_level(logging.INFO):
        assert run(tmp_path, model="another") == []
    assert "1 sessions were discarded: they belong to another model" in caplog.text
    assert run(tmp_path) == []


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def _foreign(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (text)")
    connection.close()


def _without_a_table(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE turns")
    connection.close()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b"no database" * 999), "file is not a database"),
        (_cut, "malformed"),
        (_newer, "it has format 99, and this ragserve reads format 1"),
        (_foreign, "not of sessions"),
        (_without_a_table, "no such table"),
    ],
)
def test_a_file_that_cannot_be_read_is_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], Any], reason: str
) -> None:
    run(tmp_path, lambda store: store.keep(session(20)))
    damage(tmp_path / FILE_NAME)
    broken = (tmp_path / FILE_NAME).read_bytes()
    again = session(1, "b")
    assert run(tmp_path, lambda store: store.keep(again)) == []
    assert reason in caplog.text
    assert "holds texts of users" in caplog.text
    assert len((tmp_path / ASIDE).read_bytes()) == len(broken)
    (found,) = run(tmp_path)
    assert same(found, again)


def test_a_session_that_cannot_be_read_does_not_take_others_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, *(lambda store, name=name: store.keep(session(2, name)) for name in "abcd"))  # type: ignore[misc]
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("UPDATE sessions SET data = '{}' WHERE id = 'a'")
        connection.execute("DELETE FROM turns WHERE session = 'b' AND number = 1")
        connection.execute("UPDATE turns SET data = CAST(x'ff' AS TEXT) WHERE session = 'd'")
    connection.close()
    assert [each.id for each in run(tmp_path)] == ["c"]
    assert caplog.text.count("a session cannot be read and is forgotten") == 3


class Full(sqlite3.Connection):
    """A connection whose disk is full while it is told so."""

    full = False

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        if Full.full and sql.lstrip().startswith(("INSERT", "DELETE", "COMMIT")):
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(sql, parameters)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> type[Full]:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **kw: connect(*args, **{"factory": Full, **kw}))
    monkeypatch.setattr(Full, "full", False)
    return Full


def test_nothing_on_a_full_disk_is_older_than_what_was_said(
    tmp_path: Path, full: type[Full], caplog: pytest.LogCaptureFixture
) -> None:
    made, other = session(2), session(1, "b")

    async def steps(store: SessionStore) -> None:
        await asyncio.gather(store.keep(made), store.keep(other))
        full.full = True
        add(made, turn(2))
        await store.keep(made)
        assert not store.is_open
        assert on_disk(tmp_path) == b"", "a restart would go on without the third turn"
        await store.remove(["b"])
        assert await store.open() == []
        assert caplog.text.count("cannot be written") == 1, "said once"
        full.full = False
        with caplog.at_level(logging.INFO):
            assert await store.open() == []
        assert "can be written again" in caplog.text
        await store.keep(made)

    run(tmp_path, steps)
    (found,) = run(tmp_path)
    assert same(found, made)


def test_a_file_that_could_not_be_removed_is_emptied(
    tmp_path: Path, full: type[Full], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(path)

    async def steps(store: SessionStore) -> None:
        await store.keep(session())
        full.full = True
        await store.remove(["a"])
        full.full = False
        assert await store.open() == []

    monkeypatch.setattr(session_store, "_unlink", refuse)
    run(tmp_path, steps)
    assert run(tmp_path) == [], "an ended session does not come back"


def test_what_json_does_not_have_is_no_error_of_the_answer(tmp_path: Path) -> None:
    bad = session(1, "bad", named=StrategySpec("prefix", {"no": object()}))
    run(tmp_path, lambda store: store.keep(bad))
    assert run(tmp_path) == []


def test_a_second_server_waits_for_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> Sequence[Dialogue]:
        first, second = (SessionStore(tmp_path, lambda: "m") for _ in range(2))
        await first.open()
        await first.keep(session())
        assert await second.open() == []
        assert not second.is_open
        assert "another server has it" in caplog.text
        await second.keep(session(1, "lost"))
        await first.close()
        found = await second.open()
        await second.close()
        return found

    assert [each.id for each in asyncio.run(main())] == ["a"]


def test_a_disk_of_which_nobody_may_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "data").write_text("a file where the folder should be")
    assert run(tmp_path / "data", lambda store: store.keep(session())) == []
    assert "cannot be written" in caplog.text
