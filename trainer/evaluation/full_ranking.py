"""Ranking of all items for each user of a held-out split, for models whose score is <user side, item side>.

Candidates are the items that were trained on, or, with an item table, all its items (trainer.data.prepare.catalogue).
Items that the user had in training are excluded; for the test split, also those that the user had in validation.
Relevant items are the user's held-out positives. A relevant item without a training row is no candidate and is never
found; it counts once for each of its rows, since its id is not kept. Users without a training row are left out.
Features that join on the user are read from the user's first row in the split.

Each rank holds the item side of all candidates and works through its share of the users, in blocks of at most
SCORES_AT_ONCE scores (trainer.sizing.memory has the arithmetic).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from embeddings.kernels.cpu import product
from embeddings.tables.philox import table_key
from trainer.data.batches.order import rank_slice
from trainer.data.batches.sequence_batches import NUM_EVALUATION_NEGATIVES, words
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.hashing import Int64s
from trainer.data.columns.jagged import gather_spans, sorted_unique
from trainer.data.prepare.negatives import SeenItems
from trainer.data.prepare.split import SPLIT_SEED
from trainer.distributed.towers import UserTowerInputs, tower_outputs
from trainer.metrics.ranking import rank_of
from trainer.sizing.memory import RANKED_SCORES, RANKED_USERS

if TYPE_CHECKING:
    from trainer.data.batches.prepared import PreparedData
    from trainer.models.base import RankingModel

SCORES_AT_ONCE = RANKED_SCORES
USERS_AT_ONCE = RANKED_USERS
ROWS_AT_ONCE = 1 << 16
MAX_CANDIDATES_BYTES = 1 << 30
"""Most bytes of the item vectors of a catalogue that is ranked: every rank holds all of them."""


class Ranks(NamedTuple):
    """Ranks of the relevant items of the users that this rank (process) works on.

    ``users``: for each ranked item, its user's row in the table [m]. ``ranks``: its rank among all candidates, from 0;
    inf beyond the largest requested cutoff [m]. ``sampled``: its rank among NUM_EVALUATION_NEGATIVES items that the
    user never had [m], or None. ``relevant_users``: users with relevant items [u]. ``num_relevant``: number of their
    relevant items [u], including items that are no candidates.
    """

    users: Int64s
    ranks: npt.NDArray[np.float64]
    sampled: npt.NDArray[np.float64] | None
    relevant_users: Int64s
    num_relevant: Int64s


class HeldOut:
    """Relevant items and excluded candidates for this rank's share of a split's users.

    ``known``: table -> flags of the rows that count, bool [rows]; users and items with other rows are left out.
    ``max_users``: most users on all ranks together, chosen evenly; None: all users.
    """

    def __init__(
        self, data: PreparedData, split: str, rank: int, world_size: int, *,
        known: Mapping[str, npt.NDArray[np.bool_]] | None = None, max_users: int | None = None,
    ):  # fmt: skip
        keys = {key.name: key for key in data.keys}
        self.user_key, self.item_key = keys["user"], keys["item"]
        self._seen, self.items = data.seen_items
        self._position, self._data = None, data
        if data.catalogue is None:
            self._position = np.full(data.tables[self.item_key.table].num_rows, -1, dtype=np.int64)
            self._position[self.items] = np.arange(len(self.items))
        self._known_users: npt.NDArray[np.bool_] | None = None
        self.left_out = np.empty(0, dtype=np.int64)
        """Positions of the candidates that are not ``known`` [n]."""
        if known is not None:
            codes = self.items if data.catalogue is None else data.catalogue.rows[self.items]
            self._known_users = known[self.user_key.table]
            self.left_out = np.flatnonzero(~known[self.item_key.table][codes])
        users, positions, unknown = self._positives(split)
        everyone = sorted_unique(np.concatenate([users, unknown]))
        if max_users is not None:
            everyone = everyone[:: max(1, -(-len(everyone) // max_users))]
        first, last = rank_slice(len(everyone), rank, world_size)
        self.users = everyone[first:last]
        self.rounds_of = -(-len(everyone) // world_size)
        """Largest number of users on a rank."""
        excluded = [self._trained()]
        if split == "test":
            excluded.append(self._of_own(*self._positives("validation")[:2]))
        relevant, number = self._numbered(users, positions)
        self._excluded = sorted_unique(np.concatenate(excluded))
        is_shown = ~np.isin(relevant, self._excluded)
        self.relevant, self.numbers = relevant[is_shown], number[is_shown]
        misses = np.bincount(
            np.searchsorted(self.users, unknown[np.isin(unknown, self.users)]), minlength=len(self.users)
        )
        self.num_relevant = np.bincount(self.relevant // len(self.items), minlength=len(self.users)) + misses

    def _positives(self, split: str) -> tuple[Int64s, Int64s, Int64s]:
        """Return (user rows, candidate positions) of a split's positives, and user rows of other positives.

        The other positives are those whose item is no candidate.
        """
        data = self._data
        users = np.asarray(data.column(split, self.user_key)).astype(np.int64)
        if self._position is None:
            positions = np.asarray(data.item_places(split)).astype(np.int64)
        else:
            positions = self._position[np.asarray(data.column(split, self.item_key))]
        known = (np.asarray(data.labels(split)) == 1) & (users >= NUM_SPECIAL_ROWS)
        if self._known_users is not None:
            known &= self._known_users[users] & (positions >= 0) & ~np.isin(positions, self.left_out)
        is_candidate = known & (positions >= 0)
        return users[is_candidate], positions[is_candidate], users[known & (positions < 0)]

    def _of_own(self, users: Int64s, positions: Int64s) -> Int64s:
        """Return the pairs of this rank's users as (index of the user) * (number of candidates) + position, ascending.

        ``users``: user rows of pairs [n]; ``positions``: positions of their items among the candidates [n].
        """
        own = np.isin(users, self.users)
        return sorted_unique(np.searchsorted(self.users, users[own]) * len(self.items) + positions[own])

    def _numbered(self, users: Int64s, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the pairs of :meth:`_of_own`, and each pair's number among all ranks' pairs, int64.

        The number seeds the draws of negatives for the pair.
        """
        pairs = sorted_unique(users * len(self.items) + positions)
        user = pairs // len(self.items)
        own = np.isin(user, self.users)
        return np.searchsorted(self.users, user[own]) * len(self.items) + pairs[own] % len(self.items), np.flatnonzero(
            own
        )

    def _trained(self) -> Int64s:
        starts = self._seen.starts
        had = gather_spans(self._seen.shifted, starts[self.users], starts[self.users + 1] - starts[self.users])
        counts = np.repeat(np.arange(len(self.users)), had.lengths)
        rank_of_item = np.arange(len(had.values)) - np.repeat(had.offsets[:-1], had.lengths)
        return counts * len(self.items) + (had.values + rank_of_item - self.users[counts] * len(self.items))

    def excluded(self, first: int, last: int) -> tuple[Int64s, Int64s]:
        """Return (user's index minus ``first``, candidate position) of candidates excluded for users [first, last)."""
        return self._cut(self._excluded, first, last)

    def relevant_of(self, first: int, last: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return (user's index minus ``first``, candidate position, number of the pair) of relevant items.

        The result has the relevant items of the users [first, last).
        """
        begin, end = np.searchsorted(self.relevant, (first * len(self.items), last * len(self.items)))
        return *self._cut(self.relevant, first, last), self.numbers[begin:end]

    def _cut(self, pairs: Int64s, first: int, last: int) -> tuple[Int64s, Int64s]:
        begin, end = np.searchsorted(pairs, (first * len(self.items), last * len(self.items)))
        return pairs[begin:end] // len(self.items) - first, pairs[begin:end] % len(self.items)

    def unseen(self) -> SeenItems:
        """Return the items that each of this rank's users had in any split, as :class:`SeenItems`.

        Negatives are drawn from all other items, as for sequence models.
        """
        every = [self._excluded, *(self._of_own(*self._positives(split)[:2]) for split in ("validation", "test"))]
        pairs = np.concatenate(every)
        return SeenItems.from_pairs(pairs // len(self.items), pairs % len(self.items), len(self.users), len(self.items))


@torch.no_grad()
def catalogue_ranks(
    model: RankingModel, data: PreparedData, split: str, *, largest_k: int, sampled: bool,
    rank: int = 0, world_size: int = 1, device: torch.device | None = None, max_users: int | None = None,
) -> Ranks | None:  # fmt: skip
    """Rank all items for this rank's users. Collective. None on every rank if the catalogue is too large.

    ``model`` has ``user_side`` and ``item_side`` (trainer.models.base). ``largest_k``: largest cutoff of the metrics.
    ``sampled``: True to rank among sampled items too. In a tie the relevant item ranks last, so that a model that
    scores all items alike finds none.
    """
    held = HeldOut(data, split, rank, world_size, max_users=max_users)
    return ranks_of_held_out(model, data, split, held, largest_k=largest_k, sampled=sampled, device=device)


@torch.no_grad()
def ranks_of_held_out(
    model: RankingModel, data: PreparedData, split: str, held: HeldOut, *, largest_k: int, sampled: bool = False,
    device: torch.device | None = None,
) -> Ranks | None:  # fmt: skip
    """Rank the candidates of ``held`` for its users, as :func:`catalogue_ranks` does. Collective."""
    device = device or torch.device("cpu")
    candidates = _item_side(model, data, held, device)
    if candidates is None:
        return None
    context = UserTowerInputs(data, split)

    def queries(users: Int64s) -> Tensor:
        found: Tensor = model.user_side(context.bags(users).to(device))
        return found

    return _ranks(held, split, candidates, queries, largest_k, sampled=sampled)


def ranks_by_popularity(data: PreparedData, split: str, held: HeldOut, *, largest_k: int) -> Ranks:
    """Rank the candidates of ``held`` by their numbers of training rows, in the same order for each user."""
    codes = held.items if data.catalogue is None else data.catalogue.rows[held.items]
    counts = torch.from_numpy(np.asarray(data.row_counts(held.item_key.table))[codes].astype(np.float32))
    if data.catalogue is not None:
        counts[torch.from_numpy(np.asarray(codes, np.int64) < NUM_SPECIAL_ROWS)] = 0.0
    return _ranks(held, split, counts[:, None], lambda users: torch.ones(len(users), 1), largest_k, sampled=False)


def _ranks(
    held: HeldOut, split: str, candidates: Tensor, queries_of: Callable[[Int64s], Tensor], largest_k: int, *,
    sampled: bool,
) -> Ranks:  # fmt: skip
    device, not_known = candidates.device, torch.from_numpy(held.left_out).to(candidates.device)
    key, unseen = table_key(SPLIT_SEED, split), held.unseen() if sampled else None
    size = max(1, min(USERS_AT_ONCE, SCORES_AT_ONCE // max(1, len(held.items))))
    parts: list[tuple[npt.NDArray[Any], ...]] = []
    for first in range(0, held.rounds_of, size):
        last = min(first + size, len(held.users))
        own = held.users[first:last]
        queries = queries_of(own)
        if not len(own):
            continue
        # Always the same shape: the order of summation may depend on it, and blocks differ between ranks.
        padded = queries.new_zeros(size, queries.shape[1])
        padded[: len(own)] = queries
        scores = product(padded, candidates.T)[: len(own)]
        user, candidate, number = held.relevant_of(first, last)
        against = None
        if unseen is not None:
            drawn = words(key, 0, number, NUM_EVALUATION_NEGATIVES)
            owners = np.repeat(user + first, NUM_EVALUATION_NEGATIVES)
            negatives = unseen.draw(owners, drawn.reshape(-1)).reshape(drawn.shape)
            rows = torch.from_numpy(user).to(device)
            others = scores[rows[:, None], torch.from_numpy(negatives).to(device)]
            against = rank_of(scores[rows, torch.from_numpy(candidate).to(device)], others).cpu().numpy()
        left_out = tuple(torch.from_numpy(part).to(device) for part in held.excluded(first, last))
        scores[left_out] = -torch.inf
        scores[:, not_known] = -torch.inf
        order, ranks = ranks_of_relevant(scores, user, candidate, largest_k)
        if against is not None:
            against = against[order].astype(np.float64)
        parts.append((own[user[order]], ranks, *(() if against is None else (against,))))
    empty = (np.empty(0, np.int64), np.empty(0), *((np.empty(0),) if sampled else ()))
    users, ranks, *rest = (np.concatenate(arrays) for arrays in zip(*(parts or [empty]), strict=True))
    has = held.num_relevant > 0
    return Ranks(users, ranks, rest[0] if rest else None, held.users[has], held.num_relevant[has])


def ranks_of_relevant(
    scores: Tensor, user: Int64s, candidate: Int64s, largest_k: int
) -> tuple[Int64s, npt.NDArray[np.float64]]:
    """Return (order, ranks) of relevant items: indices that sort them by user and then best first, and ranks, each [m].

    ``scores``: [users, candidates], -inf for excluded candidates. ``user``, ``candidate``: row and column of each
    relevant item [m]; ``user`` must ascend. Once an item of a user has a rank of at least ``largest_k``, the user's
    worse items have rank inf.
    """
    target = (
        scores[torch.from_numpy(user).to(scores.device), torch.from_numpy(candidate).to(scores.device)].cpu().numpy()
    )
    order = np.lexsort((candidate, -target.astype(np.float64), user))  # NaN last
    user, target = user[order], target[order]
    starts = np.flatnonzero(np.r_[True, user[1:] != user[:-1]]) if len(user) else np.empty(0, np.int64)
    lengths = np.diff(np.append(starts, len(user)))
    # Relevant items of equal score have consecutive ranks, after all other items of that score.
    new = np.r_[True, (user[1:] != user[:-1]) | (target[1:] != target[:-1])] if len(user) else np.empty(0, bool)
    block = np.cumsum(new) - 1
    last_of_block = np.append(np.flatnonzero(new)[1:], len(user)) - 1
    ties_after = last_of_block[block] - np.arange(len(user)) if len(user) else np.empty(0, np.int64)
    ranks = np.full(len(user), np.inf)
    active = np.arange(len(starts))
    number = 0
    while len(active):
        at = starts[active] + number
        rows = scores if len(active) == len(scores) else scores[torch.from_numpy(user[at]).to(scores.device)]
        goal = torch.from_numpy(target[at]).to(scores.device)
        # Less one, because the item itself is not below itself.
        above = rows.shape[1] - _num_below(rows, goal) - 1
        ranks[at] = above - ties_after[at]
        number += 1
        active = active[(ranks[at] < largest_k) & (lengths[active] > number)]
    return order, ranks


def _num_below(rows: Tensor, goal: Tensor) -> Int64s:
    """Return for each row of ``rows`` [n, m] the number of entries below the row's ``goal`` [n]."""
    if rows.device.type != "cpu":
        return (rows < goal[:, None]).sum(1).cpu().numpy()
    # torch's sum of booleans takes eight times as long on a CPU.
    with np.errstate(invalid="ignore"):
        return np.count_nonzero(rows.numpy() < goal[:, None].numpy(), axis=1)


def _item_side(model: RankingModel, data: PreparedData, held: HeldOut, device: torch.device) -> Tensor | None:
    parts: list[Tensor] = []
    for start in range(0, len(held.items), ROWS_AT_ONCE):
        items = held.items[start : start + ROWS_AT_ONCE]
        if data.catalogue is None:
            part = model.item_side(single_bags([key.name for key in data.keys], "item", items).to(device))
        else:
            part = tower_outputs(model, data, items, device)
        if len(held.items) * part.shape[1] * part.element_size() > MAX_CANDIDATES_BYTES:
            return None
        parts.append(part)
    return torch.cat(parts)


def single_bags(names: list[str], name: str, rows: npt.NDArray[np.integer]) -> KeyedJaggedTensor:
    """Return samples that have one row of feature ``name`` each, and empty bags of the other features."""
    lengths = np.zeros((len(names), len(rows)), dtype=np.int64)
    lengths[names.index(name)] = 1
    return KeyedJaggedTensor(
        keys=list(names),
        values=torch.from_numpy(np.array(rows, dtype=np.int64)),
        lengths=torch.from_numpy(lengths.ravel()),
        offsets=torch.from_numpy(np.append(0, np.cumsum(lengths.ravel()))),
        stride=len(rows),
    )
