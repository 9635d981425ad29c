"""A row optimizer that is written elsewhere: the reference trains it at once, kernels that lack its rule say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from embeddings import EmbeddingTables, TableConfig
from embeddings.optim import RowOptimizer
from embeddings.optim.base import TouchedRows

TABLES = [TableConfig("a", 4, 8, ("a",))]


@dataclass(frozen=True)
class SignDescent(RowOptimizer):
    """theta <- theta - eta sign(sum of all gradients)."""

    rule: ClassVar[str] = "sign"
    state_names: ClassVar[tuple[str, ...]] = ("total", "last_update_step")

    def apply_rule(self, rows: TouchedRows) -> None:
        rows.state["total"] = rows.state["total"] + rows.grad
        rows.theta = rows.theta - rows.rate * rows.state["total"].sign()


def test_the_reference_needs_the_class_alone():
    tables = EmbeddingTables(TABLES, SignDescent(learning_rate=0.5), backend="reference")
    before = tables.read("a").clone()
    gradient = torch.tensor([[3.0, -1.0, 0.0, 2.0, -5.0, 1.0, 1.0, -1.0]])
    for step, sign in ((1, 1.0), (2, -2.0)):
        (tables(torch.tensor([2]), torch.tensor([0, 1])) * sign * gradient).sum().backward()
        tables.step(step)
    expected = before.clone()
    expected[2] += -0.5 * gradient[0].sign() + 0.5 * gradient[0].sign()
    torch.testing.assert_close(tables.read("a"), expected)
    torch.testing.assert_close(tables.state("a")["total"][2], -gradient[0])


def test_a_kernel_without_the_rule_names_the_remedy():
    with pytest.raises(ValueError, match=r"no update rule 'sign': add it to src/update\.h"):
        EmbeddingTables(TABLES, SignDescent(), backend="cpu")


def test_triton_without_the_rule_names_the_remedy():
    rules = pytest.importorskip("embeddings.kernels.triton.rules")
    with pytest.raises(ValueError, match="triton kernel has no update rule 'sign'"):
        rules.rule_number("sign")
    assert rules.rule_number("rowwise_adam") == rules.ADAM
