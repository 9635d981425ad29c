"""The loop: nothing of a bad step is applied on any rank, metrics are exact, and stopping anywhere changes no bit."""

from __future__ import annotations

import itertools
import math
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.support.gathered import gather_table
from tests.trainer.trainings import differ, snapshot, train_in_parts, trainer_of
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import choose_alpha, default_alpha
from trainer.launch.on_host import single_rank_group
from trainer.launch.worker import use_threads
from trainer.metrics import auc, logloss
from trainer.runs.directory import read_run
from trainer.runs.failures import Cancelled, NonFiniteError
from trainer.runs.starvation import Use
from trainer.training.hooks import Hooks, Resumed
from trainer.training.loop import PROGRESS_SECONDS


@pytest.fixture(scope="module", autouse=True)
def group():
    use_threads(1)
    with single_rank_group():
        yield


@pytest.fixture
def data(make_run):
    run = make_run()
    return prepare(run.dataset, run.job, run.data)


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_every_epoch_is_evaluated_exactly(data, small):
    told = []
    trainer = trainer_of(small.job(), data, hooks=Hooks(lambda kind, **fields: told.append((kind, fields))))
    trainer.train()
    metrics = [fields for kind, fields in told if kind == "metric"]
    assert [(m["epoch"], m["split"]) for m in metrics] == [
        (epoch, split) for epoch in (1, 2) for split in ("train", "validation", "test")
    ]
    assert metrics == trainer.history
    trainer.sharded.eval()
    with torch.no_grad():
        batches = list(data.eval_batches("test", 50))
        logits = np.concatenate([trainer.sharded.module(batch.features).double().numpy() for batch in batches])
        labels = np.concatenate([batch.labels.numpy() for batch in batches])
    assert metrics[-1]["auc"] == auc(logits, labels)
    assert metrics[-1]["logloss"] == pytest.approx(logloss(logits, labels), rel=1e-12)
    assert metrics[-1]["examples"] == data.num_examples["test"]
    assert metrics[-1]["auc"] > 0.75  # it learned: the pattern is there to be found


def test_train_loss_is_the_mean_over_each_epoch(data, small):
    trainer = trainer_of(small.job(epochs=2), data)
    batches = []
    loss_of = trainer.sharded.module.loss

    def loss(batch):
        values = loss_of(batch)
        batches.append(values.detach().double())
        return values

    trainer.sharded.module.loss = loss
    trainer.train()
    told = [metric["loss"] for metric in trainer.history if metric["split"] == "train"]
    for epoch in (0, 1):
        losses = torch.cat(batches[epoch * data.steps_per_epoch : (epoch + 1) * data.steps_per_epoch])
        assert len(losses) == data.num_examples["train"]  # the uneven last batch too
        assert told[epoch] == pytest.approx(float(losses.mean()), rel=1e-6)


# Logits that are large, and random still.
WILD = {
    "optimizer": {"kind": "adam", "learning_rate": 1e-6},
    "model": {"kind": "dnn", "hidden": [8], "embedding_dim": 4, "init": {"kind": "normal", "std": 2.0}},
    "sse": {},
    "epochs": 2,
}


@pytest.mark.parametrize(
    ("settings", "is_told"), [(WILD, True), (WILD | {"output_calibration": "isotonic"}, False), ({}, False)],
    ids=["worse than a constant", "calibrated", "better than a constant"],
)  # fmt: skip
def test_probabilities_worse_than_a_constant_are_told_once(data, small, settings, is_told):
    told = []
    trainer = trainer_of(small.job(**settings), data, hooks=Hooks(lambda kind, **fields: told.append((kind, fields))))
    trainer.train()
    labels = np.concatenate([batch.labels.numpy() for batch in data.eval_batches("validation", 4096)])
    of_constant = logloss(np.full(len(labels), np.log(labels.mean() / (1 - labels.mean()))), labels)
    last = [row for row in trainer.history if row["split"] == "validation"][-1]
    assert (last["logloss"] > of_constant) == ("model" in settings)
    notes = [fields["message"] for kind, fields in told if kind == "info" and "probabilities" in fields["message"]]
    assert len(notes) == is_told
    for note in notes:
        assert f"{last['logloss']:.4f} after epoch 2, and {of_constant:.4f} if" in note


def test_evaluation_changes_nothing(data, small):
    trainer = trainer_of(small.job(), data)
    trainer.sharded.train()
    for parts, _ in zip(trainer.batches(), range(7), strict=False):
        trainer.train_step(parts)
    before = snapshot(trainer)
    first = trainer.evaluate("validation")
    assert trainer.evaluate("validation") == first
    assert differ(snapshot(trainer), before) == []


def test_progress_is_told_sparingly_and_at_the_end(data, small, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("trainer.training.loop.time", SimpleNamespace(monotonic=lambda: clock.now))
    told = []

    def emit(kind, **fields):
        if kind == "progress":
            told.append((clock.now, fields))
        elif kind == "metric" and fields["split"] == "train":
            epoch_losses.append(fields["loss"])

    epoch_losses = []
    trainer = trainer_of(small.job(), data, hooks=Hooks(emit))
    step = trainer.train_step

    def slow_step(parts):
        clock.now += 0.3
        step(parts)

    trainer.train_step = slow_step
    trainer.train()
    times = [at for at, _ in told]
    assert told[0][1]["step"] == 1, "the first step is told of at once"
    assert all(b - a >= PROGRESS_SECONDS for a, b in itertools.pairwise(times[:-1]))
    last = told[-1][1]
    assert (last["step"], last["epoch"], last["epochs"]) == (2 * data.steps_per_epoch, 2, 2)
    assert last["examples"] == 2 * data.num_examples["train"]
    assert told[1][1]["examples_per_second"] == pytest.approx(96 / 0.3, rel=0.01)
    assert told[1][1]["step_seconds"] == pytest.approx(0.3, rel=0.01)
    assert last["loss"] == epoch_losses[-1]


def test_waiting_for_batches_is_counted(data, small, monkeypatch):
    """Each batch takes 2 seconds to come, 25 of them an epoch; the next epoch's reader begins before this one's end."""
    clock, begun, told = SimpleNamespace(now=0.0), [], []
    monkeypatch.setattr("trainer.training.loop.time", SimpleNamespace(monotonic=lambda: clock.now))

    class Slow:
        def __init__(self, *arguments):
            begun.append((arguments[0], trainer.position.step))
            self.batches = data.train_batches(*arguments)

        def __iter__(self):
            return self

        def __next__(self):
            found = next(self.batches)
            clock.now += 2.0
            return found

    trainer = trainer_of(
        small.job(), data, hooks=Hooks(lambda kind, **fields: told.append(fields.get("waited_seconds")))
    )
    trainer.data = SimpleNamespace(**{**vars(data), "train_batches": Slow})
    trainer.train()
    steps = data.steps_per_epoch
    assert trainer.waited_seconds == max(filter(None, told)) == 2.0 * 2 * steps
    assert begun == [(0, 0), (1, steps - 1)]


def test_the_processor_time_that_a_rank_lacks_is_told(data, small, monkeypatch):
    """That of the rank that lacks most, whichever it is; processors and memory are of all ranks."""
    use = Use(0.25, 1.5, 4096)
    monkeypatch.setattr("trainer.training.loop.Starvation.use", lambda self: use)
    told = []
    trainer = trainer_of(
        small.job(), data, hooks=Hooks(lambda kind, **fields: told.append(fields) if kind == "progress" else None)
    )
    trainer.train()
    assert {(one["starved"], one["cores"], one["memory_bytes"]) for one in told} == {use}
    use = Use()
    trainer._agree(1, 0.5)
    trainer._told_examples = 0
    trainer.log_progress()
    assert not {"cores", "memory_bytes"} & told[-1].keys()  # unknown
    use = Use(0.25, 1.5, 4096)
    trainer.world_size = 2

    def with_another(name, sent):
        other = torch.zeros_like(sent)
        other[4:6] = torch.tensor([2.0, 1000.0])
        other[7] = lacking
        return sent + other

    monkeypatch.setattr("trainer.training.loop.all_reduce", with_another)
    for lacking in (0.7, 0.1):
        assert trainer._agree(1, 0.5) == (0.5, 0.0)
        assert trainer.starved == max(lacking, 0.25)
        assert (trainer.cores, trainer.memory_bytes) == (3.5, 5096)
        assert (trainer.stop_asked, trainer.save_asked) == (False, False)


@pytest.mark.parametrize("stop_at", [3, 24, 25, 40])
def test_no_reader_outlives_training(data, small, stop_at):
    """Whether it is cancelled inside an epoch, at its last step, when the next one's reader has begun, or ends."""
    reason = ["later"]
    trainer = trainer_of(
        small.job(),
        data,
        hooks=Hooks(should_stop=lambda: reason[0] if trainer.position.step + 1 == stop_at else None),
    )
    with pytest.raises(Cancelled):
        trainer.train()
    assert trainer.position.step == stop_at
    assert not [thread for thread in threading.enumerate() if thread.name == "evenkeel-batches"]


# --- a step on all ranks or on none ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("poison", "named"),
    [("item", "table item"), ("tower.0.weight", "parameter tower.0.weight"), ("label", "loss")],
)
def test_a_step_that_is_not_finite_is_not_applied(data, small, poison, named):
    trainer = trainer_of(small.job(), data)
    trainer.sharded.train()
    batches = trainer.batches()
    for _ in range(3):
        trainer.train_step(next(batches))
    (batch,) = next(batches)
    if poison == "item":
        poison_gradient(trainer.sharded.module.embeddings, "item")
    elif poison == "label":
        batch.labels[0] = math.nan
    else:
        parameter = dict(trainer.sharded.dense_parameters())[poison]
        parameter.register_hook(lambda gradient: gradient * math.inf)
    before = snapshot(trainer)
    with pytest.raises(NonFiniteError, match="step 4") as caught:
        trainer.train_step((batch,))
    assert named in caught.value.names
    assert poison == "label" or len(caught.value.names) == 1
    assert differ(snapshot(trainer), before) == []
    assert trainer.position.step == 3
    assert trainer.sharded.completed_steps == 3


def poison_gradient(embeddings: Any, feature: str) -> None:
    """From here on, the gradient of this feature's pooled rows is infinite; nothing else is."""
    forward = embeddings.forward

    def poisoned(features):
        pooled = forward(features)
        keys, lengths = pooled.keys(), pooled.length_per_key()
        start = sum(lengths[: keys.index(feature)])
        columns = torch.zeros(sum(lengths))
        columns[start : start + lengths[keys.index(feature)]] = math.inf
        pooled.values().register_hook(lambda gradient: torch.where(columns > 0, columns, gradient))
        return pooled

    embeddings.forward = poisoned


def test_training_goes_on_after_a_discarded_step(data, small):
    """What the bad step recorded is gone: the good one gives what it would have given."""
    outcomes = []
    for fail in (False, True):
        trainer = trainer_of(small.job(), data)
        trainer.sharded.train()
        (batch,) = next(trainer.batches())
        if fail:
            label = float(batch.labels[0])
            batch.labels[0] = math.nan
            with pytest.raises(NonFiniteError):
                trainer.train_step((batch,))
            batch.labels[0] = label
        trainer.train_step((batch,))
        outcomes.append(snapshot(trainer))
    assert differ(*outcomes) == []


def poisoned_on_one_rank(directory: str, which: int) -> dict:
    """Rank ``which`` alone gets a NaN label."""
    use_threads(1)
    run = read_run(directory)
    data = PreparedData.open(run.data)
    trainer = trainer_of(run.job, data)
    trainer.sharded.train()
    batches = trainer.batches()
    for _ in range(2):
        trainer.train_step(next(batches))
    before = snapshot(trainer)
    (batch,) = next(batches)
    if dist.get_rank() == which:
        batch.labels[0] = math.nan
    try:
        trainer.train_step((batch,))
    except NonFiniteError as error:
        after = snapshot(trainer)
        same = all(torch.equal(before[name], after[name]) for name in before)
        return {"step": error.step, "names": error.names, "same": same, "steps": trainer.sharded.completed_steps}
    return {"raised": False}


@pytest.mark.parametrize("which", [0, 1])
def test_all_ranks_refuse_what_one_rank_cannot_take(make_run, ranks, which):
    run = make_run(sharding={"item": "row_wise", "user": "table_wise"})
    prepare(run.dataset, run.job, run.data)
    told = ranks(2).run(poisoned_on_one_rank, str(run.directory), which)
    for answer in told:
        assert answer["step"] == 3
        assert "loss" in answer["names"]
        assert answer["same"]
        assert answer["steps"] == 2


# --- stopping and going on -------------------------------------------------------------------------------------------


WARM = {"kind": "cosine", "warmup_steps": 10, "decay_steps": 30}


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        {"kind": "adam_ar", "decay": "at_read"},
        {"kind": "adam_ar", "alpha": 0.001},
        {"kind": "adam", "schedule": {"kind": "step", "every_steps": 9, "gamma": 0.7}},
        {"kind": "adamw", "weight_decay": 0.05, "schedule": WARM, "clip_norm": 0.2},
        {"kind": "adagrad"},
        {"kind": "adagrad_ar", "schedule": WARM, "clip_row_norm": 0.01},
        {"kind": "sgd", "schedule": WARM},
        {"kind": "rmsprop", "schedule": WARM},
        {"kind": "rmsprop_ar", "clip_norm": 0.2},
        {"kind": "rowwise_adam", "schedule": WARM, "clip_row_norm": 0.01},
        {"kind": "rowwise_adam_ar"},
    ],
    ids=lambda optimizer: "-".join((optimizer["kind"], *filter(None, [optimizer.get("decay")]))),
)
def test_stopping_and_resuming_changes_no_bit(data, small, tmp_path, optimizer):
    job = small.job(
        optimizer={"learning_rate": 0.05, **optimizer},
        dense_optimizer={"kind": "adam", "learning_rate": 0.02, "schedule": optimizer.get("schedule", {})},
        micro_batches=2 if "schedule" in optimizer else 1,
    )
    spe = data.steps_per_epoch
    whole, _ = train_in_parts(job, data, tmp_path / "whole", [])
    # In the middle, right after a start, at an epoch's end (before it was evaluated elsewhere), and one step before it.
    cuts = [7, 8, spe - 1, spe, spe + 9]
    parts, starts = train_in_parts(job, data, tmp_path / "parts", cuts)
    assert starts == [0, *cuts]
    assert differ(snapshot(parts), snapshot(whole)) == []
    assert parts.history == whole.history


def test_a_row_that_idles_across_the_cut_decays_as_if_there_were_none(make_run, small, tmp_path):
    run = make_run(uri=small.write_rows(tmp_path / "rare.parquet", num_items=3000))
    data = prepare(run.dataset, run.job, run.data)
    job = small.job(
        optimizer={"kind": "adam_ar", "learning_rate": 0.05, "alpha": 0.001, "decay": "at_read"}, sse={}, epochs=1
    )
    whole, _ = train_in_parts(job, data, tmp_path / "whole", [])
    parts, _ = train_in_parts(job, data, tmp_path / "parts", [15])
    last = next(shard for shard in parts.sharded.state_for_checkpoint()[0] if shard.name == "item").state[
        "last_update_step"
    ]
    idle = ((last > 0) & (last <= 15)).nonzero()[:, 0]
    assert len(idle) > 0  # or this test shows nothing
    rows = [gather_table(trainer.sharded, "item").rows for trainer in (whole, parts)]
    assert torch.equal(*rows)
    undecayed = gather_table(parts.sharded, "item", decay=False).rows
    assert bool((rows[1][idle].norm(dim=1) < undecayed[idle].norm(dim=1)).all())


def test_the_last_checkpoint_is_written_once(data, small, tmp_path):
    saved = []
    trainer = trainer_of(small.job(), data, hooks=Hooks(save=lambda trainer: saved.append(trainer.position.step)))
    trainer.train()
    steps = 2 * data.steps_per_epoch
    assert saved == [*range(10, steps, 10), steps]
    again = trainer_of(
        small.job(), data, resumed=Resumed(trainer.position), hooks=Hooks(save=lambda trainer: saved.append("again"))
    )
    again.train()
    assert "again" not in saved


# --- alpha -----------------------------------------------------------------------------------------------------------


def test_default_alpha_halves_an_idle_row_in_three_tenths_of_an_epoch(small):
    alpha = default_alpha(1000)
    assert alpha == 1.4 / 300**2
    kept = np.prod(1 - np.minimum(1, alpha * np.arange(300)))
    assert kept == pytest.approx(0.5, abs=0.01)
    job = small.job(optimizer={"kind": "adam_ar", "alpha": "default", "decay": "at_read"})
    assert choose_alpha(job, 1000) == alpha
    assert choose_alpha(small.job(), 1000) == 0.003
    assert choose_alpha(small.job(optimizer={"kind": "adam"}), 1000) is None
    assert choose_alpha(small.job(optimizer={}), 1000) == 1.4 / 500**2


def test_decay_by_epoch_is_adam_in_the_first_epoch_and_not_after_it(data, small):
    """By the losses; an epoch's steps are the data's. Rows are stored otherwise, so to float32's rounding."""
    plain, by_epoch = (
        small.job(optimizer={"kind": kind, "learning_rate": 0.05, **more}, epochs=2)
        for kind, more in (("adam", {}), ("adam_ar", {"alpha": 0.001, "decay": "by_epoch"}))
    )
    trainers = [trainer_of(job, data) for job in (plain, by_epoch)]
    for trainer in trainers:
        trainer.train()
    losses = [
        [m.get("loss", m.get("logloss")) for m in trainer.history if m["epoch"] == epoch]
        for epoch in (1, 2)
        for trainer in trainers
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert abs(losses[2][0] - losses[3][0]) > 0.001


def test_bpr_and_dnn_train_through_the_same_loop(make_run, small):
    for kind, optimizer in (("bpr", "adam_ar"), ("dnn", "adam")):
        run = make_run(
            kind,
            model={"kind": kind, "loss": "bce", "embedding_dim": 4},
            optimizer={"kind": optimizer, "learning_rate": 0.05},
        )
        data = prepare(run.dataset, run.job, run.data)
        trainer = trainer_of(run.job, data)
        trainer.train()
        losses = [metric["loss"] for metric in trainer.history if metric["split"] == "train"]
        assert losses[1] < losses[0] < math.log(2), kind
        assert trainer.history[-1]["auc"] > 0.5, kind


def test_scores_that_are_no_probabilities_are_not_told_of(make_run, small):
    model = {"kind": "bpr", "loss": "bpr", "embedding_dim": 4, "init": {"kind": "normal", "std": 2.0}}
    metrics = {"split": {"kind": "random"}, "metrics": ["auc", "logloss"]}
    run = make_run("pairs", model=model, optimizer=WILD["optimizer"], sse={}, epochs=1, evaluation=metrics)
    told = []
    hooks = Hooks(lambda kind, **fields: told.append(str(fields.get("message"))))
    trainer = trainer_of(run.job, prepare(run.dataset, run.job, run.data), hooks=hooks)
    trainer.train()
    assert trainer.history[-1]["logloss"] > math.log(2)
    assert [message for message in told if "probabilities" in message] == []


def test_bpr_from_zero_is_refused(make_run):
    with pytest.raises(ValueError, match="hash or normal"):
        make_run(model={"kind": "bpr", "loss": "bpr", "embedding_dim": 4, "init": {"kind": "zero"}})
