"""Checks of row optimizers by frequency bucket. Torch-free.

A part of trainer.spec.checks.supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from embeddings.optim.registry import KINDS, kinds_that_take
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.job import JobSpec
    from trainer.spec.optimizer import FrequencyRule, Optimizer


def by_frequency_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield what of ``optimizer.by_frequency`` has no meaning, or does not go with the rest of the job."""
    rules, where = spec.optimizer.by_frequency, "optimizer.by_frequency"
    if not rules:
        return
    named = [bucket for rule in rules for bucket in rule.buckets]
    twice = sorted({bucket for bucket in named if named.count(bucket) > 1})
    if twice:
        yield FieldProblem(where, f"bucket {twice[0]} is named twice", "name each bucket once")
    for number, rule in enumerate(rules):
        yield from _rule_problems(f"{where}.{number}", spec.optimizer, rule)
    if spec.dataset.one_pass or any(table.capacity is not None for table in spec.tables.values()):
        why = "buckets are of rows that are counted before training, which one_pass and dynamic tables do not do"
        yield FieldProblem(where, why, "leave dataset.one_pass and tables.NAME.capacity out, or by_frequency")
    if spec.kernel == "fbgemm":
        yield FieldProblem(where, "fbgemm has one optimizer for a table", "use kernel evenkeel, or leave it out")
    if spec.regularizers.sam is not None:
        yield FieldProblem(where, "regularizers.sam moves the rows of one optimizer", "leave one of them out")


def _rule_problems(where: str, optimizer: Optimizer, rule: FrequencyRule) -> Iterator[FieldProblem]:
    kind, first = KINDS[rule.kind], KINDS[optimizer.kind].optimizer
    alike = [name for name, one in KINDS.items() if _keeps(one.optimizer) == _keeps(first)]
    if rule.kind not in alike:
        why = f"{rule.kind} keeps another state than {optimizer.kind}"
        yield FieldProblem(f"{where}.kind", why, f"use one of {', '.join(alike)}")
    if rule.weight_decay and not kind.takes("weight_decay"):
        decaying = ", ".join(kinds_that_take("weight_decay"))
        yield FieldProblem(f"{where}.weight_decay", f"{rule.kind} has none", f"use one of {decaying}, or leave it out")
    if not rule.weight_decay and kind.takes("weight_decay"):
        plain = rule.kind.removesuffix("w")
        yield FieldProblem(f"{where}.weight_decay", f"{rule.kind} is {plain} with it", "set it, such as to 0.01")
    if rule.alpha is not None and not kind.takes("alpha"):
        adaptive = ", ".join(kinds_that_take("alpha"))
        yield FieldProblem(f"{where}.alpha", f"{rule.kind} has none", f"use one of {adaptive}, or leave it out")
    if rule.alpha is None and kind.takes("alpha") and not KINDS[optimizer.kind].takes("alpha"):
        why = f"optimizer.kind {optimizer.kind} has none that it could be"
        yield FieldProblem(f"{where}.alpha", why, "give a number")


def _keeps(optimizer: type) -> tuple[str, ...]:
    """Return what says how an optimizer's rows and state lie and move but for their decay."""
    return optimizer.rule, *optimizer.state_names, *optimizer.row_state_names  # type: ignore[attr-defined]
