"""Triton's interpreter without the work that it repeats for every operation.

Nine tenths of its time go into the types of values and into patching ``triton.language``, not into numbers.
What is replaced here computes the same; kernel tests take half as long."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from triton import language as tl
from triton._utils import validate_block_shape
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterOptions
from triton.runtime.jit import JITFunction


def interpret_standard_library() -> None:
    """Triton's own device functions (tl.sum, tl.zeros, ...) were decorated for the compiler if another test
    imported triton earlier.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("triton.language"):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    setattr(module, attribute, InterpretedFunction(value.fn))


def accelerate() -> None:
    """Replace the slow parts, for this process."""
    interpreter._patch_lang = _Patches(interpreter._patch_lang)
    interpreter._get_np_dtype = _numpy_dtype(interpreter._get_np_dtype)
    core.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor
    core.tuple.__init__ = _init_tuple
    core.tuple.type = _TupleType()
    # the check of integer operations for overflow, whose result nothing reads unless `debug` is set
    interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)


class _Patches:
    """Patch the modules of ``triton.language`` once a launch, and put all back after it; ``patch`` does so in
    every call of a device function again, and then puts nothing back."""

    def __init__(self, patch: Callable[[Callable[..., Any]], Any]) -> None:
        self._patch = patch
        self._patched: frozenset[str] = frozenset()
        self._scopes: list[Any] = []

    def __call__(self, function: Callable[..., Any]) -> _Patches:
        modules = _language_modules(function)
        if not modules <= self._patched:
            self._scopes.append(self._patch(function))
            self._patched |= modules
        return self

    def restore(self) -> None:
        while self._scopes:
            self._scopes.pop().restore()
        self._patched = frozenset()


@functools.cache
def _language_modules(function: Callable[..., Any]) -> frozenset[str]:
    """Which modules ``interpreter._patch_lang`` patches for a function."""
    values = function.__globals__.values()
    return frozenset(module.__name__ for module in (tl, core) if any(value is module for value in values))


def _numpy_dtype(of: Callable[[tl.dtype], np.dtype[Any]]) -> Callable[[tl.dtype], np.dtype[Any]]:
    """``of``, which makes a table of all types, by the name of a type."""
    found: dict[str, np.dtype[Any]] = {}

    def remembered(dtype: tl.dtype) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in found:
            found[name] = of(dtype)
        return found[name]

    return remembered


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[core.tuple, core.tuple, int, str]:
    """Sizes of a block as its type has them and as its tensors do, the number of elements, a name."""
    plain = core._unwrap_shape(list(sizes))
    shape = core.tuple(plain)
    return shape, core.tuple([core.constexpr(n) for n in plain]), validate_block_shape(plain), str(shape)


def _init_block_type(self: core.block_type, element_ty: tl.dtype, shape: Any) -> None:
    if not len(shape):
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, _, self.numel, name = _shape(tuple(shape))
    self.name = f"<{name}, {element_ty.name}>"


def _init_tensor(self: core.tensor, handle: Any, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if type.is_block():
        _, self.shape, numel, _ = _shape(tuple(type.shape.values))
    else:
        self.shape, numel = core.tuple([]), 1
    self.numel = core.constexpr(numel)


class _TupleType:
    """The type of a tuple, found when it is asked for."""

    def __get__(self, owner: core.tuple, _: object = None) -> core.tuple_type:
        if "_type" not in vars(owner):
            owner._type = core._type_for_tuple_values(owner.values)
        return owner._type

    def __set__(self, owner: core.tuple, type: core.tuple_type) -> None:
        owner._type = type


def _init_tuple(self: core.tuple, args: Any, type: Any = None) -> None:
    self.values = list(args)
    if type is not None:
        self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)
