"""Ways to split a table: what a rank holds, and that every way has its classes."""

import pytest

from embeddings.tables.shardings import SHARDINGS, sharding_name, shardings_for


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("table_wise", (100, 24)),
        ("data_parallel", (100, 24)),
        ("row_wise", (34, 24)),
        ("table_row_wise", (34, 24)),
        ("grid", (34, 24)),
        ("column_wise", (100, 8)),
        ("table_column_wise", (100, 8)),
    ],
)
def test_the_largest_share_of_three_ranks(name, share):
    assert SHARDINGS[name].largest_share(100, 24, 3) == share


def test_shards_over_hosts():
    """Four ranks on each of three hosts."""
    parts = {name: (one.row_shards(12, 4), one.column_shards(12, 4)) for name, one in SHARDINGS.items()}
    assert parts == {
        "table_wise": (1, 1), "row_wise": (12, 1), "column_wise": (1, 12), "data_parallel": (1, 1),
        "table_row_wise": (4, 1), "table_column_wise": (1, 4), "grid": (4, 3),
    }  # fmt: skip
    assert [name for name, one in SHARDINGS.items() if one.needs_equal_hosts] == [
        "table_row_wise", "table_column_wise", "grid",
    ]  # fmt: skip


def test_columns_are_split_into_equal_multiples_of_four_or_not_at_all():
    way = SHARDINGS["column_wise"]
    assert [way.largest_share(1, dim, 4)[1] for dim in (64, 48, 24, 10, 3)] == [16, 12, 8, 10, 3]


def test_every_way_has_its_classes_and_names():
    from embeddings.sharding import BAG_SHARDINGS, SEQUENCE_SHARDINGS

    for classes, names in (
        (BAG_SHARDINGS, shardings_for(sequences=False)),
        (SEQUENCE_SHARDINGS, shardings_for(sequences=True)),
    ):
        assert [sharding_name(torchrec_type) for torchrec_type in classes] == list(names)
        assert [way.kind for way in classes.values()] == [SHARDINGS[name] for name in names]
