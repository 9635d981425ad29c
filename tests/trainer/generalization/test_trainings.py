"""Trainings of a generalization report: those that a job's labels allow, run, gone on with and reported."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.support.warm_pool import Borrowed
from tests.trainer.conftest import small_dataset, small_job
from trainer.generalization import command
from trainer.generalization.trainings import comparable, plan
from trainer.runs.warm_pool import WarmPool
from trainer.spec import load_documents

JOB = """\
name: ratings
uri: rows.parquet
features: {user: {type: id}, item: {type: id}}
label: %s
order: at
---
spec_version: 1
name: my-job
dataset: {name: ratings}
model: {kind: %s}
publish: {collection: items, feature: item}
resources: {num_workers: 2}
seed: 5
"""


@pytest.mark.parametrize(
    ("label", "kind", "tables"),
    [
        ("{column: click}", "dnn", {"original": 1, "permuted": 1, "coins": 1, "neighbours": 2}),
        ("{value: rating}", "mf, loss: mse", {"original": 1, "permuted": 1, "neighbours": 2}),
        ("{column: click}", "bpr", {"original": 1}),
        ("{column: click}", "item2vec", {"original": 1}),
        ("{negatives: {of: item}}", "dnn", {"original": 1}),
    ],
)
def test_generalization_is_reported_of_any_job(label: str, kind: str, tables: dict[str, int], tmp_path: Path) -> None:
    """On one rank, unpublished; what its labels do not allow is left out, and the report says why."""
    (tmp_path / "job.yaml").write_text(
        JOB.replace("publish", "publish" if kind in ("bpr", "item2vec") else "#") % (label, kind)
    )
    dataset, job = load_documents(tmp_path / "job.yaml")
    assert dataset is not None
    assert job is not None
    spec = comparable(dataset, job)
    trainings = plan(dataset, {"my-job": spec}, 1, tmp_path).trainings
    assert Counter(one.kind for one in trainings) == tables
    assert len({one.name for one in trainings}) == len(trainings)
    for one in trainings:
        assert one.job.publish is None
        assert one.job.resources.num_workers == 1
        assert one.job.evaluation.training == (len(tables) > 1)
    assert ("Without permuted labels" in command.protocol(dataset, spec)) == (len(tables) == 1)


@pytest.mark.slow
@pytest.mark.process
def test_the_report_is_gone_on_with(
    rows: Path, tmp_path: Path, warm_pool: WarmPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training that failed is run again, others are not; another job has another folder."""
    monkeypatch.setattr("trainer.search.runs.WarmPool", lambda: Borrowed(warm_pool))
    spec, out = tmp_path / "job.yaml", tmp_path / "report"
    dataset, job = small_dataset(rows), small_job(model={"kind": "dnn", "embedding_dim": 4, "hidden": [8]}, epochs=1)
    documents = [one.model_dump(mode="json", exclude_unset=True) for one in (dataset, job)]
    spec.write_text(yaml.safe_dump_all(documents))
    write, moved = rows.rename(tmp_path / "away.parquet"), rows
    assert command.main([str(spec), "--out", str(out)]) == 1
    assert "no such file" in capsys.readouterr().err
    write.rename(moved)
    assert command.main([str(spec), "--out", str(out)]) == 0
    names = {"original-seed-0", "permuted-seed-0", "coins-seed-0", "neighbours-4-seed-0", "neighbours-256-seed-0"}
    records = {path.stem: json.loads(path.read_text()) for path in (out / "trainings").glob("*.json")}
    assert {name for name, record in records.items() if record["state"] == "done"} == names
    assert not list((out / "runs").iterdir())
    text = (out / "report.md").read_text()
    for title in (
        "Training and test figures",
        "Permuted labels",
        "Sharpness",
        "Spectra",
        "Bounds on the gap",
        "Uniform",
    ):
        assert f"## {title}" in text
    assert "train auc" in text
    before = {path.name: path.stat().st_mtime_ns for path in (out / "trainings").iterdir()}
    (out / "trainings" / "coins-seed-0.json").write_text('{"sta')
    assert command.main([str(spec), "--out", str(out)]) == 0
    after = {path.name: path.stat().st_mtime_ns for path in (out / "trainings").iterdir()}
    assert [name for name in before if before[name] != after[name]] == ["coins-seed-0.json"]
    assert command.main([str(spec), "--out", str(out), "--report"]) == 0
    spec.write_text(yaml.safe_dump_all([documents[0], documents[1] | {"seed": 3}]))
    assert command.main([str(spec), "--out", str(out)]) == 1
    assert "holds the report on another job" in capsys.readouterr().err
