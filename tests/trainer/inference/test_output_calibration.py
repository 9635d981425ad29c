"""Calibrated outputs of a run on two ranks with weights of rows: its figures, predictions and export, by definition."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.inference.export import export
from trainer.inference.exported_model import Exported
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.metrics import ece, logloss
from trainer.output_calibration.registry import fit, of_json
from trainer.runs.directory import read_run, write_run
from trainer.spec import parse_dataset


@pytest.fixture(scope="module")
def rows(tmp_path_factory, small) -> pa.Table:
    path = small.write_rows(tmp_path_factory.mktemp("calibrated") / "rows.parquet")
    rng = np.random.default_rng(4)
    part = rng.choice(["train", "validation", "test"], 3000, p=[0.5, 0.3, 0.2])
    # By their weights the validation rows have another share of clicks than by their number.
    table = pq.read_table(path)
    weight = np.where(table["click"].to_numpy() > 0, 1.0, rng.integers(0, 5, 3000).astype(float))
    return table.append_column("part", pa.array(part)).append_column("w", pa.array(weight))


@pytest.fixture(scope="module")
def run(rows, tmp_path_factory, small, pooled_ranks):
    folder = tmp_path_factory.mktemp("calibrated-run")
    pq.write_table(rows, folder / "rows.parquet")
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    dataset = {"name": "clicks", "uri": str(folder / "rows.parquet"), "features": features}
    dataset |= {"label": {"column": "click"}, "weight": "w"}
    job = small.job(
        output_calibration="isotonic",
        model={"kind": "dnn", "embedding_dim": 4, "hidden": [8]},
        evaluation={"split": {"kind": "column", "column": "part"}, "metrics": ["auc"]},
        resources={"num_workers": 2},
    )
    directory = write_run(
        folder / "run", run_id="run", job=job, dataset=parse_dataset(dataset), store_url=str(folder / "store")
    )
    assert execute(read_run(directory), pooled_ranks) == 0
    return read_run(directory)


def columns_of(table: pa.Table, *names: str) -> list[np.ndarray]:
    return [table[name].to_numpy() for name in names]


def test_probabilities_are_fitted_on_the_validation_rows_alone(run, rows):
    scored = Predictor(run.directory).predict(rows)
    logits, probabilities = columns_of(scored, "logit", "probability")
    part, labels, weights = columns_of(rows, "part", "click", "w")
    held = part == "validation"
    expected = fit("isotonic", logits[held], labels[held], weights[held])
    # In the mean: where the map is steep, a logit's last bit is more.
    assert np.abs(probabilities - expected.probabilities(logits)).mean() < 1e-4
    unweighted = fit("isotonic", logits[held], labels[held])
    assert np.abs(probabilities - unweighted.probabilities(logits)).mean() > 0.05


def test_the_run_s_figures_are_those_of_its_predictions(run, rows, small):
    scored = Predictor(run.directory).predict(rows)
    logits, probabilities = columns_of(scored, "logit", "probability")
    part, labels = columns_of(rows, "part", "click")
    for split in ("validation", "test"):
        figures, own = small.metrics(run.directory, split)[-1], part == split
        assert figures["logloss"] == pytest.approx(logloss(logits[own], labels[own]), abs=1e-6)
        if split == "test":
            after = probabilities[own].astype(np.float64)
        else:
            weights, after = rows["w"].to_numpy()[own], np.empty(own.sum())
            for half in (slice(0, None, 2), slice(1, None, 2)):
                other = slice(1 - half.start, None, 2)
                fitted = fit("isotonic", logits[own][other], labels[own][other], weights[other])
                after[half] = fitted.probabilities(logits[own][half])
        assert figures["logloss_calibrated"] == pytest.approx(logloss(np.log(after / (1 - after)), labels[own]), 1e-3)
        assert figures["ece_calibrated"] == pytest.approx(ece(after, labels[own]), abs=1e-3)


@pytest.mark.slow
def test_an_export_gives_the_calibrated_probabilities_too(run, rows, tmp_path):
    report = export(run.directory, tmp_path / "model")
    assert "probabilities are calibrated on validation rows (isotonic)" in report["notes"]
    model = Exported(tmp_path / "model")
    assert model.manifest["format_version"] == 2
    ours, theirs = Predictor(run.directory).predict(rows), model.predict(rows)
    assert theirs["logit"].to_numpy() == pytest.approx(ours["logit"].to_numpy(), abs=1e-4)
    stored = of_json(model.manifest["output_calibration"][""])
    for scored in (ours, theirs):
        logits, probabilities = columns_of(scored, "logit", "probability")
        assert probabilities == pytest.approx(stored.probabilities(logits), abs=1e-6)


def test_a_checkpoint_from_inside_an_epoch_says_that_it_is_not_calibrated(run, rows):
    steps = sorted(int(path.name.removeprefix("step-")) for path in run.checkpoints.iterdir() if path.is_dir())
    predictor = Predictor(run.directory, str(steps[-2]))
    assert f"probabilities are not calibrated: step {steps[-2]} is inside an epoch" in predictor.notes[-1]
    scored = predictor.predict(rows)
    logits, probabilities = columns_of(scored, "logit", "probability")
    assert probabilities == pytest.approx(1 / (1 + np.exp(-logits)), abs=1e-6)
