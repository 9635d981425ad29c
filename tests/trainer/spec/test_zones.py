"""The time zone of a partition: read as it is written, and refused where there is none of the name."""

from __future__ import annotations

import pytest

from trainer.spec import parse_dataset
from trainer.spec.problems import SpecError
from trainer.spec.zones import check_zone

DATASET = {"name": "rows", "uri": "rows.csv", "features": {"user": {}}, "label": {"column": "click"}}


@pytest.mark.parametrize(
    ("partition", "column", "zone"),
    [
        (None, None, "UTC"),
        ("day", "day", "UTC"),
        ({"column": "ts", "timezone": "Europe/Berlin"}, "ts", "Europe/Berlin"),
    ],
)
def test_a_partition_stays_as_it_is_written(partition, column, zone):
    dataset = parse_dataset(DATASET | {"partition": partition})
    assert (dataset.partition_column, dataset.partition_zone) == (column, zone)
    assert dataset.model_dump(mode="json")["partition"] == partition
    assert parse_dataset(dataset.model_dump(mode="json")) == dataset


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        ({"column": "ts", "timezone": "Mars/Olympus"}, "partition.timezone: 'Mars/Olympus' is not an IANA time zone"),
        ({"column": "ts"}, "partition.timezone: Field required"),
        ({"column": "ts", "timezone": "UTC", "zone": "x"}, "partition.zone: no such field"),
        (5, "partition: Input should be a valid string"),
    ],
)
def test_an_error_names_the_field_of_what_was_written(partition, said):
    with pytest.raises(SpecError, match=f"^dataset: {said}[^;]*$"):
        parse_dataset(DATASET | {"partition": partition})


@pytest.mark.parametrize("name", ["", "Mars/Olympus", "../../etc/passwd", "/etc/localtime"])
def test_bad_zones(name):
    with pytest.raises(ValueError, match="IANA"):
        check_zone(name)
