"""Metadata filters: a small bounded grammar, validated by pydantic and compiled to one parameterised SQL
condition on documents.

Fields are the metadata keys of a document, plus ``doc_id``, ``source``, ``title`` and ``mime``, which take
precedence over a metadata key of the same name. Matching:

* ``eq``/``in``: a value of the same kind (text, number, true/false); an integer equals a float of the same
  value, but never true or false. A field that holds a list matches when one of its elements does. ``null``
  matches a field that is null or absent.
* ``range``: numbers against numbers, text against text (by code point); lists, true/false and null never
  match.
* text is compared in one normal form, NFC: an accent that is typed as a character of its own is that of the
  letter.
* ``and``/``or``/``not`` are two-valued: ``not`` of a condition on an absent field is true.

What a search costs is bounded by the tree: each ``eq``, ``in`` and ``range`` is a test of every document, one
for each form of a name that is not ASCII (`forms`), and their values are bounded together. What the documents
hold is not: a search that takes longer than `MAX_S` is ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ragserve.errors import InvalidRequest
from ragserve_index.database import Connection, Dialect
from ragserve_index.text_forms import forms, normal

MAX_DEPTH = 8
MAX_NODES = 64
MAX_TESTS = 16  # each is made on every document of the namespace
MAX_VALUES = 1000
MAX_CHARS = 65_536
MAX_S = 10.0  # long lists in every document of a large namespace take longer
COLUMNS = ("doc_id", "source", "title", "mime")

# A quoted label of an SQLite JSON path has no escapes, so names that would need one are refused.
FieldName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=128,
        pattern=r'^[^"\\\x00-\x1f\x7f]+$',
        description="A metadata key, or doc_id, source, title, mime.",
        examples=["lang"],
    ),
]
Text = Annotated[StrictStr, Field(max_length=4096, pattern=r"^[^\x00]*$")]
Integer = Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1)]
Float = Annotated[StrictFloat, Field(allow_inf_nan=False)]
Value = StrictBool | Integer | Float | Text | None
Bound = Integer | Float | Text


class _Node(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Eq(_Node):
    """The field has this value."""

    op: Literal["eq"] = "eq"
    field: FieldName
    value: Value


class In(_Node):
    """The field has one of these values."""

    op: Literal["in"] = "in"
    field: FieldName
    values: Annotated[tuple[Value, ...], Field(min_length=1, max_length=MAX_VALUES)]


class Range(_Node):
    """The field lies between the bounds, which are all numbers or all text."""

    op: Literal["range"] = "range"
    field: FieldName
    gt: Bound | None = None
    gte: Bound | None = None
    lt: Bound | None = None
    lte: Bound | None = None

    def bounds(self) -> list[tuple[str, int | float | str]]:
        """SQL comparison and value of each bound that is set."""
        given = ((">", self.gt), (">=", self.gte), ("<", self.lt), ("<=", self.lte))
        return [(sign, value) for sign, value in given if value is not None]

    @model_validator(mode="after")
    def _one_kind(self) -> Range:
        kinds = {isinstance(value, str) for _, value in self.bounds()}
        if not kinds:
            raise ValueError("a range needs at least one of gt, gte, lt, lte")
        if len(kinds) > 1:
            raise ValueError("the bounds of a range are all numbers or all text")
        return self


class And(_Node):
    """Match if all filters do."""

    op: Literal["and"] = "and"
    filters: Annotated[tuple[_Tagged, ...], Field(min_length=1, max_length=MAX_NODES)]


class Or(_Node):
    """Match if one of the filters does."""

    op: Literal["or"] = "or"
    filters: Annotated[tuple[_Tagged, ...], Field(min_length=1, max_length=MAX_NODES)]


class Not(_Node):
    """The filter does not match."""

    op: Literal["not"] = "not"
    filter: _Tagged


_Tagged = Annotated["Eq | In | Range | And | Or | Not", Field(discriminator="op")]
AnyFilter = Eq | In | Range | And | Or | Not
And.model_rebuild()
Or.model_rebuild()
Not.model_rebuild()


def _check_size(node: AnyFilter) -> AnyFilter:
    """Raise ValueError when the tree is deeper than MAX_DEPTH, has more than MAX_NODES nodes or MAX_TESTS
    tests, or when its values are more than MAX_VALUES, or their text more than MAX_CHARS, together."""
    level: list[Any] = [node]
    nodes = depth = tests = values = chars = 0
    while level:
        depth += 1
        nodes += len(level)
        if depth > MAX_DEPTH:
            raise ValueError(f"a filter may be at most {MAX_DEPTH} levels deep")
        if nodes > MAX_NODES:
            raise ValueError(f"a filter may have at most {MAX_NODES} conditions")
        for leaf in level:
            if isinstance(leaf, Eq | In | Range):
                compared = _values(leaf)
                tests += len(forms(leaf.field))
                values += len(compared)
                chars += sum(len(value) for value in compared if isinstance(value, str))
        if tests > MAX_TESTS:
            raise ValueError(
                f"a filter may have at most {MAX_TESTS} comparisons (eq, in, range); a name that is not "
                'ASCII counts two or three times; one "in" compares a field with many values'
            )
        if values > MAX_VALUES or chars > MAX_CHARS:
            raise ValueError(
                f"a filter may have at most {MAX_VALUES:,} values of {MAX_CHARS:,} characters together; "
                "give documents a field of their own for what they have in common"
            )
        level = [child for parent in level for child in _children(parent)]
    return node


def _values(leaf: Eq | In | Range) -> Sequence[Any]:
    if isinstance(leaf, Range):
        return [value for _, value in leaf.bounds()]
    return leaf.values if isinstance(leaf, In) else (leaf.value,)


def _children(node: Any) -> tuple[Any, ...]:
    if isinstance(node, And | Or):
        return node.filters
    return (node.filter,) if isinstance(node, Not) else ()


Filter = Annotated[AnyFilter, Field(discriminator="op"), AfterValidator(_check_size)]
"""The type for request models: any of the six nodes, with the tree's size checked."""

_ADAPTER: TypeAdapter[AnyFilter] = TypeAdapter(Filter)


def parse_filter(data: object) -> AnyFilter:
    """Parse a filter from decoded JSON or from JSON text. Raises InvalidRequest with the place and the
    reason.
    """
    try:
        return (
            _ADAPTER.validate_json(data) if isinstance(data, str | bytes) else _ADAPTER.validate_python(data)
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(["filter", *(str(part) for part in first["loc"][:16])])
        hint = (
            'A filter looks like {"op": "eq", "field": "lang", "value": "en"}; '
            "op is one of eq, in, range, and, or, not."
        )
        raise InvalidRequest(
            f"{place}: {first['msg']}.", hint=hint, code="invalid_filter", param="filter"
        ) from None


def compile_filter(node: AnyFilter, dialect: Dialect) -> tuple[str, list[Any]]:
    """Compile a filter to an SQL condition over the alias ``d`` (documents), never NULL, and its parameters.

    Only fixed text enters the SQL; names and values are parameters. Raises InvalidRequest for a tree over the
    limits, which models built in code may be."""
    try:
        _check_size(node)
    except ValueError as error:
        raise InvalidRequest(f"{error}.", code="invalid_filter", param="filter") from None
    parameters: list[Any] = []
    return _condition(node, dialect, parameters), parameters


@contextmanager
def filtering(connection: Connection) -> Iterator[None]:
    """Raise InvalidRequest for statements with a condition that take longer than `MAX_S`."""
    try:
        with connection.within(MAX_S):
            yield
    except TimeoutError:
        raise filter_too_costly() from None


def filter_too_costly() -> InvalidRequest:
    return InvalidRequest(
        f"The filter took longer than {MAX_S:g} s.",
        hint="Compare fewer fields, or give documents a short field for what they have in common.",
        code="filter_too_costly",
        param="filter",
    )


def _condition(node: Any, dialect: Dialect, out: list[Any]) -> str:
    match node:
        case And(filters=children):
            return "(" + " AND ".join(_condition(child, dialect, out) for child in children) + ")"
        case Or(filters=children):
            return "(" + " OR ".join(_condition(child, dialect, out) for child in children) + ")"
        case Not(filter=child):
            return f"(NOT {_condition(child, dialect, out)})"
        case Eq(field=field, value=value):
            return _one_of(field, (value,), dialect, out)
        case In(field=field, values=values):
            return _one_of(field, values, dialect, out)
        case Range():
            return _range(node, dialect, out)
    raise InvalidRequest(f"{type(node).__name__} is not a filter.", code="invalid_filter", param="filter")


def _one_of(field: str, values: tuple[Any, ...], dialect: Dialect, out: list[Any]) -> str:
    if field in COLUMNS:
        texts = [normal(value) for value in values if isinstance(value, str)]
        if not texts:
            return "FALSE"
        out.append(json.dumps(texts, ensure_ascii=False))
        return f"({_column(field, dialect)} IN (SELECT value FROM {dialect.texts} listed))"
    # metadata is stored in NFC; earlier versions stored names and values as they were typed
    names = forms(field)
    wanted = tuple(form for value in values if value is not None for form in _forms(value))
    parts = [dialect.one_of(name, wanted, out) for name in names] if wanted else []
    if None in values:
        absent = " AND ".join(dialect.one_of(name, (None,), out) for name in names)
        parts.append(f"({absent})")
    return f"({' OR '.join(parts)})"


def _range(node: Range, dialect: Dialect, out: list[Any]) -> str:
    bounds = [(sign, _forms(value)[0]) for sign, value in node.bounds()]
    if node.field not in COLUMNS:
        parts = [dialect.in_range(name, bounds, out) for name in forms(node.field)]
        return f"({' OR '.join(parts)})"
    if not isinstance(bounds[0][1], str):
        return "FALSE"
    out += [value for _, value in bounds]
    return "(" + " AND ".join(f"{_column(node.field, dialect)} {sign} ?" for sign, _ in bounds) + ")"


def _column(field: str, dialect: Dialect) -> str:
    # a path is stored as the file's own name, in whatever form
    return f"{dialect.nfc}(d.{field})" if field in ("source", "title") else f"d.{field}"


def _forms(value: Any) -> list[Any]:
    return list(forms(value)) if isinstance(value, str) else [value]
