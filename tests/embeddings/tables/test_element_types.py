"""One table of element types: what torch, the compiled kernels' source and jobs say of each is the same."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from embeddings.kernels.cpu.library import type_number
from embeddings.kernels.layout import Layout
from embeddings.optim import SGD
from embeddings.tables.config import TableConfig
from embeddings.tables.element_types import COMPUTE_TYPE, ELEMENT_TYPES, JOB_TYPES, ElementType


@pytest.mark.parametrize("element", ELEMENT_TYPES.values(), ids=list(ELEMENT_TYPES))
def test_torch_agrees(element: ElementType) -> None:
    dtype = getattr(torch, element.name)
    assert dtype.itemsize == element.num_bytes
    assert element.compute in ELEMENT_TYPES
    # A usual mean of squares, of gradients around 1e-4.
    assert bool(torch.tensor(1e-8, dtype=torch.float64).to(dtype)) == element.holds_mean_squares


def test_the_compiled_kernels_have_them_all() -> None:
    assert [type_number(getattr(torch, name)) for name in ELEMENT_TYPES] == [0, 1, 2, 3]


def test_what_the_compiled_kernels_lack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type_number(torch.bfloat16) == 3
    with pytest.raises(
        ValueError, match=r"no elements of torch\.int8: add them to src/elements\.h.*or use backend ref"
    ):
        type_number(torch.int8)
    monkeypatch.setitem(ELEMENT_TYPES, "float8_e5m2", ElementType(name="float8_e5m2", num_bytes=1))
    with pytest.raises(ValueError, match=r"no elements of torch\.float8_e5m2"):
        type_number(torch.float8_e5m2)


def test_a_layout_refuses_what_a_kernel_would_misread() -> None:
    with pytest.raises(ValueError, match=r"state_dtype torch\.float64 does not go with rows of torch\.float32"):
        Layout([TableConfig("a", 5, 2, ("x",))], SGD(), 0, torch.float32, state_dtype=torch.float64)


def test_a_type_of_state_alone_is_refused_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ELEMENT_TYPES, "bfloat16", replace(ELEMENT_TYPES["bfloat16"], in_rows=False))
    Layout([TableConfig("a", 5, 2, ("x",))], SGD(), 0, torch.float32, state_dtype=torch.bfloat16)
    known = re.escape("torch.float64, torch.float32, torch.float16, not torch.bfloat16")
    with pytest.raises(ValueError, match=rf"^dtype must be one of {known}$"):
        Layout([TableConfig("a", 5, 2, ("x",))], SGD(), 0, torch.bfloat16)


def test_jobs_may_ask_for_what_is_computed_in_the_type_of_jobs() -> None:
    assert {ELEMENT_TYPES[name].compute for name in JOB_TYPES} == {COMPUTE_TYPE}
    assert np.dtype(COMPUTE_TYPE).itemsize == 4, "trainer.sizing.memory counts activations as it counts rows"
