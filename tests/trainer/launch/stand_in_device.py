"""A device that is none: its tensors hold CPU tensors, and refuse what tensors of a GPU refuse.

They lie on ``standin:i``, are computed with by the CPU's operators, and are no CPU tensors to anybody who asks: not to
numpy, not to an operator that is given one of them and one of the CPU, not to code that looks at ``device``. So what
would break on a GPU because a tensor is not where it should be breaks here. Importing this registers the device for the
whole process: a test does so in a process of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from embeddings.kernels.fbgemm.module import ComputeDevice, EmbeddingLocation, FbgemmModuleKernel, module_of
from embeddings.kernels.layout import Layout, Record
from embeddings.kernels.reference import ReferenceKernel
from tests.support.module_tables import CachedOnHost

NAME = "standin"
_setup_privateuseone_for_python_backend(NAME)
# One for each process, and the first of it whatever the rank's number, as where a process sees its own GPU alone.
DEVICE = torch.device(NAME, 0)

aten = torch.ops.aten
_ACROSS = (aten.copy_.default, aten._to_copy.default)
# A GPU takes these arguments from either side: all but the tensor that is indexed and the values put there.
_INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)


class OnDevice(torch.Tensor):
    """A tensor on DEVICE; ``held`` has its elements."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        return _run(function, arguments, keywords or {})

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu()")

    def tolist(self) -> Any:
        return self.held.tolist()


class StandIn(TorchDispatchMode):
    """Inside, tensors are also made on DEVICE."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return _run(function, arguments, keywords or {})


def _run(function: Any, arguments: Any, keywords: Any) -> Any:
    given = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)]
    there = [leaf for leaf in given if isinstance(leaf, OnDevice)]
    asked = torch.device(keywords["device"]) if keywords.get("device") is not None else None
    if not there and (asked is None or asked.type != NAME):
        return function(*arguments, **keywords)
    if there and function not in _ACROSS:
        together = [arguments[0], *arguments[2:3]] if function in _INDEXING else given
        if any(isinstance(one, torch.Tensor) and not isinstance(one, OnDevice) and one.dim() for one in together):
            raise RuntimeError(f"{function}: expected all tensors to be on {DEVICE}, some are on the CPU")
    plain = tree_map(lambda leaf: leaf.held if isinstance(leaf, OnDevice) else leaf, (arguments, keywords))
    if asked is not None:
        plain[1]["device"] = torch.device("cpu")
    found = function(*plain[0], **plain[1])
    if function is aten.copy_.default:
        return arguments[0]
    if asked is not None and asked.type == "cpu":
        return found.clone() if found is plain[0][0] else found
    # What was written in place is what it was.
    same = {id(leaf.held): leaf for leaf in there}
    return tree_map(lambda leaf: same[id(leaf)] if id(leaf) in same else _put(leaf), found)


def _put(leaf: Any) -> Any:
    return OnDevice(leaf) if isinstance(leaf, torch.Tensor) else leaf


# torch.tensor and factories in C++ get here past every mode.
_library = torch.library.Library("aten", "IMPL")


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return OnDevice(torch.empty(size, dtype=dtype))


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source, target, non_blocking=False):
    held = [one.held if isinstance(one, OnDevice) else one for one in (source, target)]
    held[1].copy_(held[0])
    return target


for _name, _function in (
    ("empty.memory_format", _empty),
    ("empty_strided", _empty_strided),
    ("_copy_from", _copy_from),
):
    _library.impl(_name, _function, "PrivateUse1")


class StandInKernel:
    """The tables' backend there: the reference on what the tensors hold. It takes none that lie elsewhere."""

    def __init__(self, layout: Layout) -> None:
        self.layout, held = layout, copy.copy(layout)
        held.device = torch.device("cpu")
        for name in ("weights", "vectors", "row_values", "last_steps"):
            setattr(held, name, getattr(layout, name).held)
        self._reference = ReferenceKernel(held)

    def forward(self, indices, offsets, weights, batch_size, swaps, idle):
        arguments = (_held(indices), _held(offsets), _held(weights))
        output, used = self._reference.forward(*arguments, batch_size, swaps, idle)
        return OnDevice(output), indices if used is arguments[0] else OnDevice(used)

    def read(self, t, rows, idle):
        return OnDevice(self._reference.read(t, _held(rows), idle))

    def update(self, records, step, idle, scale=1.0):
        self._reference.update(_held_records(records), step, idle, scale)

    def squared_norm(self, records):
        return self._reference.squared_norm(_held_records(records))


class StandInModuleKernel(FbgemmModuleKernel):
    """FBGEMM's module there, as the backend for GPUs uses it, with tables that the device caches."""

    def _build(self) -> Any:
        host = module_of(self.layout, torch.device("cpu"), EmbeddingLocation.HOST, ComputeDevice.CPU)
        return OnDeviceModule(CachedOnHost(host))


class OnDeviceModule:
    """A module of FBGEMM's whose tensors, arguments and output are on the device."""

    def __init__(self, held: CachedOnHost) -> None:
        self._held = held
        self._anchor = torch.zeros((), requires_grad=True)

    def __getattr__(self, name: str) -> Any:
        return _put(getattr(self._held, name))

    def __call__(self, *arguments: torch.Tensor) -> torch.Tensor:
        return _ThroughModule.apply(self._anchor, self._held, *map(_held, arguments))


class _ThroughModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, module, *arguments):
        with torch.enable_grad():
            ctx.output = module(*arguments)
        return OnDevice(ctx.output.detach())

    @staticmethod
    def backward(ctx, grad):
        ctx.output.backward(_held(grad.contiguous()))
        return None, None, None, None, None


def _held(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    assert isinstance(tensor, OnDevice), f"a tensor of {tuple(tensor.shape)} is on {tensor.device}"
    return tensor.held


def _held_records(records: Sequence[Record]) -> list[Record]:
    return [Record(*map(_held, record)) for record in records]
