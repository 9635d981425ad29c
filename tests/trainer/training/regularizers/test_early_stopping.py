"""Early stopping: the decision, and runs that end by it with what was best, also when they are resumed."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.checkpoint.format import latest_valid
from trainer.data.prepare.preparation import prepare
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.launch.worker import train_rank
from trainer.spec import parse_job
from trainer.spec.regularizers import EarlyStopping
from trainer.training.regularizers.early_stopping import decide


def history(values: list[Any], name: str = "auc") -> list[dict[str, Any]]:
    """Of the three splits; test, which nothing may be decided by, says the contrary."""
    found = []
    for epoch, value in enumerate(values, 1):
        found.append({"epoch": epoch, "split": "train", "loss": 1.0})
        found.append({"epoch": epoch, "split": "validation", name: value, "examples": 9})
        found.append({"epoch": epoch, "split": "test", name: -(value or 0.0), "examples": 9})
    return found


@pytest.mark.parametrize(
    ("values", "settings", "best", "stop"),
    [
        ([0.7], {}, 1, False),
        ([0.7, 0.8], {}, 2, False),
        ([0.7, 0.7], {}, 1, True),  # no better is not better
        ([0.7, 0.6, 0.65], {"patience": 3}, 1, False),
        ([0.7, 0.6, 0.65, 0.69], {"patience": 3}, 1, True),
        ([0.7, 0.6, 0.71], {"patience": 2}, 3, False),
        ([0.7, 0.705], {"min_delta": 0.01}, 1, True),
        ([None, 0.5], {"patience": 3}, 2, False),
        ([0.5, None], {}, 1, True),
        ([None, None], {"patience": 2}, 0, True),
    ],
)
def test_the_decision(values, settings, best, stop):
    found = decide(EarlyStopping(**settings), history(values))
    assert (found.best_epoch, found.stop) == (best, stop)
    assert found.metric == "auc"


def test_losses_are_better_when_they_fall():
    values = history([0.9, 0.8, 0.85], "rmse")
    found = decide(EarlyStopping(), values)
    assert (found.metric, found.best_epoch, found.best, found.stop) == ("rmse", 2, 0.8, True)
    with pytest.raises(ValueError, match=r"validation has no ndcg_10 \(there are rmse\)"):
        decide(EarlyStopping(metric="ndcg_10"), values)


def test_a_ranking_of_all_items_is_watched_before_an_auc():
    epochs = [
        {"epoch": epoch, "split": "validation", "auc": auc, "ndcg_10_full": ndcg}
        for epoch, auc, ndcg in ((1, 0.9, 0.1), (2, 0.8, 0.2))
    ]
    assert decide(EarlyStopping(), epochs)[:2] == (2, 0.2)
    assert decide(EarlyStopping(metric="auc"), epochs)[:2] == (1, 0.9)


def test_a_job_that_publishes_keeps_its_best_epoch_by_default():
    def job(**changes: Any) -> Any:
        document = {"name": "n", "dataset": {"name": "d"}, "model": {"kind": "bpr", "loss": "bpr"}, "epochs": 5}
        return parse_job(document | {"publish": {"collection": "items", "feature": "item"}} | changes)

    assert job().early_stopping == EarlyStopping(patience=5)
    last = {"keep": "last", "patience": 1000}
    assert job(regularizers={"early_stopping": last}).early_stopping == EarlyStopping(**last)
    for changes in ({"publish": None}, {"epochs": 1}, {"evaluation": {"split": {"validation": 0.0}}}):
        assert job(**changes).early_stopping is None
    kept = job().early_stopping
    assert decide(kept, history([0.7, 0.8, 0.6, 0.5, 0.4])) == (2, 0.8, False, "auc")
    assert decide(kept, history([0.1, 0.2, 0.15], "ndcg_10_full")) == (2, 0.2, False, "ndcg_10_full")
    assert decide(kept, history([0.1, 0.2], "ece"))[0] == 0, "nothing that says which is better"


# Rows that are learned by heart within an epoch or two.
HASTY = {
    "optimizer": {"kind": "adam", "learning_rate": 0.3},
    "model": {"kind": "dnn", "embedding_dim": 8, "hidden": [16], "init": {"kind": "normal", "std": 0.5}},
    "sse": {},
    "epochs": 8,
}


def stopped(**changes: Any) -> dict[str, Any]:
    return {**HASTY, "regularizers": {"early_stopping": {"metric": "logloss", "patience": 2, **changes}}}


def led(directory: str) -> None:
    """This rank's part of the run, in a pool."""
    train_rank(directory)


@pytest.mark.slow
def test_a_run_on_two_ranks_ends_with_its_best_epoch(make_run, small, ranks):
    """The checkpoint is the best epoch's, its position says that training is over, and a resumed run does not train on;
    what it told is whole."""
    settings = stopped() | {"sharding": {"item": "row_wise"}, "resources": {"num_workers": 2}}
    run = make_run("early", **settings)
    prepare(run.dataset, run.job, run.data)
    ranks(2).run(led, str(run.directory))
    losses = [metric["logloss"] for metric in small.metrics(run.directory, "validation")]
    best = losses.index(min(losses)) + 1
    assert len(losses) == best + 2 < 8  # patience 2
    told = next(event for event in small.events(run.directory, "info") if "best_epoch" in event)
    assert (told["best_epoch"], told["stopped_after_epoch"]) == (best, best + 2)
    assert f"those after epoch {best}" in told["message"]
    last = latest_valid(run.checkpoints)
    assert last.step == 25 * best
    assert last.extra["position"]["stopped"]
    assert [m["epoch"] for m in last.extra["history"] if m["split"] == "test"] == list(range(1, best + 3))

    # The same parameters as those of a run of so many epochs.
    short = make_run("short", **{**settings, "epochs": best, "regularizers": {}})
    prepare(short.dataset, short.job, short.data)
    ranks(2).run(led, str(short.directory))
    expected, found = latest_valid(short.checkpoints), last
    for table in ("user", "item"):
        assert all((a == b).all() for a, b in zip(flat(found, table), flat(expected, table), strict=True))

    again = make_run("early", **settings, attempt=2)
    ranks(2).run(led, str(again.directory))
    assert len(small.metrics(run.directory, "validation")) == len(losses)
    assert latest_valid(run.checkpoints).step == 25 * best


def flat(checkpoint: Any, table: str) -> list[Any]:
    weight, state = checkpoint.read_rows(table)
    return [weight, *(state[name] for name in sorted(state))]


@pytest.mark.slow
def test_the_last_epoch_is_kept_where_that_is_asked_for_and_it_publishes(make_run, small):
    settings = stopped(keep="last") | {
        "model": {"kind": "two_tower", "embedding_dim": 8, "hidden": [16]},
        "publish": {"collection": "items", "feature": "item", "gate": {"mode": "report"}},
    }
    run = make_run("kept", **settings)
    assert execute(run, start_ranks) == 0
    losses = [metric["logloss"] for metric in small.metrics(run.directory, "validation")]
    assert len(losses) < 8
    last = latest_valid(run.checkpoints)
    assert last.step == 25 * len(losses)
    assert last.extra["position"]["stopped"]
    assert small.events(run.directory, "publication")[0]["status"] == "published"


@pytest.mark.slow
def test_a_run_that_publishes_ends_with_its_best_epoch_and_goes_on_with_more(make_run, small):
    """Without being asked for. Epochs that a later attempt adds are trained on from there."""
    settings = {**HASTY, "model": {"kind": "two_tower", "embedding_dim": 8, "hidden": [16]}}
    settings["publish"] = {"collection": "items", "feature": "item", "gate": {"mode": "report"}}
    run = make_run("kept", **{**settings, "epochs": 5})
    assert execute(run, start_ranks) == 0
    found = [metric["auc"] for metric in small.metrics(run.directory, "validation")]
    best = found.index(max(found)) + 1
    assert len(found) == 5 > best, "the rows are learned by heart"
    last = latest_valid(run.checkpoints)
    assert (last.step, last.extra["position"]["stopped"]) == (25 * best, True)
    assert small.events(run.directory, "publication")[0]["status"] == "published"

    again = make_run("kept", **{**settings, "epochs": 6}, attempt=2)
    assert execute(again, start_ranks) == 0
    assert [metric["epoch"] for metric in small.metrics(run.directory, "validation")] == [
        *range(1, 6), *range(best + 1, 7)
    ]  # fmt: skip


def test_a_figure_that_is_not_there_is_an_error():
    epoch = {"epoch": 1, "split": "validation", "auc": 0.7, "examples": 10}
    with pytest.raises(ValueError, match=r"validation has no ndcg_10 \(there are auc\)"):
        decide(EarlyStopping(metric="ndcg_10"), [epoch])
