"""Figures of a run's rows, by which the gate recognises broken data. Torch-free."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.hashing import Int64s, derive_key, mix, unit_interval
from trainer.data.columns.jagged import Jagged, sorted_unique
from trainer.data.columns.orders import order_name
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.plan import DataPlan

MAX_ROWS = 100_000
"""Most rows on which pairing is measured; their users are sampled by hash."""
MAX_USER_ITEMS = 32
"""Most items of one user that count; users with more would dominate the figure, at a cost that grows quadratically."""
MIN_PAIRS = 200
"""Fewest pairs of items for which pairing is reported; its standard error is then about .03."""
MIN_ITEMS = 100
"""Fewest items for which the correlation of their counts is reported."""
NEWEST = 0.2
"""Share of the rows that counts as the newest."""
_SAMPLE_SEED, _HALF_SEED, _ORDER_SEED, _DRAW_SEED = 0x1F01, 0x1F02, 0x1F03, 0x1F04


def row_figures(plan: DataPlan, encoded: Encoded, user_counts: Int64s | None) -> dict[str, float | None]:
    """Return figures of the rows; a figure that cannot be computed is None.

    ``user_counts``: training rows of each row of the user table [rows]; None: the job reads no users.

    Returns:
        ``rows``: number of rows; ``users``: number of users with training rows; ``largest_user``: share of the rows of
        one user; ``pairing`` and ``pairing_newest``, see :func:`pairing`, of all rows and of the newest fifth;
        ``popularity``, see :func:`popularity`.
    """
    figures: dict[str, float | None] = {"rows": float(encoded.num_rows), "users": None, "largest_user": None}
    if user_counts is not None and user_counts.sum() > 0:
        figures["users"] = float(np.count_nonzero(user_counts[NUM_SPECIAL_ROWS:]))
        figures["largest_user"] = float(user_counts[NUM_SPECIAL_ROWS:].max(initial=0) / user_counts.sum())
    figures |= {"pairing": None, "pairing_newest": None, "popularity": None}
    users, items = (_codes(plan, encoded, name) for name in ("user", "item"))
    if users is None or items is None:
        return figures
    known = (users >= 0) & (items >= 0)
    figures["pairing"] = pairing(users[known], items[known])
    newest = _newest(plan, encoded)
    if newest is not None:
        figures["pairing_newest"] = pairing(users[newest & known], items[newest & known])
        figures["popularity"] = popularity(items[~newest & known], items[newest & known])
    return figures


def pairing(users: npt.NDArray[Any], items: npt.NDArray[Any]) -> float | None:
    """Measure how strongly users and items belong together: .5 if items were assigned to users at random.

    One half of the users gives, for any two items, the number of users who have both. This number is compared for two
    pairs: two items of one user in the other half, and the first of them with an item drawn from all rows. The figure
    is the share of comparisons in which the user's own pair has the greater number; a tie counts half. If only
    popularity decides what users take, the result is .5.

    ``users`` and ``items``: code of each row's user and item [n], at least 0.

    Returns:
        The share, None for fewer than ``MIN_PAIRS`` pairs.
    """
    if not len(users):
        return None
    users, items = _sampled(users.astype(np.int64), items.astype(np.int64))
    width = int(items.max()) + 1
    pairs = sorted_unique(users * width + items)
    users, items = pairs // width, pairs % width
    # Each user's items are ordered by hash, and the first MAX_USER_ITEMS are kept.
    order = np.lexsort((_hashed(pairs, _ORDER_SEED), users))
    users, items = users[order], items[order]
    first = np.flatnonzero(np.r_[True, users[1:] != users[:-1]])
    place = np.arange(len(users)) - np.repeat(first, np.diff(np.r_[first, len(users)]))
    users, items, place = (column[place < MAX_USER_ITEMS] for column in (users, items, place))
    counting = _hashed(users, _HALF_SEED) < 0.5
    together, counts = _together(users[counting], items[counting], place[counting], width)
    users, items = users[~counting], items[~counting]
    same = users[1:] == users[:-1]
    left, right = items[:-1][same], items[1:][same]
    if len(left) < MIN_PAIRS:
        return None
    drawn = right[np.argsort(_hashed(np.arange(len(right)), _DRAW_SEED))]
    other = drawn != left
    own, chance = (_times(together, counts, left, one, width)[other] for one in (right, drawn))
    return float((own > chance).mean() + 0.5 * (own == chance).mean())


def popularity(earlier: npt.NDArray[Any], newest: npt.NDArray[Any]) -> float | None:
    """Return the correlation between the log counts of items in two parts of the rows; changed ids lower it.

    ``earlier`` and ``newest``: item codes of the rows of each part, at least 0.

    Returns:
        The correlation over items with at least two rows in each part; None for fewer than ``MIN_ITEMS`` such items.
    """
    width = 1 + max(earlier.max(initial=0), newest.max(initial=0))
    counts = np.stack([np.bincount(part, minlength=width) for part in (earlier, newest)])
    counts = counts[:, counts.min(axis=0) >= 2]
    if counts.shape[1] < MIN_ITEMS or not np.ptp(counts, axis=1).all():
        return None
    return float(np.corrcoef(np.log(counts))[0, 1])


def _codes(plan: DataPlan, encoded: Encoded, name: str) -> npt.NDArray[np.int32] | None:
    use = plan.direct(name)
    column = None if use is None else encoded.columns.get(use)
    return None if column is None or isinstance(column, Jagged) else column


def _newest(plan: DataPlan, encoded: Encoded) -> npt.NDArray[np.bool_] | None:
    """Return a mask of the newest rows, bool [rows]: by their times, or else the last rows of a window of days."""
    times = encoded.values.get(order_name(plan.dataset.timestamp or ""))
    if times is not None:
        return times > np.quantile(times, 1.0 - NEWEST)
    if plan.job.dataset.window is None:
        return None
    return np.arange(encoded.num_rows) >= (1.0 - NEWEST) * encoded.num_rows


def _sampled(users: Int64s, items: Int64s) -> tuple[Int64s, Int64s]:
    if len(users) <= MAX_ROWS:
        return users, items
    drawn = _hashed(users, _SAMPLE_SEED) < MAX_ROWS / len(users)
    return users[drawn], items[drawn]


def _together(users: Int64s, items: Int64s, place: Int64s, width: int) -> tuple[Int64s, Int64s]:
    """Return pairs of items (left * width + right, ascending) and the number of users that have both."""
    parts = []
    for distance in range(1, MAX_USER_ITEMS):
        later = np.flatnonzero(place >= distance)
        if not len(later):
            break
        left, right = items[later - distance], items[later]
        parts += [left * width + right, right * width + left]
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    keys = np.sort(np.concatenate(parts))
    first = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    return keys[first], np.diff(np.r_[first, len(keys)])


def _times(together: Int64s, counts: Int64s, left: Int64s, right: Int64s, width: int) -> Int64s:
    if not len(together):
        return np.zeros(len(left), np.int64)
    keys = left * width + right
    at = np.minimum(np.searchsorted(together, keys), len(together) - 1)
    return np.where(together[at] == keys, counts[at], 0)


def _hashed(values: Int64s, seed: int) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) by hash of each value."""
    with np.errstate(over="ignore"):
        return unit_interval(mix(values.astype(np.uint64) + np.uint64(derive_key(seed))))
