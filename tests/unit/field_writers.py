"""Finds where the source assigns fields of given classes: for shared state that one module each writes.

Types are guessed by names and annotations, all of them that may fit: an attribute is what a class of ours
declares under its name, a call what a function of its name returns. So a writer is rather found too often
than not at all."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
PASS_ON = {"enumerate", "list", "reversed", "sorted", "tuple", "zip"}  # what they are given


@dataclass(frozen=True, slots=True)
class Write:
    """``field`` of class ``owner`` is assigned in a module; ``part``: classes that the field may be of."""

    module: str
    line: int
    owner: str
    field: str
    part: frozenset[str]


class FieldWriters:
    """Knows the annotations of all modules. ``sources``: module and syntax tree."""

    def __init__(self, classes: Collection[str], sources: Iterable[tuple[str, ast.Module]]) -> None:
        self._classes = frozenset(classes)
        self._sources = list(sources)
        self._named: dict[str, set[str]] = defaultdict(set)  # attributes and functions, by name
        self._fields: dict[str, dict[str, frozenset[str]]] = {name: {} for name in classes}
        for _, tree in self._sources:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._declared(node)
                elif isinstance(node, FUNCTIONS):
                    self._named[node.name] |= self._mentioned(node.returns)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
                    self._named[node.target.attr] |= self._mentioned(node.annotation)

    def _declared(self, node: ast.ClassDef) -> None:
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                mentioned = self._mentioned(each.annotation)
                self._named[each.target.id] |= mentioned
                if node.name in self._fields:
                    self._fields[node.name][each.target.id] = mentioned

    def _mentioned(self, annotation: ast.expr | None) -> frozenset[str]:
        nodes = () if annotation is None else ast.walk(annotation)
        return self._classes & {node.id for node in nodes if isinstance(node, ast.Name)}

    def writes(self) -> list[Write]:
        """Return all assignments outside of the classes' own methods."""
        return [write for module, tree in self._sources for write in self._within(module, tree, {})]

    def _within(self, module: str, tree: ast.AST, names: dict[str, frozenset[str]]) -> Iterator[Write]:
        names = dict(names)
        if isinstance(tree, FUNCTIONS):
            arguments = (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)
            names |= {each.arg: self._mentioned(each.annotation) for each in arguments}
        inner = []
        for node in _nodes(tree):
            if isinstance(node, FUNCTIONS):
                inner.append(node)
            elif isinstance(node, ast.ClassDef):
                if node.name not in self._classes:
                    inner.append(node)
            else:
                for target, value in _assigned(node):
                    if isinstance(target, ast.Name):
                        names[target.id] = self._of(value, names)
                    elif isinstance(target, ast.Attribute):
                        for owner in sorted(self._of(target.value, names)):
                            if (part := self._fields[owner].get(target.attr)) is not None:
                                yield Write(module, target.lineno, owner, target.attr, part)
        for node in inner:
            yield from self._within(module, node, names)

    def _of(self, value: ast.expr | None, names: dict[str, frozenset[str]]) -> frozenset[str]:
        """Return the classes that a value may be of, or hold objects of."""
        match value:
            case ast.Name(id=name):
                return names.get(name, frozenset())
            case ast.Attribute(value=inner, attr=name):
                return frozenset(self._named.get(name, ())) or self._of(inner, names)
            case ast.Call(func=ast.Name(id=name), args=given) if name in PASS_ON:
                return frozenset[str]().union(*(self._of(each, names) for each in given))
            case ast.Call(func=function):
                return self._of(function, names)
            case ast.Subscript(value=inner) | ast.NamedExpr(value=inner):
                return self._of(inner, names)
            case ast.IfExp(body=one, orelse=other):
                return self._of(one, names) | self._of(other, names)
        return frozenset()


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes below a function, class or module in the order of the source, but none of functions and
    classes in it, which come as they are."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from _nodes(node)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Targets of an assignment, a loop or a deletion, with what they get, as far as that is known."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _pairs(target, value)
        case ast.AugAssign(target=target, value=value):
            yield from _pairs(target, None)
        case ast.AnnAssign(target=target, value=value) if value is not None:
            yield from _pairs(target, value)
        case ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield from _pairs(target, value)
        case ast.Delete(targets=targets):
            for target in targets:
                yield from _pairs(target, None)


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(target, ast.Tuple):
        fits = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
        values = value.elts if isinstance(value, ast.Tuple) and fits else [value] * len(target.elts)
        for each, its in zip(target.elts, values, strict=True):
            yield from _pairs(each, its)
    elif isinstance(target, ast.Subscript | ast.Starred):
        yield from _pairs(target.value, None)  # what it holds is changed
    else:
        yield target, value
