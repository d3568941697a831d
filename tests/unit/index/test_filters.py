"""Filters: what the grammar takes, and that SQL and a plain Python reading of it select the same
documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragserve.errors import InvalidRequest
from ragserve_index import And, Eq, In, IndexStore, Not, Or, Range, parse_filter
from tests.conftest import EXHAUSTIVE
from tests.unit.index.index_samples import DIM, TYPES, exact, item, make, overlap, texts, vectors_of

FIELDS = ("a", "b c", "ä.x", "$[0]", "source", "title")
VALUES = [
    None,
    True,
    False,
    0,
    1,
    2,
    1.0,
    0.5,
    -3,
    2**60,
    "",
    "a",
    "b",
    "B",
    "ä",
    "1",
    "true",
    "null",
    "' OR 1=1 --",
    "%",
    "d1",
    "title of d2",
]
LISTS = [[], ["a"], ["a", "b"], ["1", "ä"]]


def matches(node: Any, fields: Mapping[str, Any]) -> bool:
    """Evaluate a filter as the module's docstring says, without SQL."""
    if isinstance(node, And):
        return all(matches(child, fields) for child in node.filters)
    if isinstance(node, Or):
        return any(matches(child, fields) for child in node.filters)
    if isinstance(node, Not):
        return not matches(node.filter, fields)
    value = fields.get(node.field)
    if isinstance(node, Range):
        want_text = isinstance(node.bounds()[0][1], str)
        if isinstance(value, bool) or not isinstance(value, str if want_text else int | float):
            return False
        return all(_compare(value, sign, bound) for sign, bound in node.bounds())
    wanted = (node.value,) if isinstance(node, Eq) else node.values
    present = value if isinstance(value, list) else [value]
    return any(_same(one, other) for one in present for other in wanted)


def _compare(value: Any, sign: str, bound: Any) -> bool:
    return bool({">": value > bound, ">=": value >= bound, "<": value < bound, "<=": value <= bound}[sign])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return (
        (one is None) == (other is None)
        and isinstance(one, str) == isinstance(other, str)
        and bool(one == other)
    )


fields = st.sampled_from(FIELDS)


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    numbers = draw(st.booleans())
    pool = (
        st.sampled_from([0, 1, 0.5, 1.0, -3, 2**60])
        if numbers
        else st.sampled_from(["", "a", "b", "ä", "d1"])
    )
    given_bounds = draw(
        st.dictionaries(st.sampled_from(["gt", "gte", "lt", "lte"]), pool, min_size=1, max_size=2)
    )
    return Range(field=draw(fields), **given_bounds)


leaves = st.one_of(
    st.builds(Eq, field=fields, value=st.sampled_from(VALUES)),
    st.builds(In, field=fields, values=st.lists(st.sampled_from(VALUES), min_size=1, max_size=4).map(tuple)),
    ranges(),
)
filters = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(Not, filter=inner),
        st.builds(And, filters=st.lists(inner, min_size=1, max_size=3).map(tuple)),
        st.builds(Or, filters=st.lists(inner, min_size=1, max_size=3).map(tuple)),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def varied(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[IndexStore, dict[str, dict[str, Any]]]]:
    """A store of documents that together have every value in every field, and what each has."""
    rng = np.random.default_rng(7)
    everything: list[Any] = [*VALUES, *LISTS]
    known: dict[str, dict[str, Any]] = {}
    batch = []
    for i in range(150):
        metadata = {
            name: everything[rng.integers(len(everything))] for name in FIELDS[:4] if rng.random() < 0.7
        }
        batch.append(item(f"d{i}", 1, metadata=metadata))
        known[f"d{i}"] = {**metadata, "source": f"d{i}", "title": f"title of d{i}"}
    url = None if request.param == "sqlite" else request.getfixturevalue("postgres").database()
    with IndexStore(tmp_path_factory.mktemp("varied"), registry_url=url) as store:
        store.ensure_namespace("n", embedder="e", dim=DIM)
        store.replace_documents("n", batch)
        yield store, known


@settings(
    max_examples=1000 if EXHAUSTIVE else 75,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(node=filters)
def test_sql_selects_what_python_selects(
    varied: tuple[IndexStore, dict[str, dict[str, Any]]], node: Any
) -> None:
    store, known = varied
    wanted = {source for source, fields in known.items() if matches(node, fields)}
    assert {document.source for document in store.documents("n", filter=node, limit=1000)} == wanted
    assert {text.split("#")[0] for text in texts(store, vectors_of("q"), 1000, filter=node)} == wanted


@given(node=filters)
def test_json_and_back(node: Any) -> None:
    assert parse_filter(node.model_dump_json()) == parse_filter(json.loads(node.model_dump_json())) == node


def test_doc_id_is_a_field(varied: tuple[IndexStore, dict[str, dict[str, Any]]]) -> None:
    store, _ = varied
    document = store.find_source("n", "d7")
    assert document is not None
    assert texts(store, vectors_of("q"), 5, filter=Eq(field="doc_id", value=document.doc_id)) == ["d7#0.0"]
    assert texts(store, vectors_of("q"), 5, filter=Eq(field="doc_id", value="doc_none")) == []


EQ = {"op": "eq", "field": "a", "value": 1}


def nested(depth: int) -> dict[str, Any]:
    node: dict[str, Any] = EQ
    for _ in range(depth):
        node = {"op": "not", "filter": node}
    return node


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        "",
        "{",
        "eq",
        {},
        {"op": "like", "field": "a", "value": 1},
        {"field": "a", "value": 1},
        {"op": "eq", "field": "a"},
        {"op": "eq", "value": 1},
        {**EQ, "more": 1},
        {"op": "eq", "field": "", "value": 1},
        {"op": "eq", "field": "x" * 129, "value": 1},
        {"op": "eq", "field": 'a"b', "value": 1},
        {"op": "eq", "field": "a\\b", "value": 1},
        {"op": "eq", "field": "a\nb", "value": 1},
        {"op": "eq", "field": 3, "value": 1},
        {"op": "eq", "field": "a", "value": {"b": 1}},
        {"op": "eq", "field": "a", "value": [1]},
        {"op": "eq", "field": "a", "value": 10**400},
        {"op": "eq", "field": "a", "value": float("nan")},
        {"op": "eq", "field": "a", "value": "x" * 4097},
        {"op": "eq", "field": "a", "value": "\0"},
        {"op": "eq", "field": "a", "value": "\ud800"},
        {"op": "in", "field": "a", "values": []},
        {"op": "in", "field": "a", "values": "abc"},
        {"op": "in", "field": "a", "values": [1] * 1001},
        {"op": "range", "field": "a"},
        {"op": "range", "field": "a", "gt": None},
        {"op": "range", "field": "a", "gt": True},
        {"op": "range", "field": "a", "gt": 1, "lt": "b"},
        {"op": "and", "filters": []},
        {"op": "and", "filters": [EQ, {}]},
        {"op": "and", "filters": EQ},
        {"op": "or", "filters": [EQ] * 65},
        {"op": "and", "filters": [{"op": "or", "filters": [EQ] * 8}] * 8},
        {"op": "not"},
        {"op": "not", "filter": [EQ]},
        nested(8),
        '{"op":"not","filter":' * 5000,
    ],
    ids=lambda bad: repr(bad)[:40],
)
def test_malformed_filters(bad: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_filter(bad)
    assert (caught.value.code, caught.value.param) == ("invalid_filter", "filter")
    assert "filter" in str(caught.value)
    assert len(str(caught.value)) < 800


def test_a_filter_nested_deeper_than_the_stack() -> None:
    with pytest.raises(InvalidRequest):
        parse_filter(nested(5000))


def test_the_largest_filters_that_are_allowed(varied: tuple[IndexStore, dict[str, dict[str, Any]]]) -> None:
    store, _ = varied
    many = {"op": "in", "field": "source", "values": [f"d{i}" for i in range(1000)]}
    for node in (nested(7), many, {"op": "or", "filters": [many | {"values": many["values"][:62]}] * 16}):
        assert store.documents("n", filter=parse_filter(node), limit=1000)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"op": "or", "filters": [EQ] * 17}, "at most 16 comparisons"),
        ({"op": "and", "filters": [{"op": "not", "filter": EQ}] * 17}, "at most 16 comparisons"),
        ({"op": "or", "filters": [{"op": "eq", "field": "ä", "value": 1}] * 9}, "at most 16 comparisons"),
        ({"op": "or", "filters": [{"op": "range", "field": "a", "gt": 1}] * 17}, "at most 16 comparisons"),
        ({"op": "or", "filters": [{"op": "in", "field": "a", "values": [1] * 501}] * 2}, "1,000 values"),
        ({"op": "in", "field": "a", "values": ["x" * 4096] * 17}, "65,536 characters"),
    ],
)
def test_what_a_filter_costs_is_bounded(node: dict[str, Any], said: str) -> None:
    """Documents times 63 lists of 1,000 values took minutes of one call."""
    with pytest.raises(InvalidRequest, match=said) as caught:
        parse_filter(node)
    assert caught.value.code == "invalid_filter"


def test_a_filter_ends_when_documents_make_it_long(
    store: IndexStore, registry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {f"f{name}": [str(n) for n in range(256)] for name in range(8)}
    store.replace_documents("n", [item(f"d{i}", 1, metadata=names) for i in range(100)])
    node = parse_filter({"op": "and", "filters": [
        {"op": "not", "filter": {"op": "eq", "field": f"f{name}", "value": "none"}} for name in range(8)
    ]})  # fmt: skip
    assert len(store.documents("n", filter=node)) == 100
    monkeypatch.setattr("ragserve_index.filters.MAX_S", 0.001)
    question = vectors_of("question")
    for search in (
        lambda: store.documents("n", filter=node),
        lambda: store.search("n", question, 3, filter=node),
    ):
        with pytest.raises(InvalidRequest, match=r"longer than 0\.001 s"):
            search()
    monkeypatch.undo()
    assert len(store.search("n", question, 3, filter=node).hits[0]) == 3, (
        "the connection has no limit any more"
    )


def test_a_list_is_compared_with_every_kind_of_value(store: IndexStore) -> None:
    store.replace_documents(
        "n",
        [
            item(name, 1, metadata={} if value is None else {"tags": value})
            for name, value in {"a": ["x", "y"], "b": "x", "c": 2, "d": True, "e": None, "f": []}.items()
        ],
    )
    for values, found in [
        (("y", 2.0), ["a#0.0", "c#0.0"]),
        (("x", 1), ["a#0.0", "b#0.0"]),
        ((True, 3), ["d#0.0"]),
        ((None, "y"), ["a#0.0", "e#0.0"]),
        ((None, False), ["e#0.0"]),
    ]:
        node = In(field="tags", values=values)
        assert sorted(texts(store, vectors_of("q"), 9, filter=node)) == found, values


def test_limits_hold_for_filters_built_in_code(store: IndexStore) -> None:
    node: Any = Eq(field="a", value=1)
    for _ in range(8):
        node = Not(filter=node)
    with pytest.raises(InvalidRequest, match="8 levels"):
        store.search("n", vectors_of("q"), 1, filter=node)
    with pytest.raises(InvalidRequest, match="64 conditions"):
        store.documents("n", filter=Or(filters=(Or(filters=(Eq(field="a", value=1),) * 40),) * 2))


DOCUMENTS = {
    "flat": 600,
    "sq8": 600,
    "ivf": 2600,
    "hnsw": 1200,
}  # of ten chunks: enough for ivf to train, and for a selection too large to score


@pytest.fixture(scope="module", params=TYPES)
def big(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, IndexStore, np.ndarray]]:
    index_type = request.param
    batch = [item(f"d{i}", 10, metadata={"i": i}) for i in range(DOCUMENTS[index_type])]
    with make(Path(tmp_path_factory.mktemp(index_type)), index_type) as store:
        store.replace_documents("n", batch)
        assert store.check()[0].structure == index_type
        yield index_type, store, np.concatenate([vectors for _, _, vectors in batch])


@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 0.9])
def test_filters_keep_recall_in_every_type(big: tuple[str, IndexStore, np.ndarray], share: float) -> None:
    index_type, store, vectors = big
    top = int(len(vectors) / 10 * share) + 1
    queries = vectors_of("queries", n=20)
    hits = store.search("n", queries, 10, filter=Range(field="i", lt=top)).hits
    found = [[(hit.chunk.metadata["i"], hit.chunk.ordinal) for hit in row] for row in hits]
    assert all(len(row) == 10 and max(row)[0] < top for row in found)
    truth = exact(vectors[: 10 * top], np.arange(10 * top), queries, 10)[1]
    numbers = np.array([[10 * i + ordinal for i, ordinal in row] for row in found])
    assert overlap(numbers, truth) >= {"flat": 1.0, "sq8": 0.9, "ivf": 0.7, "hnsw": 0.95}[index_type]


def test_a_filter_is_evaluated_anew_after_a_change(store: IndexStore) -> None:
    node = Eq(field="lang", value="en")
    store.replace_documents(
        "n", [item("a", 1, metadata={"lang": "en"}), item("b", 1, metadata={"lang": "de"})]
    )
    assert texts(store, vectors_of("q"), 5, filter=node) == ["a#0.0"]
    store.replace_documents("n", [item("b", 1, edition=1, metadata={"lang": "en"})])
    assert sorted(texts(store, vectors_of("q"), 5, filter=node)) == ["a#0.0", "b#1.0"]
    store.replace_documents("n", [item("a", 1, edition=1, metadata={"lang": "de"})])
    assert texts(store, vectors_of("q"), 5, filter=node) == ["b#1.0"]


def test_fields_of_documents_win_over_metadata(store: IndexStore) -> None:
    store.replace_documents("n", [item("a", 1, metadata={"source": "z", "title": "z"})])
    assert texts(store, vectors_of("q"), 5, filter=Eq(field="source", value="z")) == []
    assert texts(store, vectors_of("q"), 5, filter=In(field="source", values=("a", 1))) == ["a#0.0"]


def test_nothing_selected_is_no_result(store: IndexStore) -> None:
    store.replace_documents("n", [item("a", 3)])
    _, ids, _ = store.search_ids("n", vectors_of("q"), 2, filter=Eq(field="x", value=1))
    assert (ids == -1).all()
    assert store.search("n", vectors_of("q"), 2, filter=Eq(field="x", value=1)).hits == [[]]
