"""How rows are asked for in Redis' protocol."""

import numpy as np
import pytest

from embeddings.store.backends.redis_protocol import packed_mget
from embeddings.store.backends.redis_rows import RowKeys
from embeddings.vectors.item_vectors import keys_of

INT64 = np.iinfo(np.int64)


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [0, 9, 10, 99, 100, -1, -9, -10, INT64.max, INT64.min, INT64.min + 1, 10**18 - 1, 10**18],
        ["a", "%d", "%", "é", "", "x" * 300, "with space\r\n"],
    ],
)
def test_every_argument_is_as_long_as_is_said(ids):
    keys = RowKeys("100%:items:rows.0", "100%:")
    names = [str(one).encode() for one in ids]
    first = (b"revision", keys.alive().encode())
    expected = [b"MGET", *first, *(b"100%:.0:" + name for name in names)]
    packed = packed_mget(first, keys.row(), keys_of(ids, query=True))
    assert packed == b"*%d\r\n" % len(expected) + b"".join(b"$%d\r\n%b\r\n" % (len(one), one) for one in expected)
