"""Loading of the compiled kernels. The C structures of their arguments are read from the headers."""

from __future__ import annotations

import ctypes
import re
from ctypes import POINTER, c_double, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch

from embeddings.kernels.cpu.build import SOURCES, library_path

BAD_ID, BAD_OFFSETS = 1, 2


_SCALARS: dict[str, Any] = {"double": c_double, "int32_t": c_int32, "int64_t": c_int64, "uint64_t": c_uint64}
_IN_NUMPY = frozenset({"SwapWords"})
"""Structures that are passed as numpy arrays, so pointers to them are plain addresses."""


class HeaderError(RuntimeError):
    """A header has a structure that cannot be read."""


def read_structures(header: str, where: str) -> dict[str, Any]:
    """Return the structures of a header as classes of ctypes, keyed by name.

    A pointer to a structure of the header becomes a POINTER to its class, any other pointer a void pointer. Setting an
    attribute that is not a member raises AttributeError.

    Raises:
        HeaderError: a member is of an unknown type, or is not written as ``type name, name;``.
    """
    code = re.sub("//.*", "", header)
    kinds = _SCALARS | {name: _SCALARS[number] for name, number in re.findall(r"^enum (\w+) : (\w+)", code, re.M)}
    structures: dict[str, Any] = {}
    for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", code, re.M | re.S):
        members: list[tuple[str, Any]] = []
        for declaration in filter(None, map(str.strip, body.split(";"))):
            match = re.fullmatch(r"(?:const )?(\w+)(\*?) (\w+(?:, \w+)*)", declaration)
            if match is None:
                raise HeaderError(f"{where}: struct {name}: write '{declaration}' as 'type name, name'")
            kind, star, names = match.groups()
            if star:
                member = POINTER(structures[kind]) if kind in structures else c_void_p
            elif kind in kinds:
                member = kinds[kind]
            else:
                raise HeaderError(f"{where}: struct {name}: type '{kind}' is not known to {__name__}")
            members += [(one, member) for one in names.split(", ")]
        if name not in _IN_NUMPY:
            kinds[name] = structures[name] = type(name, (ctypes.Structure,), {"__slots__": (), "_fields_": members})
    return structures


_HEADERS = ("interface.h", "id_map.h")
_STRUCTURES = {
    name: structure
    for header in _HEADERS
    for name, structure in read_structures((SOURCES / header).read_text("utf-8"), header).items()
}
Batch, Feature, Tables, Record, IdMap = (
    _STRUCTURES[name] for name in ("Batch", "Feature", "Tables", "Record", "IdMap")
)
DeferredUpdate, Step, Swaps = (_STRUCTURES[name] for name in ("DeferredUpdate", "Step", "Swaps"))
LookupCall, UpdateCall, SwapCall, KeepMaskCall = (
    _STRUCTURES[f"{name}Call"] for name in ("Lookup", "Update", "Swap", "KeepMask")
)
DenseCall, CrossCall, FieldsCall = (_STRUCTURES[f"{name}Call"] for name in ("Dense", "Cross", "Fields"))

_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "scratch_new": (c_void_p, []),
    "scratch_free": (None, [c_void_p]),
    "lookup": (None, [POINTER(LookupCall)]),
    "update": (c_int32, [POINTER(UpdateCall)]),
    "squared_norm": (c_int32, [POINTER(UpdateCall), POINTER(c_double)]),
    "swap": (None, [POINTER(SwapCall)]),
    "keep_mask": (None, [POINTER(KeepMaskCall)]),
    "bias_relu": (None, [POINTER(DenseCall)]),
    "relu_backward": (c_int32, [POINTER(DenseCall)]),
    "cross": (None, [POINTER(CrossCall)]),
    "cross_backward": (c_int32, [POINTER(CrossCall)]),
    "fields": (c_int32, [POINTER(FieldsCall)]),
    "fields_backward": (None, [POINTER(FieldsCall)]),
    "id_map_find": (None, [POINTER(IdMap), c_void_p, c_int64, c_void_p]),
    "id_map_touch": (c_int64, [POINTER(IdMap), c_void_p, c_int64, c_void_p, c_int32, c_void_p]),
    "id_map_admit": (
        c_int64,
        [POINTER(IdMap), c_void_p, c_void_p, c_void_p, c_int64, POINTER(c_int64), c_int32, c_int32, c_void_p, c_int32],
    ),
    "id_map_put": (None, [POINTER(IdMap), c_void_p, c_int64]),
    "id_map_remove": (None, [POINTER(IdMap), c_void_p, c_int64]),
}


@cache
def library() -> Any:
    """Return the compiled functions (``lookup``, ``update``, ...) for this machine's instructions.

    Calls release the interpreter's lock. Raise RuntimeError if the functions were not built.
    """
    loaded = ctypes.CDLL(str(library_path()))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, f"evenkeel_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(loaded, name, function)
    return loaded


def _numbers(header: str, enum: str) -> dict[str, int]:
    """Return the numbers of an enum's entries, keyed by their names in lower case."""
    (names,) = re.findall(rf"^enum {enum} : int32_t {{ (.*) }};", (SOURCES / header).read_text("utf-8"), re.M)
    return {name.lower(): number for number, name in enumerate(names.split(", "))}


_RULES, _TYPES = _numbers("update.h", "Rule"), _numbers("elements.h", "ElementType")


def rule_number(name: str) -> int:
    """Return the number of an update rule (``embeddings.optim.base.RowOptimizer.rule``).

    Raises:
        ValueError: The compiled kernels have no such rule.
    """
    if name not in _RULES:
        raise ValueError(
            f"the cpu kernel has no update rule '{name}': add it to src/update.h, or use backend reference"
        )
    return _RULES[name]


def type_number(dtype: torch.dtype) -> int:
    """Return the number of a type of elements.

    Raises:
        ValueError: The compiled kernels have no such type; they would take it for float32.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _TYPES:
        raise ValueError(
            f"the cpu kernel has no elements of {dtype}: add them to src/elements.h and src/kernel.cpp, or use backend "
            "reference"
        )
    return _TYPES[name]
