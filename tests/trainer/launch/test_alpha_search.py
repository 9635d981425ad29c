"""``optimizer.alpha: auto``: a climb over the grid, by short runs that a run tells of, keeps and repeats alike."""

from __future__ import annotations

import json
import math

import pytest

from trainer.checkpoint.format import latest_valid
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import default_alpha
from trainer.launch.alpha_search import FILE, GRID, climbed
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.launch.worker import train_rank
from trainer.runs.directory import Run
from trainer.runs.lineage import spec_sha256
from trainer.spec import JobSpec

AUTO = {"kind": "adam_ar", "learning_rate": 0.1, "alpha": "auto"}


@pytest.mark.parametrize("top", [-13, -9, -6, -2])
def test_the_climb_finds_the_top_of_a_hump_from_anywhere(top):
    for start in (1e-9, 1e-5, 1e-3, 0.9):
        asked = []

        def score(alpha, asked=asked):
            asked.append(alpha)
            return -abs(2 * math.log10(alpha) - top)

        assert climbed(start, score, {}) == pytest.approx(10 ** (top / 2))
        assert len(asked) == len(set(asked))  # nothing is trained twice
        assert all(10**-6.5 * 0.99 < alpha < 10**-1 * 1.01 for alpha in asked)


def test_equals_go_to_where_it_begins_and_what_has_no_score_loses():
    assert climbed(1e-4, lambda alpha: 1.0, {}) == pytest.approx(1e-4)
    assert climbed(1e-4, lambda alpha: -math.inf if alpha > 2e-5 else 0.0, {}) == pytest.approx(1e-4)
    known = {n: float(n == -7) for n in GRID}
    assert climbed(1e-4, lambda alpha: 1 / 0, known) == pytest.approx(10**-3.5)


def led(directory: str) -> None:
    """This rank's part of the run, in a pool."""
    train_rank(directory)


@pytest.mark.slow
def test_a_run_takes_the_alpha_of_its_validation_split(make_run, small, ranks):
    """On one rank and on two; kept in the checkpoint, in the events, and in a file that a second attempt reads."""
    runs = {}
    for name, changes in (
        ("one", {}),
        ("two", {"resources": {"num_workers": 2}, "sharding": {"item": "row_wise", "user": "row_wise"}}),
    ):
        run = runs[name] = make_run(name, optimizer=AUTO, epochs=2, **changes)
        prepare(run.dataset, run.job, run.data)
        if changes:
            ranks(2).run(led, str(run.directory))
        else:
            assert execute(run, start_ranks) == 0
        tried = {e["tried_alpha"]: e["value"] for e in small.events(run.directory, "info") if "tried_alpha" in e}
        assert len(tried) >= 3
        taken = latest_valid(run.checkpoints).extra["alpha"]
        assert tried[taken] == max(tried.values())
        assert min(abs(math.log10(a / default_alpha(25))) for a in tried) < 0.26
        opening = next(event for event in small.events(run.directory, "info") if "rows_per_rank" in event)
        assert opening["alpha"] == taken
    kept = [json.loads((run.directory / FILE).read_text())["scores"] for run in runs.values()]
    assert kept[0].keys() == kept[1].keys()
    for n, value in kept[0].items():
        assert value == pytest.approx(kept[1][n], abs=0.02)  # float32 sums in another order, over 50 steps

    # The run of its own is the one that was tried: validation after two epochs is the same.
    last = small.metrics(runs["one"].directory, "validation")[-1]["auc"]
    assert last == max(kept[0].values())


@pytest.mark.slow
def test_an_alpha_is_judged_after_four_epochs_of_a_longer_job(make_run, small):
    run = make_run("longer", optimizer=AUTO, epochs=5)
    assert execute(run, start_ranks) == 0
    scores = json.loads((run.directory / FILE).read_text())["scores"]
    aucs = [metrics["auc"] for metrics in small.metrics(run.directory, "validation")]
    assert len(aucs) == 5
    assert len(set(aucs)) == 5
    assert max(scores.values()) == aucs[3]


def keep(run: Run, job: JobSpec) -> None:
    """Leave in the run's directory what a search of ``job`` finds on the run's data, best at 10^-2.5."""
    prepare(run.dataset, run.job, run.data)
    scores = {str(n): -abs(n + 5.0) for n in GRID}
    of = {"job": spec_sha256(job), "data": PreparedData.open(run.data).dataset_fingerprint}
    (run.directory / FILE).write_text(json.dumps(of | {"scores": scores}))


def test_a_second_attempt_does_not_begin_the_search_again(make_run, small):
    run = make_run("again", optimizer=AUTO, epochs=1)
    keep(run, run.submitted)
    assert execute(run, start_ranks) == 0
    assert latest_valid(run.checkpoints).extra["alpha"] == pytest.approx(10**-2.5)
    assert not [e for e in small.events(run.directory, "info") if "tried_alpha" in e]


def test_another_job_in_the_directory_begins_its_own_search(make_run, small):
    run = make_run("own", optimizer=AUTO, epochs=1)
    keep(run, make_run("other", optimizer=AUTO | {"learning_rate": 0.2}, epochs=1).submitted)
    assert execute(run, start_ranks) == 0
    assert len([e for e in small.events(run.directory, "info") if "tried_alpha" in e]) >= 3
