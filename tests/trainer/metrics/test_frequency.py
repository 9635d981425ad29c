"""Frequency buckets against their definition, id by id."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.metrics.frequency import bucket_rows, frequency_buckets


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60))
def test_bucket_is_the_fifth_of_occurrences_that_rarer_ids_fill(counts):
    counts = np.array(counts)
    buckets = frequency_buckets(counts)
    for count, bucket in zip(counts, buckets, strict=True):
        rarer = counts[counts < count].sum()
        assert bucket == (0 if count == 0 else 1 + (5 * rarer) // counts.sum())
    # The more often, the higher the bucket.
    order = np.argsort(counts, kind="stable")
    assert (np.diff(buckets[order].astype(int)) >= 0).all()
    assert buckets.max() <= 5


def test_distinct_frequencies_are_cut_into_fifths_of_the_occurrences():
    counts = np.arange(1, 1001)
    buckets = frequency_buckets(counts)
    shares = [counts[buckets == bucket].sum() / counts.sum() for bucket in range(1, 6)]
    np.testing.assert_allclose(shares, 0.2, atol=0.002)


def test_table_names_what_is_in_each_bucket():
    counts = np.array([0, 1, 1, 2, 4])
    buckets = frequency_buckets(counts)
    assert buckets.tolist() == [0, 1, 1, 2, 3]
    norms = np.array([9.0, 3.0, 5.0, 7.0, 0.0, 0.0])
    examples = np.array([2, 10, 0, 4, 0, 0])
    table = bucket_rows(counts, buckets, norms, examples, [0.5, 0.75, np.nan, 1.0, np.nan, np.nan])
    assert [row["bucket"] for row in table] == [0, 1, 2, 3]
    new, rare, *_ = table
    assert new == {
        "bucket": 0, "ids": 0, "min_count": 0, "max_count": 0, "norm": None, "examples": 2, "auc": 0.5,
    }  # fmt: skip
    assert rare["ids"] == 2
    assert rare["norm"] == 1.5
    assert (table[3]["min_count"], table[3]["max_count"], table[3]["auc"]) == (4, 4, 1.0)
    assert table[2]["auc"] is None


def test_nothing_trained_is_unseen():
    assert frequency_buckets(np.zeros(3, int)).tolist() == [0, 0, 0]
    assert frequency_buckets(np.zeros(0, int)).tolist() == []
