"""Words are cut in one way: what people type finds what they mean, in every lexical index alike."""

from __future__ import annotations

import sqlite3
import unicodedata
from pathlib import Path
from time import thread_time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragserve_index import Eq, IndexStore, database, lexical_index, lexical_indexes, lexical_search
from ragserve_index.lexical_index import folder_of
from ragserve_index.word_cutting import SIGNS, VERSION, words
from tests.unit.index.index_samples import (
    UP_TO_FORMAT_6,
    assert_clean,
    make,
    on_both_registries,
    on_registries,
    on_sqlite,
    open_store,
)
from tests.unit.index.test_lexical import found, write

pytestmark = on_registries
# what a text has, and what finds it
SAME = [
    ("the o\ufb03ce", "office"),
    ("\ufb01ne fares", "fine"),
    ("panel \uff21\uff14\uff17\uff11\uff11", "A4711"),
    ("a light\u00adhouse", "lighthouse"),
    ("a break\u200bwater", "breakwater"),
    ("10\u00a0000 barrels", "10000"),
    ("10\u202f000 barrels", "10 000"),
    ("10\u2009000\u2009000 barrels", "10000000"),
    ("10 000 barrels", "10000"),
    ("10,000 barrels", "10000"),
    ("10000 barrels", "10\u202f000"),
    ("Straße", "STRASSE"),
    ("Strasse", "straße"),
    ("GROẞE", "grosse"),
    ("Łodzi", "lodzi"),
    ("Lodzi", "Łodzi"),
    ("Tromsø", "Tromso"),
    ("Ægir", "aegir"),
    ("œuvre", "OEUVRE"),
    ("İzmir", "izmir"),
    ("Đà Nẵng", "da nang"),
    ("λιμάνι", "λιμανι"),
    ("ΛΙΜΑΝΙ", "λιμάνι"),
    ("λόγῳ", "λογω"),
    ("тёплая", "теплая"),
    ("שָׁלוֹם", "שלום"),
    ("مُحَمَّد", "محمد"),
    ("أحمد", "احمد"),
    ("हिन्दी", "हिन्दी"),
    ("क़लम", "क\u093cलम"),
    ("한국어", "한국어"),
    ("\u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165", "한국어"),
    ("٣٤ barrels", "34"),
    ("Cafe\u0301", "CAFÉ"),
    ("C++ programs", "c++"),
    ("written in C#.", "C#"),
    ("(.NET)", ".NET"),
    ("C#/.NET", ".net"),
    ("C++-based", "C++"),
    ("#682-#690", "#682"),
    ("10'000 barrels", "10000"),
    ("see #682,", "#682"),
    ("2 GB/s", "gb/s"),
    ("1.5GB/s", "GB/s"),
    ("1,5GB/s", "gb/s"),
    ("1.5-2GB/s", "GB/s"),
    ("at 120km/h", "km/h"),
    ("at 120 km/h", "120km/h"),
    ("20mg/ml", "mg/mL"),
    ("9.81m/s²", "m/s2"),
    ("16GB of memory", "16 GB"),
    ("16 GB of memory", "16GB"),
    ("1.5GB of memory", "1.5 GB"),
    ("C++11", "C++"),
    ("-std=c++17", "C++"),
    ("C++98/C++03", "C++03"),
    ("(C++1z)", "C++"),
    ("C#7.3", "C#"),
    ("C♯", "C#"),
    (".NET8", ".net"),
    (".NET6.0", ".NET"),
    ("5 €", "€"),
    ("€5", "5 €"),
    ("45 m²", "m2"),
    ("45 m²", "m^2"),
    ("10⁶ units", "10^6"),
    ("a note³", "note"),
    ("5½ miles", "5"),
    ("5㎏", "kg"),
    ("Skerryvore™", "skerryvore"),
    ("H₂O", "h2o"),
    ("AB-4410", "AB\u20114410"),
    ("R&D", "r&d"),
    ("foo_bar", "bar"),
    ("O’Neill", "o'neill"),
    ("iPhone15的电池续航很长", "电池"),
    ("iPhone 15 的电池续航很长", "iPhone15 电池"),
    ("第３章 ＡＢ－４４１０号机", "AB-4410"),
    ("价格为10,000元", "10000"),
    ("C++语言和C#语言", "C++"),
    ("登山者", "山"),
    ("𠮷野家で食べる", "𠮷野家"),
    ("ﾃﾞｰﾀﾍﾞｰｽを消す", "データベース"),
    ("灯台の高さは48メートルです", "灯台"),
    ("ประภาคารสร้างเมื่อปี ๒๔๘๗", "ประภาคาร 2487"),
    ("รถไฟฟ้าสายสีน้ำเงิน", "รถ"),
    ("ພາສາລາວເປັນພາສາທາງການ", "ພາສາລາວ"),
    ("ភាសាខ្មែរជាភាសាផ្លូវការ", "ភាសាខ្មែរ"),
    ("မြန်မာဘာသာစကား", "ဘာသာ"),
]
NAMES = ["C++", "C#", "C", ".NET", "net", "#682", "682", "GB/s", "GB s", "F#", "R&D", "AB-4410", "node.js"]


@pytest.fixture(params=["registry", "tantivy"])
def engine(request: pytest.FixtureRequest, store: IndexStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """The lexical index that answers, and nothing else."""
    if request.param == "tantivy":
        monkeypatch.setattr(lexical_indexes, "FROM", 1)
        monkeypatch.setattr(lexical_search, "search", None)
    return str(request.param)


@on_both_registries
def test_what_people_type_finds_what_they_mean(store: IndexStore, engine: str) -> None:
    write(store, {f"d{i}": f"Here is {text}" for i, (text, _) in enumerate(SAME)}, kind="text")
    write(store, {f"filler{i}": "nothing of it" for i in range(5)})
    store.save("n")
    missed = [
        (text, typed)
        for i, (text, typed) in enumerate(SAME)
        if f"d{i}" not in found(store, typed, 60, filter=Eq(field="kind", value="text"))
    ]
    assert missed == []


@on_both_registries
def test_names_made_of_signs_are_found_first(store: IndexStore, engine: str) -> None:
    texts = {name: f"This page is about {name} and nothing else" for name in NAMES}
    write(store, texts | {f"filler{i}": f"water and oil {i}" for i in range(20)})
    store.save("n")
    signs = [name for name in NAMES if not name.replace(" ", "").isalnum()]
    assert {name: found(store, f"What is {name}?", 1) for name in signs} == {name: [name] for name in signs}


@on_both_registries
def test_a_name_is_found_before_its_letters_whatever_version_it_has(store: IndexStore, engine: str) -> None:
    texts = {
        "C++11": "The standard C++11 has move semantics",
        "C++17": "The standard C++17 has structured bindings",
        "C": "The standard C of 1989 has neither of both",
        "vitamin": "The standard vitamin C and eleven others",
        "disk": "This disk writes 1.5GB/s all day",
        "bus": "This bus carries 40 Gb and has an s",
        "car": "This car drives 90km/h all day",
        "walk": "This h is a letter and 90 km are far",
    }
    write(store, texts | {f"filler{i}": f"water and oil {i}" for i in range(20)})
    store.save("n")
    assert set(found(store, "C++", 2)) == {"C++11", "C++17"}
    assert found(store, "C++17", 2) == ["C++17", "C++11"]
    assert found(store, "GB/s", 1) == ["disk"]
    assert found(store, "km/h", 1) == ["car"]
    assert "c++" not in words("C")
    assert len(words("21st 2nd 1990s 3d 5f9d0")) == 5


@given(st.text(alphabet=st.characters(), max_size=80))
@example("1 100,000 9 10,000.5 1 234 567,890")
@example("a\u0345\u0130 \u01c4 \ufdfa \u3099")
@example("1.5gb/s 16gb c++17 1.5-2gb/s 2-wire .net6.0 c#7#8 9:5x++2++3.a 1:2:b")
@example("c+++++++ ..a.. #@.b #c# " + "+" * 200 + "a" + "+" * 200)
def test_each_word_of_a_text_finds_it(text: str) -> None:
    has = set(words(text))
    for typed in text.split():
        assert has >= set(words(typed)), typed
    for word in has:
        assert word
        assert not any(character.isspace() or character in "\"'\\" for character in word)
        assert all(character.isalnum() or character in SIGNS for character in word if character.isascii())
        assert len(word) <= 70


@given(st.text(alphabet=st.characters(), max_size=80))
def test_case_and_form_do_not_matter(text: str) -> None:
    for form in ("NFC", "NFD"):
        assert sorted(words(unicodedata.normalize(form, text))) == sorted(words(text))


def test_long_runs_are_cut_in_linear_time() -> None:
    for unit in [
        "a",
        "+",
        "a+",
        "1 ",
        "000 ",
        "000,",
        *"\u0301\u00ad #.漢²",
        "c++ ",
        "a²",
        "1.5gb/",
        "c++1",
        "1-",
        "1:2a",
        ".a1",
    ]:
        started = thread_time()
        words((unit * 65_536)[:65_536])
        assert thread_time() - started < 1, unit


@on_both_registries
@pytest.mark.parametrize("version", ["0 1.0", "99 99.0", None], ids=["older", "newer", "none"])
def test_indexes_whose_words_were_cut_in_another_way_are_built_anew(
    store: IndexStore, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lexical_indexes, "FROM", 1)
    write(store, {f"d{i}": f"lamp number{i}" for i in range(5)})
    with monkeypatch.context() as patch:
        patch.setattr(lexical_index, "_FORMAT", str(version))
        store.save("n")
    with store.database.write() as connection:
        connection.execute("DELETE FROM lexical_words")
        if version is not None:
            connection.execute("INSERT INTO lexical_words VALUES (?)", (version,))
        connection.dialect.lexical.drop(connection, 1)
        connection.dialect.lexical.create(connection, 1)
    store.close()
    built = folder_of(store.data_dir / "indexes", 1)
    assert built.exists()
    url = getattr(store.database, "_url", None)
    with IndexStore(store.data_dir, registry_url=url) as again:
        assert found(again, "number3") == ["d3"]
        again.save("n")
        assert_clean(again)
        with again.database.read() as connection:
            assert connection.execute("SELECT version FROM lexical_words").fetchall() == [(VERSION,)]
        monkeypatch.setattr(lexical_search, "search", None)
        assert found(again, "number3") == ["d3"]


@on_sqlite
def test_an_index_of_the_same_words_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(tmp_path) as store:
        write(store, {"a": "a lamp"})
    monkeypatch.setattr(database.LexicalTables, "build", None)
    with open_store(tmp_path) as store:
        assert found(store, "lamp") == ["a"]


@on_sqlite
def test_a_registry_of_format_4_gets_its_words_cut_anew(tmp_path: Path) -> None:
    with make(tmp_path) as store:
        write(store, {"a": "Straße, 10\u202f000 C++", "b": "tea"})
    with sqlite3.connect(tmp_path / "ragserve.sqlite3") as connection:
        for statement in (
            "DROP TABLE lexical_words",
            "DROP TABLE lexical_1",
            "CREATE VIRTUAL TABLE lexical_1 USING fts5(title, text, content='', tokenize='porter unicode61')",
            "INSERT INTO lexical_1 (rowid, title, text) SELECT chunk_id, '', text FROM chunks",
            *UP_TO_FORMAT_6.split(";"),
            "PRAGMA user_version = 4",
        ):
            connection.execute(statement)
    connection.close()
    with open_store(tmp_path) as store:
        assert found(store, "strasse") == found(store, "10000") == found(store, "c++") == ["a"]
        write(store, {"a": "coffee"})
        assert found(store, "strasse") == []
        assert_clean(store)
