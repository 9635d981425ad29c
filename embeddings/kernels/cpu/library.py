"""The compiled kernels: which file is loaded, and the structs that they are called with (src/interface.h)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch

from embeddings.kernels.cpu.build import library_path
from embeddings.tables.element_types import ELEMENT_TYPES

BAD_ID, BAD_OFFSETS = 1, 2


class Feature(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("table", "column", "dim", "mean", "num_rows", "first_row", "num_live")),
        *((name, c_int64) for name in ("weight_base", "vector_base", "step_base", "row_bits")),
        *((name, c_uint64) for name in ("key0", "key1", "whole_row", "whole_column")),
    ]


class Tables(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("weights", "vectors", "row_values", "last_steps")),
        ("features", POINTER(Feature)), ("tables", POINTER(Feature)),
        *((name, c_int64) for name in ("num_features", "num_tables", "total_dim")),
        *((name, c_int32) for name in ("weight_type", "state_type", "pooled", "any_mean")),
    ]  # fmt: skip


class Batch(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("ids", "offsets", "weights")),
        ("num_ids", c_int64), ("batch_size", c_int64),
    ]  # fmt: skip


class DeferredUpdate(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("decay", "near", "lookahead", "log_sums")),
        *((name, c_int64) for name in ("completed", "num_decay", "num_near", "num_pairs", "num_log_sums")),
        *((name, c_double) for name in ("log_now", "log_slope")),
        *((name, c_int32) for name in ("from_start", "eps_inside_root", "momentum")),
    ]


class Swaps(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("features", "graph_offsets", "neighbours", "thresholds")),
        ("sample_offset", c_int64), ("step", c_uint64),
    ]  # fmt: skip


class LookupCall(ctypes.Structure):
    _fields_ = [
        ("tables", POINTER(Tables)), ("deferred", POINTER(DeferredUpdate)), ("swaps", POINTER(Swaps)), ("batch", Batch),
        *((name, c_void_p) for name in ("output", "used", "faults")),
        ("ignore_bounds", c_int32), ("num_threads", c_int32),
    ]  # fmt: skip


class Record(ctypes.Structure):
    _fields_ = [("batch", Batch), ("grad", c_void_p)]


class Step(ctypes.Structure):
    _fields_ = [
        *((name, c_double) for name in ("rate", "beta1", "beta2", "eps", "alpha", "keep", "clip", "scale")),
        ("fades", c_void_p), ("num_fades", c_int64), ("step", c_int64),
        *((name, c_int32) for name in ("rule", "fading", "eps_inside_root", "from_start", "moments_decay")),
    ]  # fmt: skip


class UpdateCall(ctypes.Structure):
    _fields_ = [
        ("tables", POINTER(Tables)), ("deferred", POINTER(DeferredUpdate)), ("step", POINTER(Step)),
        ("records", POINTER(Record)), ("num_records", c_int64), ("scratch", c_void_p), ("num_threads", c_int32),
    ]  # fmt: skip


class SwapCall(ctypes.Structure):
    _fields_ = [("batch", Batch), ("swaps", POINTER(Swaps)), ("used", c_void_p), ("num_threads", c_int32)]


class KeepMaskCall(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("keep", "positions", "samples")),
        *((name, c_int64) for name in ("num_samples", "num_positions", "num_quads", "step", "site")),
        *((name, c_uint64) for name in ("threshold", "key0", "key1")),
    ]  # fmt: skip


class IdMap(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("slots", "ids_of", "last_seen", "free", "numbers", "current", "previous")),
        *(
            (name, c_int64)
            for name in ("mask", "shift", "capacity", "admission_threshold", "block_shift", "count_limit")
        ),
    ]


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "rule": (c_int32, [c_char_p]),
    "scratch_new": (c_void_p, []),
    "scratch_free": (None, [c_void_p]),
    "lookup": (None, [POINTER(LookupCall)]),
    "update": (c_int32, [POINTER(UpdateCall)]),
    "squared_norm": (c_int32, [POINTER(UpdateCall), POINTER(c_double)]),
    "swap": (None, [POINTER(SwapCall)]),
    "keep_mask": (None, [POINTER(KeepMaskCall)]),
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

    Calls release the interpreter's lock. Raises RuntimeError where they were not built.
    """
    loaded = ctypes.CDLL(str(library_path()))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, f"evenkeel_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(loaded, name, function)
    return loaded


def rule_number(name: str) -> int:
    """Return the number of an update rule (``embeddings.optim.base.RowOptimizer.rule``).

    Raises:
        ValueError: The compiled kernels have no such rule.
    """
    number: int = library().rule(name.encode())
    if number < 0:
        raise ValueError(
            f"the cpu kernel has no update rule '{name}': add it to src/update.h, or use backend reference"
        )
    return number


def type_number(dtype: torch.dtype) -> int:
    """Return the number of a type of elements (``ElementType`` in src/interface.h).

    Raises:
        ValueError: The compiled kernels have no such type; they would take it for float32.
    """
    known = ELEMENT_TYPES.get(str(dtype).removeprefix("torch."))
    if known is None or known.cpu_number is None:
        raise ValueError(
            f"the cpu kernel has no elements of {dtype}: add them to src/interface.h, src/elements.h and "
            "embeddings/tables/element_types.py, or use backend reference"
        )
    return known.cpu_number
