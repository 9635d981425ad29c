"""What pages say of jobs: how far they are, their figures, what differs between them."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from service.web.content.compare import curves, differences, last_figures, metrics_of
from service.web.content.job import READ_BYTES, loss_chart, parent_job, progress_charts
from service.web.content.job_rows import best_figures, main_figure, percent_done, percent_prepared
from service.web.content.jobs import in_order
from service.web.content.submit import first_spec, schema, without_defaults
from trainer.spec import JobSpec


def test_percent_done():
    assert percent_done("queued", {}) is None
    assert percent_done("running", {"epoch": 1, "epochs": 4}) == 0
    assert percent_done("running", {"epoch": 3, "epochs": 4}) == 50
    assert percent_done("running", {"epoch": 3, "epochs": 4, "step": 30, "steps": 50}) == 60
    assert percent_done("publishing", {"epoch": 4, "epochs": 4}) == 100
    assert percent_prepared({"rows": 5, "total_rows": 20}) == 25
    assert percent_prepared({"rows": 5, "total_rows": None}) is None


def test_the_main_figure_is_of_the_best_epoch_and_of_the_test_rows():
    metrics = [
        {"epoch": 1, "split": "train", "auc": 0.9},
        {"epoch": 1, "split": "validation", "logloss": 0.4, "auc": 0.7},
        {"epoch": 1, "split": "test", "auc": 0.69},
        {"epoch": 2, "split": "validation", "auc": 0.68},
    ]
    assert main_figure({"metrics": metrics}) == {"split": "test", "value": 0.69, "title": "AUC"}
    of_validation = {"split": "validation", "value": 0.68, "title": "AUC"}
    assert main_figure({"metrics": metrics[3:]}) == of_validation
    ranked = [{"epoch": 1, "split": "test", "rmse/visits": None, "ndcg_10_full": 0.2}]
    assert main_figure({"metrics": ranked}) == {"split": "test", "value": 0.2, "title": "NDCG@10 of all items"}
    assert main_figure({"metrics": [{**ranked[0], "rmse/visits": 2.0}]}) == {
        "split": "test", "value": 2.0, "title": "RMSE of visits",
    }  # fmt: skip
    assert main_figure({"metrics": metrics[:1]}) is None


def test_a_metric_is_of_the_best_epoch_of_the_last_without_one_and_of_the_first_label():
    metrics = [
        {"epoch": epoch, "split": split, "auc": auc - (split == "test") / 100, "logloss": loss}
        for epoch, auc, loss in ((1, 0.7, 0.5), (2, 0.8, 0.4), (3, 0.75, 0.3))
        for split in ("validation", "test")
    ]
    found = best_figures({"metrics": metrics}, "logloss")
    assert found == {"validation": 0.4, "test": 0.4, "epoch": 2, "is_best": True, "label": ""}  # that of the best AUC
    found = best_figures({"metrics": [row for row in metrics if row["split"] == "test"]}, "auc")
    assert (found["validation"], found["test"], found["epoch"], found["is_best"]) == (None, 0.74, 3, False)
    labels = [{"epoch": 1, "split": "test", "rmse/visits": 2.0, "auc/click": 0.7, "auc/buy": 0.8}]
    found = [best_figures({"metrics": labels}, name) for name in ("auc", "auc/buy")]
    assert [(one["test"], one["label"]) for one in found] == [(0.7, "click"), (0.8, "")]
    assert best_figures({"metrics": []}, "auc") == {
        "validation": None, "test": None, "epoch": None, "is_best": True, "label": "",
    }  # fmt: skip


def test_numbers_are_in_order_before_texts_and_what_is_missing_is_last():
    rows = [{"at": value} for value in (None, "auto", 10, 9.5, True, [1, 2])]
    for descending, order in ((False, [9.5, 10, True, [1, 2], "auto"]), (True, ["auto", [1, 2], True, 10, 9.5])):
        found = [row["at"] for row in in_order(rows, lambda row: row["at"], descending=descending)]
        assert found == [*order, None]


def test_only_fields_that_differ_are_shown():
    one = {"name": "a", "epochs": 2, "optimizer": {"kind": "adam", "beta1": 0.9}, "labels": {}, "publish": None}
    two = {**one, "optimizer": {"kind": "adam_ar", "beta1": 0.9}, "labels": {"team": "ads"}}
    assert differences([one, two]) == [("optimizer.kind", ["adam", "adam_ar"]), ("labels.team", ["–", "ads"])]
    assert differences([one, one]) == []


def test_figures_side_by_side():
    def job(name: str, auc: float, loss: float) -> dict:
        metrics = [
            {"epoch": 1, "split": "test", "logloss": loss, "auc": auc, "frequency_buckets": [{}], "examples": 9},
            {"epoch": 1, "split": "train", "loss": loss},
        ]
        return {"name": name, "metrics": metrics}

    jobs = [job("one", 0.7, 0.5), job("two", 0.8, 0.6)]
    assert metrics_of(jobs) == ["auc", "logloss", "loss"]
    best = {(row["split"], row["metric"]): row["best"] for row in last_figures(jobs, metrics_of(jobs))}
    assert best == {("test", "auc"): 0.8, ("test", "logloss"): 0.5, ("train", "loss"): 0.5}
    assert [chart["split"] for chart in curves(jobs, "auc")] == ["test"]
    assert curves(jobs, "auc")[0]["svg"].count("<polyline") == 2


def test_losses_of_training_and_of_what_was_held_out():
    metrics = [{"epoch": 1, "split": "train", "loss": 0.6}, {"epoch": 1, "split": "test", "auc": 0.7, "logloss": 0.5}]
    chart = loss_chart({"name": "one", "metrics": metrics})
    assert chart is not None
    assert [one.name for one in chart["curves"]] == ["train", "test"]
    assert loss_chart({"name": "one", "metrics": []}) is None


def test_the_parent_is_the_job_whose_checkpoint_was_read():
    spec = first_spec("clicks")
    lineage = {"warm_start": "s3://bucket/runs/job_1m89qe9wj1925ww4djs/checkpoints/step-000000000456"}
    assert parent_job({"lineage": lineage, "spec": spec}) == "job_1m89qe9wj1925ww4djs"
    assert parent_job({"lineage": {"warm_start": None}, "spec": spec}) is None
    assert parent_job({"lineage": None, "spec": {**spec, "init_from": {"job": "job_x"}}}) == "job_x"


BEGUN = datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)


def event(attempt: int, step: int, **fields: object) -> str:
    time = (BEGUN + datetime.timedelta(seconds=20 * step)).isoformat().replace("+00:00", "Z")
    told = {"time": time, "type": "progress", "attempt": attempt, "step": step, "examples_per_second": 1000.0 + step}
    return json.dumps(told | {"loss": 0.5} | fields) + "\n"


def test_speed_is_of_the_last_attempt_and_of_the_end_of_a_long_file(tmp_path: Path):
    assert progress_charts(tmp_path, 1, BEGUN) == {"speed": [], "use": []}
    filler = json.dumps({"type": "info", "message": "x" * 1000}) + "\n"
    events = [event(1, 1), event(2, 1), filler * (READ_BYTES // len(filler)), event(1, 5), event(2, 2), event(2, 3)]
    (tmp_path / "events.jsonl").write_text("".join(events) + event(2, 4)[:-5])
    speed, loss = progress_charts(tmp_path, 2, BEGUN)["speed"]
    assert speed["svg"].count('class="dot"') == 2  # the first was before what is read, the last is being written
    assert speed["last"] == 1003.0
    assert loss["last"] == 0.5


def test_processors_and_memory_are_drawn_over_the_time_of_the_run(tmp_path: Path):
    use = {"starved": 0.25, "cores": 1.5, "memory_bytes": 3 * 2**29}
    untimed = event(1, 3).replace("2026", "never")
    (tmp_path / "events.jsonl").write_text(event(1, 1) + event(1, 2, **use) + untimed + event(1, 4, **use))
    memory, cores, got = progress_charts(tmp_path, 1, BEGUN)["use"]
    assert (memory["last"], cores["last"], got["last"]) == (1.5, 1.5, 75.0)
    assert "attempt, second 40: cores 1.5000" in cores["svg"]
    assert "attempt, second 80: GiB 1.5000" in memory["svg"]
    assert cores["svg"].count('class="dot"') == 2  # the first event does not have it, the third no time
    assert ">0.0<" in cores["svg"]  # the axis begins there
    (tmp_path / "events.jsonl").write_text(event(1, 2, **use) + event(1, 1000, **use))
    assert "attempt, minute 333: cores 1.5000" in progress_charts(tmp_path, 1, BEGUN)["use"][1]["svg"]


def test_a_clone_is_the_same_job_without_its_defaults():
    spec = JobSpec.model_validate({**first_spec("clicks"), "labels": {"team": "ads"}})
    short = without_defaults(spec.model_dump(mode="json"))
    assert JobSpec.model_validate(short) == spec
    assert "seed" not in short
    towers = JobSpec.model_validate({**first_spec("clicks"), "model": {"kind": "two_tower"}})
    # Without it, the dataset of the clone could choose another loss.
    assert without_defaults(towers.model_dump(mode="json"))["model"]["loss"] == "bce"
    of_another_version = {"name": "old", "gone": 1}
    assert without_defaults(of_another_version) == of_another_version


def test_the_form_has_the_schema_without_its_words():
    form = schema()
    assert set(form["properties"]) == set(JobSpec.model_fields)
    assert form["properties"]["epochs"] == {"default": 1, "maximum": 1000, "minimum": 1, "type": "integer"}
    assert form["properties"]["model"]["discriminator"]["mapping"].keys() >= {"two_tower", "bpr"}
    assert "description" not in form["$defs"]["Gate"]
