"""A first version on several days and refreshes on the last ones, where items live for two days."""

from __future__ import annotations

import pytest

from embeddings.store import open_store
from trainer.data.sources.news_log import NewsLog, generate_news
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import read_run, write_run
from trainer.spec import parse_dataset, parse_job

DATASET = {
    "name": "news", "features": {"user": {"type": "id"}, "item": {"type": "id"}}, "label": {"column": "click"},
    "partition": "date",
}  # fmt: skip
JOB = {
    "name": "news", "model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 4, "init": {"kind": "hash", "std": 0.1}},
    "optimizer": {"kind": "adam", "learning_rate": 0.005}, "epochs": 1, "batch_size": 512,
    "publish": {"collection": "items", "feature": "item", "gate": {"mode": "report"}},
}  # fmt: skip
OF_ITEMS = ("carried", "newly_carried", "unreplaced", "unreplaced_traffic")


@pytest.mark.parametrize("told", [True, False])
def test_the_gate_knows_by_the_jobs_windows_that_days_are_not_lost(told, small, tmp_path):
    generate_news(NewsLog(num_rows=18_000, num_days=9), tmp_path / "log")

    def trained(number, days, parent=None):
        window = {"start": f"2026-01-{8 + number:02}", "days": days}
        uri = tmp_path / "log"
        if not told:
            # The same rows, of a dataset that has no others.
            uri, window = tmp_path / f"log-{number}", None
            uri.mkdir()
            for day in range(9 + number - days, 9 + number):
                rows = tmp_path / "log" / f"date=2026-01-{day:02}" / "part-00000.parquet"
                (uri / f"{day}.parquet").hardlink_to(rows)
        start = {} if parent is None else {"parent_version": "v000001", "init_checkpoint": str(parent.checkpoints)}
        dataset = DATASET | {"uri": str(uri)} | ({} if told else {"partition": None})
        run = read_run(
            write_run(
                tmp_path / f"run-{number}", run_id=f"run-{number}",
                job=parse_job(JOB | {"dataset": {"name": "news", "window": window}}), dataset=parse_dataset(dataset),
                store_url=str(tmp_path / "store"), **start,
            )
        )  # fmt: skip
        assert execute(run, start_ranks) == 0, small.events(run.directory, "error")
        return run

    refresh = trained(1, 2, trained(0, 8))
    manifest = open_store(str(tmp_path / "store")).collection("items").manifest()
    failed = {one["metric"] for one in manifest["gate"] if one["verdict"] == "fail"}
    assert ("unreplaced" in failed) != told
    assert not told or not failed & set(OF_ITEMS)
    assert manifest["lineage"]["window"] == ({"last": "2026-01-09", "days": 2} if told else None)
    assert manifest["metrics"].get("window_share") == (0.25 if told else None)
    (line,) = [one["message"] for one in small.events(refresh.directory, "info") if "rows moved" in one["message"]]
    assert ("the window has 2 days, it had 8" in line) == told
    assert "rows, there were" in line
