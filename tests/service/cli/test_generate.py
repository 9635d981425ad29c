"""``evenkeel generate`` writes the logs of trainer.data.sources, and says what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from trainer.data.sources.click_log import ClickLog
from trainer.data.sources.news_log import TRUTH, NewsLog


@pytest.mark.parametrize(("options", "log"), [(("--churn",), NewsLog(600, 3, seed=5)), ((), ClickLog(600, 3, seed=5))])
def test_a_log_of_each_kind(run, tmp_path: Path, options, log):
    done = run("generate", str(tmp_path / "log"), *options, "--rows", "600", "--days", "3", "--seed", "5", "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert (answer["rows"], answer["days"], answer["items"], answer["users"]) == (600, 3, log.num_items, log.num_users)
    days = sorted((tmp_path / "log").glob("date=*/part-00000.parquet"))
    assert str(days[0]) == answer["first"]
    assert [pq.ParquetFile(day).read() for day in days] == [log.day_table(day) for day in range(3)]
    assert (tmp_path / "log" / TRUTH).exists() == bool(options)


def test_what_cannot_be_written(run, tmp_path: Path):
    done = run("generate", str(tmp_path / "log"), "--churn", "--rows", "2", "--days", "3")
    assert (done.code, done.out) == (1, "")
    assert "2 rows do not fill 3 days" in done.err
    assert "use more --rows" in done.err
    (tmp_path / "file").write_text("")
    done = run("generate", str(tmp_path / "file"), "--churn", "--rows", "600", "--days", "3")
    assert done.code == 1
    assert "name a folder that you can write to" in done.err
