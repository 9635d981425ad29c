"""Rows that another optimizer, schedule or dtype trained are not taken over, because idle rows would change meaning."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import trainer.checkpoint.row_signature as row_signature_module
from embeddings.optim import SGD, Adagrad, AdagradAR, Adam, AdamAR, AdamW, RMSprop, RMSpropAR, RowwiseAdam
from embeddings.optim.lr_schedules import Constant, Cosine, LinearWarmup, StepDecay
from embeddings.sharding import TableSettings
from embeddings.tables.config import TableConfig
from trainer.checkpoint.format import Checkpoint, CheckpointError
from trainer.checkpoint.row_signature import deferred_update_fields, differences, row_signature
from trainer.launch.on_host import single_rank_group
from trainer.spec.optimizer import Optimizer

TABLE = TableConfig("item", 9, 4, ("item",))


def signature(optimizer, steps=7, **settings):
    found = row_signature(TableSettings({"item": TABLE}, optimizer, {}, **settings), steps)
    return json.loads(json.dumps(found, allow_nan=False))


COSINE = Cosine(decay_steps=10)


@dataclass(frozen=True)
class Waning(AdagradAR):
    """An optimizer of another package, with a setting of its own."""

    power: float = 2.0


@pytest.mark.parametrize(
    ("trained", "now", "resume", "warm"),
    [
        (SGD(0.1), SGD(0.1), [], []),
        (SGD(0.1), SGD(0.2), ["learning_rate", "rate_sum"], []),
        (SGD(0.1), Adagrad(0.1), ["optimizer"], ["optimizer"]),
        (Adagrad(0.1), Adagrad(0.1, eps=1e-3), ["eps"], []),
        (Adagrad(0.1, weight_decay=0.1), Adagrad(0.1, weight_decay=0.2), ["weight_decay"], ["weight_decay"]),
        (Adagrad(0.1, weight_decay=0.1), Adagrad(0.1), ["weight_decay"], ["decay_log_sum"]),
        (Waning(0.1, alpha=1e-3), Waning(0.1, alpha=1e-3, power=3.0), ["power"], ["power"]),
        (AdagradAR(0.1, alpha=1e-3), AdagradAR(0.2, alpha=1e-3), ["learning_rate"], []),
        (AdagradAR(0.1, alpha=1e-3), AdagradAR(0.1, alpha=1e-4), ["alpha"], ["alpha"]),
        (Adam(moments="lazy"), Adam(0.5, moments="lazy", beta1=0.5), ["learning_rate", "beta1"], []),
        (Adam(), Adam(0.5), ["learning_rate"], ["learning_rate"]),
        (Adam(), Adam(schedule=COSINE), ["schedule", "rate_sum"], ["schedule", "rate_sum"]),
        (Adam(), Adam(moments="lazy"), ["moments", "ahead"], ["moments", "ahead"]),
        (AdamW(moments="lazy"), AdamW(schedule=COSINE, moments="lazy"), ["schedule"], ["schedule", "decay_log_sum"]),
        (AdamAR(alpha=1e-3), AdamAR(alpha=1e-3, first_touch="literal"), ["first_touch"], ["first_touch"]),
        (AdamAR(alpha=1e-3), AdamAR(alpha=1e-3, beta2=0.99), ["beta2"], ["beta2"]),
        (AdamAR(alpha=1e-3, clip_row_norm=1.0), AdamAR(alpha=1e-3), ["clip_row_norm"], []),
        (RMSprop(), RMSprop(0.1, beta2=0.9), ["learning_rate", "beta2"], []),
        (RMSprop(), RMSprop(moments="lazy"), ["moments"], ["moments"]),
        (RMSpropAR(), RMSpropAR(alpha=1e-3), ["alpha"], ["alpha"]),
        (Adam(), RowwiseAdam(), ["optimizer"], ["optimizer"]),
        (RowwiseAdam(), RowwiseAdam(0.5), ["learning_rate"], ["learning_rate"]),
    ],
)
def test_what_a_resume_and_a_warm_start_may_change(trained, now, resume, warm):
    told = differences(signature(trained), signature(now))
    assert all(any(line.startswith(f"{name} (") for line in told) for name in resume), told
    assert bool(told) == bool(resume)
    told = differences(signature(trained), signature(now), deferred_update_fields(now))
    assert all(any(line.startswith(f"{name} (") for line in told) for name in warm), told
    assert bool(told) == bool(warm)


def test_sums_are_those_of_the_completed_steps():
    optimizer = AdamW(0.1, weight_decay=0.5, schedule=LinearWarmup(4))
    found = signature(optimizer, steps=6)
    rates = [0.0, 0.025, 0.05, 0.075, 0.1, 0.1]
    assert found["rate_sum"] == pytest.approx(sum(rates), rel=1e-12)
    product = 1.0
    for rate in rates:
        product *= 1.0 - 0.5 * rate
    assert found["decay_log_sum"] == pytest.approx(float(torch.tensor(product, dtype=torch.float64).log()), rel=1e-12)
    # The last digit of a sum of logarithms is no other optimizer.
    other = {**found, "decay_log_sum": found["decay_log_sum"] * (1 + 1e-13)}
    assert differences(found, other) == []
    assert len(differences(found, {**found, "decay_log_sum": found["decay_log_sum"] * (1 + 1e-6)})) == 1
    assert differences(None, found) == []


@pytest.mark.parametrize(
    "schedule", [Constant(), LinearWarmup(4), COSINE, Cosine(5, decay_steps=10), StepDecay(3, every_steps=4)]
)
def test_sums_of_a_long_run_are_those_of_its_steps(schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_signature_module, "_BLOCK", 4)
    optimizer = AdamW(0.1, weight_decay=0.5, schedule=schedule)
    for steps in (0, 1, 4, 5, 11, 12, 40):
        rates = optimizer.rates(np.arange(1, steps + 1))
        found = signature(optimizer, steps)
        assert found["rate_sum"] == pytest.approx(rates.sum(), rel=1e-12)
        assert found["decay_log_sum"] == pytest.approx(np.log1p(-0.5 * rates).sum(), rel=1e-12)


def test_no_memory_grows_with_the_steps() -> None:
    found = signature(AdamW(0.1, weight_decay=0.5, schedule=LinearWarmup(4)), 10**15)
    assert found["rate_sum"] == pytest.approx(1e14)


def test_a_setting_with_a_newer_name_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found, optimizer = signature(Adam(0.1)), Adam(0.1, beta1=0.5)
    older = {"momentum" if name == "beta1" else name: value for name, value in found.items()}
    assert differences(older, found) != []
    monkeypatch.setattr(Optimizer, "old_names", {"momentum": "beta1"})
    assert differences(older, found) == []
    assert [told.partition(" ")[0] for told in differences(older, signature(optimizer))] == ["beta1"]


def test_dtypes_are_part_of_it():
    half = signature(SGD(0.1), dtype=torch.bfloat16)
    assert (half["dtype"], half["state_dtype"]) == ("torch.bfloat16", "torch.float32")
    assert len(differences(signature(SGD(0.1)), half, deferred_update_fields(SGD(0.1)))) == 1
    assert differences(signature(SGD(0.1)), signature(SGD(0.1), state_dtype=torch.float32)) == []


class Model(torch.nn.Module):
    def __init__(self):
        from trainer.distributed.sharded_model import embedding_bag_collection

        super().__init__()
        self.embeddings = embedding_bag_collection([TABLE])


def test_a_model_with_another_optimizer_does_not_load(tmp_path):
    from trainer.distributed.sharded_model import shard_model

    def make(optimizer, **settings):
        return shard_model(Model(), TableSettings.of([TABLE], optimizer, backend="reference", **settings))

    with single_rank_group():
        path = make(Adam(0.1)).save(tmp_path)
        make(Adam(0.1)).load_from(Checkpoint(path))
        # A warm start, that of every row.
        parents = {"item": torch.arange(9)}
        for keywords in ({}, {"parent_rows": parents}):
            with pytest.raises(
                CheckpointError, match=r"another learning_rate \(0.1, the model has 0.2\).*use the same"
            ):
                make(Adam(0.2)).load_from(Checkpoint(path), **keywords)
            with pytest.raises(CheckpointError, match=r"another dtype \(torch.float32, the model has torch.float64\)"):
                make(Adam(0.1), dtype=torch.float64).load_from(Checkpoint(path), **keywords)
