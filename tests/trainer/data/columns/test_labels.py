"""Labels that are none are refused with what to write in their place."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.columns.labels import labels_of
from trainer.data.columns.numeric import Numeric
from trainer.data.errors import DataError
from trainer.data.sources.source import Source
from trainer.spec.dataset import Label, parse_rule


def chunk_of(tmp_path, values):
    pq.write_table(pa.table({"y": values}), tmp_path / "rows.parquet")
    (chunk,) = Source(str(tmp_path / "rows.parquet")).stream(["y"])
    return chunk


@pytest.mark.parametrize(
    ("values", "rule", "labels"),
    [
        ([-1, 1, 1], "y >= 1", [0, 1, 1]),
        ([0, 100, 0], "y >= 100", [0, 1, 0]),
        ([1, 2, 1], "y >= 2", [0, 1, 0]),
        ([1, 5, 4, 3], "y >= 4", [0, 1, 1, 0]),
        ([0.0, 2.5, 7.0], "y > 0", [0, 1, 1]),
    ],
)
def test_numbers_that_are_no_labels_name_a_rule(values, rule, labels, tmp_path):
    chunk = chunk_of(tmp_path, values)
    with pytest.raises(DataError, match=r"neither 0 nor 1 .* such as label: \{rule: '" + re.escape(rule)):
        labels_of(chunk, Label(column="y"))
    parse_rule(rule)
    assert labels_of(chunk, Label(rule=rule)).tolist() == labels


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["no", "yes"], "row 0: the label is 'no', and labels are numbers .write it as 0 and 1, .* == 'yes'"),
        (["Y", None, "N"], "row 0: .* == 'Y'"),
        (["f", "t"], "== 't'"),
        (["clicked", "not"], "== 'clicked'"),
        (["seen", "not"], "== 'seen'"),
        (["a", "b", "c"], "== 'WHAT IS POSITIVE'"),
        (["1", "2,5"], "row 1: the label is '2,5', .*write a point before the fraction"),
        (["0", "1,234.5"], "row 1: .*nothing between thousands"),
    ],
)
@pytest.mark.parametrize("label", [{"column": "y"}, {"value": "y"}, {"rule": "y > 0"}])
def test_texts_that_are_no_labels_say_what_to_write(label, values, says, tmp_path):
    with pytest.raises(DataError, match=says):
        labels_of(chunk_of(tmp_path, values), Label(**label))


@pytest.mark.parametrize("value", ["2,5", "1,234", "-1.234,5", "1,234,567.8"])
def test_numbers_with_commas_say_what_to_write(value, tmp_path):
    with pytest.raises(
        DataError, match=r"row 1: feature 'price' is .*write a point before the fraction .*: 2\.5, 1234"
    ):
        Numeric("price", "y", "none", "mean").read(chunk_of(tmp_path, ["1", value]))


@pytest.mark.parametrize(("values", "labels"), [(["0", "1", "1"], [0, 1, 1]), (["0.0", "1.0"], [0, 1])])
def test_numbers_written_as_text_are_labels(values, labels, tmp_path):
    assert labels_of(chunk_of(tmp_path, values), Label(column="y")).tolist() == labels


def test_a_rule_reads_numbers_written_as_text(tmp_path):
    assert labels_of(chunk_of(tmp_path, ["5", "3", "4"]), Label(rule="y >= 4")).tolist() == [1, 0, 1]
