"""Regularizers as options of a job: what each does to a step, for any ranks, cuts of a batch and resumes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from embeddings.sharding.sharded import ModelTables
from tests.trainer.trainings import differ, snapshot, train_in_parts
from trainer.checkpoint.format import latest_valid
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build, choose_alpha
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.launch.worker import use_threads
from trainer.publishing.publish import item_vectors
from trainer.runs.directory import read_run
from trainer.runs.failures import NonFiniteError
from trainer.sizing.memory import rank_memory
from trainer.spec import JobSpec, SpecError
from trainer.spec.regularizers import Sam
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.loop import Trainer
from trainer.training.regularizers.sam import ascended, gradient_squared_norm

pytestmark = pytest.mark.slow

NUM_ROWS = {"user": 62, "item": 122}
BATCH_SIZE = 598  # five steps an epoch of 2393 samples, of which the last has one
DNN = {"kind": "dnn", "embedding_dim": 4, "hidden": [8, 6], "init": {"kind": "normal", "std": 0.5}}
SSE = {feature: {"probability": 0.2} for feature in ("item", "user", "label")}
ALGORITHM_2 = {"masks": 0, "explicit": "output_hessian", "noise": "approximate"}
REGULARIZERS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.3},
    "dropout of rows": {"dropout": 0.3, "dropout_layers": "both"},
    "algorithm 4": {"dropout": 0.3, "dropout_method": {"masks": 3, "noise": "approximate"}},
    "exact noise": {"dropout": 0.3, "dropout_method": {"masks": 2, "noise": "exact"}},
    "algorithm 2": {"dropout": 0.3, "dropout_method": ALGORITHM_2, "dropout_layers": "both"},
    "algorithm 3": {"dropout": 0.3, "dropout_method": {**ALGORITHM_2, "label_samples": 2, "coefficient": "taylor"}},
    "loss jacobian": {"dropout": 0.3, "dropout_method": {"masks": 0, "explicit": "loss_jacobian"}},
    "identity": {"dropout": 0.3, "dropout_method": {"masks": 0, "explicit": "identity", "noise": "exact"}},
    "sampled identity": {
        "dropout": 0.3,
        "dropout_layers": "both",
        "dropout_method": {"masks": 0, "explicit": "identity", "sign_samples": 2},
    },
    "sam": {"sam": {"rho": 0.3}},
    "meda": {"meda": True},
    "l2 and smoothing": {"l2": 0.05, "label_smoothing": 0.2},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    use_threads(1)


@pytest.fixture
def prepared(make_run):
    run = make_run(batch_size=BATCH_SIZE)
    assert prepare(run.dataset, run.job, run.data).steps_per_epoch == 5
    return run


def job_of(small, regularizers: dict[str, Any], **changes: Any) -> JobSpec:
    return small.job(**{"model": DNN, "sse": SSE, "batch_size": BATCH_SIZE, "regularizers": regularizers} | changes)


def trainer_of(job: JobSpec, data: PreparedData, **settings: Any) -> Trainer:
    """In float64 by plain torch, unless told otherwise."""
    settings = {"backend": "reference", "dtype": torch.float64} | settings
    sharded = build(job, data, alpha=choose_alpha(job, data.steps_per_epoch), **settings)
    trainer = Trainer(job, data, sharded, dense_optimizer(job, sharded))
    sharded.train()
    return trainer


def steps(trainer: Trainer, number: int) -> None:
    batches = trainer.batches()
    for _ in range(number):
        parts = next(batches)
        trainer.reset_tables_if_due()
        trainer.train_step(parts)
    batches.close()


def trained(directory: str, job: JobSpec, number: int) -> tuple[list[Any], dict[str, torch.Tensor], float]:
    """After so many steps: this rank's rows with their place, the dense parameters, the sum of the losses."""
    use_threads(1)
    trainer = trainer_of(job, PreparedData.open(read_run(directory).data))
    steps(trainer, number)
    rows = [
        (piece.name, piece.row_start, piece.column_start, piece.tables.read(piece.name))
        for piece in ModelTables(trainer.sharded.module).local_pieces()
    ]
    dense = {name: parameter.detach().clone() for name, parameter in trainer.sharded.dense_parameters()}
    return rows, dense, trainer.position.loss_sum


def trained_here(directory: str, job: JobSpec, number: int) -> dict[str, torch.Tensor]:
    with single_rank_group():
        return joined([trained(directory, job, number)])


def joined(of_ranks: list[tuple[list[Any], dict[str, torch.Tensor], float]]) -> dict[str, torch.Tensor]:
    found = dict(of_ranks[0][1]) | {"loss": torch.tensor(of_ranks[0][2], dtype=torch.float64)}
    for _, dense, loss in of_ranks:
        assert all(torch.equal(found[name], value) for name, value in dense.items())
        assert loss == of_ranks[0][2]
    for name, row, column, values in (piece for rows, _, _ in of_ranks for piece in rows):
        table = found.setdefault(name, torch.full((NUM_ROWS[name], 4), torch.nan, dtype=torch.float64))
        table[row : row + values.shape[0], column : column + values.shape[1]] = values
    assert not any(bool(value.isnan().any()) for value in found.values())
    return found


def moved(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first if name != "loss")


# --- whatever it is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REGULARIZERS)
def test_ranks_and_micro_batches_give_what_one_batch_on_one_rank_gives(prepared, small, ranks, name):
    """Six steps, the short one at the end of an epoch and the first of the next among them."""
    directory, regularizers = str(prepared.directory), REGULARIZERS[name]
    whole = trained_here(directory, job_of(small, regularizers), 6)
    split = job_of(
        small, regularizers, micro_batches=2, sharding={"item": "row_wise", "user": "data_parallel"},
        resources={"num_workers": 2},
    )  # fmt: skip
    found = joined(ranks(2).run(trained, directory, split, 6))
    for key, value in whole.items():
        # float64 sums in another order, over some steps.
        assert float((found[key] - value).abs().max()) < 1e-10 * max(1.0, float(value.abs().max())), key
    assert moved(trained_here(directory, job_of(small, {}), 6), whole) > 1e-3  # it does something


@pytest.mark.parametrize("name", [*REGULARIZERS, "early stopping"])
def test_stopping_and_resuming_changes_no_bit(prepared, small, tmp_path, name):
    """In the middle, at an epoch's end, and one step after it: what MEDA has drawn anew must be found again."""
    regularizers = {"early_stopping": {"patience": 9}} if name == "early stopping" else REGULARIZERS[name]
    job, data = job_of(small, regularizers), PreparedData.open(prepared.data)
    with single_rank_group():
        whole, _ = train_in_parts(job, data, tmp_path / "whole", [])
        parts, _ = train_in_parts(job, data, tmp_path / "parts", [2, 5, 6])
    assert differ(snapshot(parts), snapshot(whole)) == []
    assert parts.history == whole.history


# --- l2, label smoothing, weight decay -------------------------------------------------------------------------------

PLAIN = {
    "optimizer": {"kind": "sgd", "learning_rate": 1.0},
    "dense_optimizer": {"kind": "sgd", "learning_rate": 1.0},
    "sse": {},
}


def first_batch(trainer: Trainer) -> Any:
    batches = trainer.batches()
    (batch,) = next(batches)
    batches.close()
    return batch


def test_l2_pulls_each_row_once_for_each_time_it_was_looked_up(prepared, small):
    """d/d theta_r of 1/B sum over samples of l2 |e|^2 = 2 l2 theta_r times the share of samples that have r."""
    directory, l2 = str(prepared.directory), 0.05
    start, free, pulled = (
        trained_here(directory, job_of(small, regularizers, **PLAIN), number)
        for regularizers, number in (({}, 0), ({}, 1), ({"l2": l2}, 1))
    )
    with single_rank_group():
        batch = first_batch(trainer_of(job_of(small, {}, **PLAIN), PreparedData.open(prepared.data)))
    for table in ("user", "item"):
        share = torch.bincount(batch.features[table].values(), minlength=NUM_ROWS[table]).double() / BATCH_SIZE
        expected = -2 * l2 * share[:, None] * start[table]
        torch.testing.assert_close(pulled[table] - free[table], expected, rtol=1e-9, atol=1e-14)
    assert torch.equal(pulled["tower.0.weight"], free["tower.0.weight"])
    assert torch.equal(pulled["loss"], free["loss"])  # what people read is the loss


def test_smoothed_labels_are_what_is_fitted(prepared, small):
    """d BCE / d logit = p - y: an SGD step with y (1 - s) + s / 2 differs by -s (1/2 - y) times the logit's gradient,
    so that steps are linear in s; and at the output's bias it is the mean of s (1/2 - y)."""
    directory = str(prepared.directory)
    free, quarter, half = (
        trained_here(directory, job_of(small, {"label_smoothing": s}, **PLAIN), 1) for s in (0.0, 0.25, 0.5)
    )
    for name in ("item", "tower.0.weight", "tower.4.bias"):
        torch.testing.assert_close(quarter[name], (free[name] + half[name]) / 2, rtol=1e-9, atol=1e-12)
        assert float((quarter[name] - free[name]).abs().max()) > 1e-5
    with single_rank_group():
        labels = first_batch(trainer_of(job_of(small, {}, **PLAIN), PreparedData.open(prepared.data))).labels.double()
    expected = (0.5 * (0.5 - labels)).mean()
    assert float(half["tower.4.bias"] - free["tower.4.bias"]) == pytest.approx(float(expected), rel=1e-9)


def test_weight_decay_of_the_dense_part(prepared, small):
    directory = str(prepared.directory)
    decaying = {**PLAIN, "dense_optimizer": {**PLAIN["dense_optimizer"], "weight_decay": 0.1}}
    start, free, decayed = (
        trained_here(directory, job_of(small, {}, **settings), number)
        for settings, number in ((PLAIN, 0), (PLAIN, 1), (decaying, 1))
    )
    for name in ("tower.0.weight", "tower.4.bias"):
        torch.testing.assert_close(decayed[name] - free[name], -0.1 * start[name], rtol=1e-9, atol=1e-14)
    assert torch.equal(decayed["item"], free["item"])


# --- SAM -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["all", "tables", "dense"])
def test_sam_applies_the_gradient_of_the_point_that_is_worst(prepared, small, of):
    """By hand with SGD at rate 1: a step shows the gradient at w; a model put at w + rho g / |g| shows the other."""
    data, rho = PreparedData.open(prepared.data), 0.7
    with single_rank_group():
        first, second, sam = (
            trainer_of(job_of(small, regularizers, **{**PLAIN, "sse": SSE}), data)
            for regularizers in ({}, {}, {"sam": {"rho": rho, "of": of}})
        )
        start = parameters(first)
        steps(first, 1)
        gradient = {name: start[name] - value for name, value in parameters(first).items()}
        chosen = [n for n in gradient if of == "all" or (of == "tables") == (n in NUM_ROWS)]
        norm = math.sqrt(sum(float(gradient[name].square().sum()) for name in chosen))
        for name in chosen:
            target = second.sharded.dense_parameters()
            values = dict(target).get(name)
            place = values.data if values is not None else rows_of(second, name)
            place += rho / norm * gradient[name]
        worst = parameters(second)
        steps(second, 1)
        steps(sam, 1)
        for name, value in parameters(sam).items():
            expected = start[name] + parameters(second)[name] - worst[name]
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
            assert float((value - parameters(first)[name]).abs().max()) > 1e-5, name
        assert sam.position.loss_sum == first.position.loss_sum  # the loss told is that at w


def rows_of(trainer: Trainer, name: str) -> torch.Tensor:
    return next(p.tables.weight(p.name) for p in ModelTables(trainer.sharded.module).local_pieces() if p.name == name)


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = {name: parameter.detach().clone() for name, parameter in trainer.sharded.dense_parameters()}
    return found | {name: rows_of(trainer, name).clone() for name in NUM_ROWS}


def test_what_was_perturbed_comes_back_bit_for_bit(prepared, small):
    """Dense parameters, running moments, rows, their state and steps, with decay and momentum pending; also after an
    error within."""
    data = PreparedData.open(prepared.data)
    model = {**DNN, "batch_norm": True}
    with single_rank_group():
        trainer = trainer_of(job_of(small, {}, model=model), data, backend="cpu", dtype=torch.float32)
        steps(trainer, 3)
        batches = trainer.batches()
        parts = next(batches)
        trainer._gradients(4, parts)
        before = snapshot(trainer)
        squared = trainer.sharded.gradient_squared_norm()
        sam = Sam(rho=0.5)
        norm = gradient_squared_norm(sam, trainer.sharded, squared)
        assert norm > squared > 0
        changed: list[list[str]] = []

        def within() -> None:
            with ascended(sam, trainer.sharded, norm):
                changed.append(differ(before, snapshot(trainer)))
                trainer._gradients(4, parts)  # moves running moments
                changed.append(differ(before, snapshot(trainer)))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            within()
        assert {"item", "user", "model/tower.0.linear.weight"} <= set(changed[0])
        assert any("running_mean" in name for name in changed[1])
        assert differ(snapshot(trainer), before) == []
        batches.close()


def test_sam_with_a_bad_gradient_leaves_everything_as_it_was(prepared, small):
    data = PreparedData.open(prepared.data)
    with single_rank_group():
        trainer = trainer_of(job_of(small, {"sam": {}}), data)
        batch = first_batch(trainer)
        before, seen = snapshot(trainer), []
        loss_of = trainer.sharded.module.loss

        def bad(batch):
            seen.append(snapshot(trainer))
            return loss_of(batch) * (math.nan if len(seen) == 2 else 1.0)

        trainer.sharded.module.loss = bad
        with pytest.raises(NonFiniteError):
            trainer.train_step((batch,))
        assert len(seen) == 2  # at w, and at the other point
        assert differ(seen[1], before) != []
        assert differ(snapshot(trainer), before) == []


# --- MEDA ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["normal", "hash"])
def test_meda_begins_rows_anew_and_keeps_the_tower(prepared, small, init):
    """At the second epoch's first step rows are as at the run's, with no state; the tower goes on; and the optimizer of
    rows counts from 1 again: Adam's first step is as long as its rate."""
    data = PreparedData.open(prepared.data)
    model = {**DNN, "init": {"kind": init, "std": 0.5}}
    optimizer = {"kind": "adam", "learning_rate": 0.01, "eps": 1e-30}
    with single_rank_group():
        trainer = trainer_of(job_of(small, {"meda": True}, model=model, optimizer=optimizer, sse={}), data)
        begin = snapshot(trainer)
        steps(trainer, 5)
        end = snapshot(trainer)
        trainer.reset_tables_if_due()
        again = snapshot(trainer)
        for name in again:
            tables = not name.startswith(("model/", "optimizer/"))
            assert torch.equal(again[name], begin[name] if tables else end[name]), name
            assert name not in begin or not torch.equal(begin[name], end[name]), name
        batch = first_batch(trainer)
        steps(trainer, 1)
        touched = batch.features["item"].values().unique()
        step = (rows_of(trainer, "item") - again["item"])[touched].abs()
        (read,) = (
            p.tables.read("item") for p in ModelTables(trainer.sharded.module).local_pieces() if p.name == "item"
        )
        assert float((read - again["item"])[touched].abs().max()) == pytest.approx(0.01, rel=1e-7)
        assert float(step.max()) > 0.01  # stored ahead of the momentum to come
        assert trainer.sharded.completed_steps == 6


def test_meda_is_not_a_warm_start_of_the_first_epoch(prepared, small):
    with single_rank_group():
        trainer = trainer_of(job_of(small, {"meda": True}), PreparedData.open(prepared.data))
        before = snapshot(trainer)
        trainer.reset_tables_if_due()
        assert differ(snapshot(trainer), before) == []
        assert all(piece.tables.birth_step == 0 for piece in ModelTables(trainer.sharded.module).local_pieces())


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_drops_hidden_units_in_training_alone(prepared, small):
    data = PreparedData.open(prepared.data)
    with single_rank_group():
        trainer = trainer_of(job_of(small, {"dropout": 0.5}, sse={}), data)
        batch = first_batch(trainer)
        module, seen = trainer.sharded.module, []
        for layer in (module.tower[2], module.tower[4]):  # what follows the two ReLUs
            layer.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].detach()))
        plain = module.loss(batch).detach()
        for hidden in seen:
            assert float((hidden == 0).double().mean()) < 0.75
        without = list(seen)
        seen.clear()
        trainer.sharded.set_context(1, 0, BATCH_SIZE)
        found = trainer.objective(batch, 1)
        dropped = (seen[0] == 0) & (without[0] > 0)
        alive = without[0] > 0
        assert float(dropped[alive].double().mean()) == pytest.approx(0.5, abs=0.05)
        torch.testing.assert_close(seen[0][alive & ~dropped], 2 * without[0][alive & ~dropped], rtol=1e-12, atol=0)
        assert float((found.value.detach() - plain).abs().max()) > 1e-3
        assert len(seen) == 2
        trainer.sharded.eval()
        assert torch.equal(module.loss(batch), plain)


def test_tables_are_looked_up_once_however_many_masks(prepared, small):
    data = PreparedData.open(prepared.data)
    regularizers = {"dropout": 0.5, "dropout_method": {"masks": 4, "noise": "exact"}}
    with single_rank_group():
        trainer = trainer_of(job_of(small, regularizers), data)
        batch = first_batch(trainer)
        module, calls = trainer.sharded.module, []
        module.embeddings.register_forward_hook(lambda *_: calls.append(1))
        module.tower.register_forward_hook(lambda *_: calls.append("tower"))
        trainer._gradients(1, (batch,))
        assert (calls.count(1), calls.count("tower")) == (1, 6)
        assert [piece.tables.num_records for piece in ModelTables(module).local_pieces()] == [1, 1]


def test_dropout_of_factors_leaves_biases_alone(make_run, small):
    """BPR has no hidden layers: its vectors are dropped, the item's bias beside them is not."""
    run = make_run(
        "pairs", model={"kind": "bpr", "loss": "bpr", "embedding_dim": 4}, optimizer={"kind": "adam"}, sse={}
    )
    data = prepare(run.dataset, run.job, run.data)
    job = small.job(
        model={"kind": "bpr", "loss": "bpr", "embedding_dim": 4},
        optimizer={"kind": "adam"},
        sse={},
        regularizers={"dropout": 0.5},
    )
    with single_rank_group():
        trainer = trainer_of(job, data)
        batch = first_batch(trainer)
        seen, module = [], trainer.sharded.module
        scores = module._scores
        module._scores = lambda features: (seen.append(module.embeddings(features).to_dict()), scores(features))[1]
        found = trainer.objective(batch, 1)
        assert found.value.shape == (96,)
        user, item = seen[0]["user"].detach(), seen[0]["item"].detach()
        assert float((user == 0).double().mean()) == pytest.approx(0.5, abs=0.1)
        rows = torch.stack([rows_of(trainer, "item")[row] for row in batch.features["item"].values()])
        assert float((item[:, :4] == 0).double().mean()) == pytest.approx(0.5, abs=0.1)
        torch.testing.assert_close(item[:, 4], rows[:, 4], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "kind",
    ["fm", "wide_deep", "deepfm", "xdeepfm", "wukong", "dlrm", "pnn", "dcnv2", "autoint", "finalmlp", "two_tower"],
)
def test_every_tower_has_its_hidden_layers_dropped(prepared, small, kind):
    """And fm, which has none, its rows."""
    hidden = {} if kind == "fm" else {"hidden": [8, 6]}
    model = {"kind": kind, "embedding_dim": 4, **hidden, "init": {"kind": "normal", "std": 0.5}}
    regularizers = {"dropout": 0.4, "dropout_method": ALGORITHM_2}
    with single_rank_group():
        losses = []
        for settings in ({}, {"dropout": 0.4}, regularizers):
            trainer = trainer_of(job_of(small, settings, model=model, sse={}), PreparedData.open(prepared.data))
            batch = first_batch(trainer)
            trainer.sharded.set_context(1, 0, BATCH_SIZE)
            losses.append(trainer.objective(batch, 1).value.detach())
        assert float((losses[1] - losses[0]).abs().mean()) > 1e-4
        assert float((losses[2] - losses[0]).abs().mean()) > 1e-4


# --- what has no meaning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"regularizers": {"dropout_layers": "both"}}, "there is no dropout"),
        ({"regularizers": {"dropout_method": {"masks": 4}}}, "there is no dropout"),
        ({"regularizers": {"dropout": 0.1, "dropout_method": {"masks": 1, "noise": "exact"}}}, "already has all of"),
        ({"regularizers": {"dropout": 0.1, "dropout_method": {"masks": 2, "explicit": "identity"}}}, "effect already"),
        ({"regularizers": {"dropout": 0.1, "dropout_method": {"masks": 0}}}, "no dropout is left"),
        ({"regularizers": {"dropout": 0.1, "dropout_method": {"masks": 2, "label_samples": 2}}}, "only output_hessian"),
        (
            {"regularizers": {"dropout": 0.1, "dropout_method": {**ALGORITHM_2, "sign_samples": 2}}},
            "only identity draws signs",
        ),
        ({"regularizers": {"dropout": 0.1, "dropout_method": {"masks": 2, "explicit_strength": 2}}}, "set explicit"),
        ({"regularizers": {"dropout": 0.1, "dropout_method": {"masks": 2, "noise_strength": 2}}}, "there is no noise"),
        (
            {
                "regularizers": {"dropout": 0.1, "dropout_method": {"masks": 2}},
                "model": {**DNN, "batch_norm": True},
            },
            "batch_norm mixes",
        ),
        (
            {
                "regularizers": {"dropout": 0.1, "dropout_layers": "hidden"},
                "model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 4},
            },
            "no hidden layers here",
        ),
        (
            {
                "regularizers": {"dropout": 0.1, "dropout_method": {"masks": 2}},
                "model": {"kind": "gru4rec", "loss": "bce"}, "sse": {},
            },
            "dropout_method: it is not available yet for gru4rec",
        ),
        ({"regularizers": {"dropout": 0.1}, "model": {"kind": "item2vec"}, "sse": {}}, "not available yet for"),
        ({"regularizers": {"label_smoothing": 0.1}, "model": {"kind": "bpr", "loss": "bpr"}}, "no class labels"),
        (
            {"regularizers": {"dropout": 0.1, "dropout_method": ALGORITHM_2}, "model": DNN | {"loss": "focal"}},
            "the second derivative of focal depends on the label",
        ),
        ({"regularizers": {"meda": True}, "init_from": {"job": "x"}}, "warm start"),
        (
            {"regularizers": {"meda": True},
             "optimizer": {"kind": "adam", "schedule": {"kind": "linear_warmup", "warmup_steps": 3}}},
            "constant one",
        ),
        ({"regularizers": {"sam": {}}, "tables": {"item": {"dtype": "bfloat16"}}}, "use float32"),
        ({"regularizers": {"sam": {"of": "dense"}}, "model": {"kind": "bpr", "loss": "bpr"}}, "no dense parameters"),
        ({"regularizers": {"sam": {"of": "dense"}}, "model": {"kind": "item2vec"}, "sse": {}}, "no dense parameters"),
        (
            {"dense_optimizer": {"weight_decay": 0.1}, "model": {"kind": "item2vec"}, "sse": {}},
            "dense_optimizer.weight_decay: item2vec has no dense parameters",
        ),
        ({"regularizers": {"sam": {"rho": 0}}}, "regularizers.sam.rho"),
        (
            {"regularizers": {"early_stopping": {}}, "evaluation": {"split": {"validation": 0.0}}},
            "no validation split",
        ),
        (
            {"regularizers": {"early_stopping": {}},
             "evaluation": {"split": {"kind": "per_user_last", "validation": 0.0}}},
            "no validation split",
        ),
        (
            {"regularizers": {"meda": True}, "optimizer": {"kind": "adam_ar", "decay": "by_epoch"}},
            "begins with the second epoch, which rows",
        ),
        ({"optimizer": {"kind": "adam", "decay": "by_epoch"}}, "optimizer.decay: adam has none"),
        ({"dense_optimizer": {"weight_decay": 0.1}, "model": {"kind": "bpr", "loss": "bpr"}}, "use regularizers.l2"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(small, changes, told):
    with pytest.raises(SpecError, match=told):
        small.job(**changes)


def test_a_job_without_regularizers_is_dumped_as_it_always_was(small):
    """Hashes and checkpoints of jobs from before know of none of them."""
    document = small.job().model_dump(mode="json")
    assert document["regularizers"] == {"dropout": 0.0}
    assert "weight_decay" not in document["dense_optimizer"]
    asked = small.job(regularizers={"meda": True, "sam": {"rho": 0.1}}, model=DNN).model_dump(mode="json")
    assert asked["regularizers"] == {"dropout": 0.0, "meda": True, "sam": {"rho": 0.1, "of": "all"}}
    assert JobSpec.model_validate(asked).regularizers.sam == Sam(rho=0.1)


def test_memory_counts_masks_and_copies(small):
    rows, ids = {"user": 1000, "item": 1000}, {"user": 1.0, "item": 1.0}

    def memory(**changes: Any) -> Any:
        return rank_memory(small.job(batch_size=65536, model={**DNN, "hidden": [256]}, **changes), rows, ids)

    plain = memory()
    eight = memory(regularizers={"dropout": 0.1, "dropout_method": {"masks": 8}})
    noisy = memory(regularizers={"dropout": 0.1, "dropout_method": {"masks": 8, "noise": "exact"}})
    assert eight.batches - plain.batches >= 7 * 65536 * 256 * 4
    assert noisy.batches > eight.batches
    sam = memory(regularizers={"sam": {}})
    assert sam.batches - plain.batches >= 2000 * (4 * 4 * 3 + 4)
    assert sam.dense > plain.dense


# --- whole runs ------------------------------------------------------------------------------------------------------


def test_a_meda_run_publishes_and_is_a_parent(make_run, small):
    """Rows have evidence by their own count of steps, in the run and in a warm start from it, whose steps go on."""
    publish = {"collection": "items", "feature": "item", "gate": {"mode": "report"}}
    optimizer = {"kind": "adam", "learning_rate": 0.05}
    parent = make_run("parent", regularizers={"meda": True}, optimizer=optimizer, publish=publish)
    assert execute(parent, start_ranks) == 0
    last = latest_valid(parent.checkpoints)
    assert (last.step, last.extra["birth_step"]) == (50, 25)
    assert int(last.read_rows("item")[1]["last_update_step"].max()) <= 25
    assert small.metrics(parent.directory, "test")[-1]["auc"] > 0.6

    child = make_run(
        "child", optimizer=optimizer, publish=publish, epochs=1, init_from={"job": "parent"},
        init_checkpoint=str(parent.checkpoints),
    )  # fmt: skip
    assert execute(child, start_ranks) == 0
    end = latest_valid(child.checkpoints)
    assert (end.step, end.extra["birth_step"], end.extra["position"]["first_step"]) == (75, 25, 50)
    for run in (parent, child):
        vectors = item_vectors(run, latest_valid(run.checkpoints))
        assert 0.9 < float(vectors.evidence.mean()) <= 1.0
    assert small.events(parent.directory, "publication")[0]["status"] == "published"
