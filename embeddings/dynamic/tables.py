"""Embedding tables that are looked up by raw 64-bit ids: new ids get rows, and old ids lose theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from embeddings.dynamic.id_map import DynamicIdMap
from embeddings.dynamic.settings import FIRST_ROW, UNKNOWN_ROW, IdMapSettings
from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import RowOptimizer
from embeddings.tables.config import TableConfig


class DynamicTables(torch.nn.Module):
    """EmbeddingTables of which some, the dynamic tables, are looked up by raw ids instead of row numbers.

    In training, ids get rows by the rules of :class:`IdMapSettings`; in evaluation mode no id gets or loses a row. An
    id without a row reads row 1, the row of unknown ids. A row that passes to another id starts with initial values.

    Args:
        settings: settings of each dynamic table, keyed by name. Such a table has ``grows`` and ``settings.num_rows``
            rows. Tables left out are looked up by row numbers, as in EmbeddingTables.
        tables: as in EmbeddingTables.
        optimizer, options: as in EmbeddingTables.

    Attributes:
        tables: the EmbeddingTables with rows, state and optimizer. Row e + 2 belongs to entry e of ``ids``.
        ids: the :class:`DynamicIdMap` of each dynamic table, keyed by name.

    Example:
        >>> import torch
        >>> from embeddings import InitConfig, TableConfig
        >>> from embeddings.dynamic.settings import IdMapSettings
        >>> from embeddings.dynamic.tables import DynamicTables
        >>> from embeddings.optim import AdamAR
        >>> settings = IdMapSettings(capacity=1000, ttl_steps=50_000)
        >>> item = TableConfig("item", settings.num_rows, 16, ("item",), init=InitConfig("hash"), grows=True)
        >>> tables = DynamicTables({"item": settings}, [item], AdamAR(alpha=1e-4))
        >>> pooled = tables(torch.tensor([2**61, -5]), torch.tensor([0, 1, 2]))  # in training new ids get rows
        >>> pooled.sum().backward()
        >>> tables.step(1)
        >>> ids, vectors = tables.vectors("item")  # ids that have a row, and their rows
        >>> sorted(ids.tolist()), tuple(vectors.shape)
        ([-5, 2305843009213693952], (2, 16))
        >>> tables.take_gone("item").tolist()  # ids that lost their row since the last call
        []
    """

    def __init__(
        self,
        settings: Mapping[str, IdMapSettings],
        tables: Sequence[TableConfig],
        optimizer: RowOptimizer,
        **options: Any,
    ) -> None:
        super().__init__()
        for table in tables:
            num_rows = settings[table.name].num_rows if table.name in settings else None
            if table.grows != (num_rows is not None) or num_rows not in (None, table.num_rows):
                raise ValueError(
                    f"table '{table.name}' has {table.num_rows} rows and grows={table.grows}, but its settings "
                    f"{'are not given' if num_rows is None else f'need {num_rows} rows and grows=True'}"
                )
            if table.grows and table.first_live_row != FIRST_ROW:
                raise ValueError(f"table '{table.name}' grows: its rows 0 and 1 must be padding and unknown ids")
        self.tables = EmbeddingTables(tables, optimizer, **options)
        self.features = self.tables.features
        self._names = tuple(table.name for table in tables)
        if missing := sorted(set(settings) - set(self._names)):
            raise ValueError(f"settings names tables {missing}, which do not exist (there are {list(self._names)})")
        self.ids = {name: DynamicIdMap(settings[name]) for name in self._names if name in settings}
        self._gone: dict[str, list[np.ndarray]] = {name: [] for name in self.ids}

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Look up rows as EmbeddingTables does.

        ``indices``, int64 [n], are raw ids for features of dynamic tables, and row numbers for other features.
        """
        return self.tables(self.rows_of(indices, offsets), offsets, per_sample_weights)  # type: ignore[no-any-return]

    def rows_of(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return the row numbers of raw ids, int64 [n]; in training mode this call gives rows to ids and evicts ids.

        Raises:
            ValueError: ``indices`` are not int64, or ``offsets`` are not [F * B + 1].
        """
        if indices.dtype != torch.int64:
            raise ValueError(f"raw ids must be int64, not {indices.dtype}: hash strings to 64 bits first")
        rows = indices.detach().cpu().clone()
        num_features, layout = len(self.features), self.tables.layout
        if offsets.dim() != 1 or (offsets.numel() - 1) % num_features:
            raise ValueError(f"offsets must be [F * B + 1] with F = {num_features} features, not {list(offsets.shape)}")
        if offsets.numel() == 1:
            return rows
        ends = offsets[:: (offsets.numel() - 1) // num_features].tolist()
        for t, table in enumerate(layout.tables):
            if table.name not in self.ids:
                continue
            numbers = [slot.number for slot in layout.descriptors if slot.table == t]
            part = rows[ends[numbers[0]] : ends[numbers[-1] + 1]]
            part.copy_(torch.from_numpy(self._rows(table.name, part.numpy())))
        return rows.to(indices.device)

    def _rows(self, name: str, raw: np.ndarray) -> np.ndarray:
        ids = self.ids[name]
        if self.training:
            given = ids.assign(raw, self.tables.completed_steps + 1)
            entries = given.entries
            if len(given.new_entries):
                rows = torch.from_numpy(given.new_entries + FIRST_ROW)
                self.tables.renew(name, rows, given.new_ids.view(np.uint64))
            if len(given.gone_ids):
                self._gone[name].append(given.gone_ids)
        else:
            entries = ids.find(raw)
        return np.where(entries < 0, UNKNOWN_ROW, entries + FIRST_ROW)

    def step(self, k: int, scale: float = 1.0) -> None:
        """Apply the step as :meth:`EmbeddingTables.step` does."""
        self.tables.step(k, scale)

    def take_gone(self, name: str) -> np.ndarray:
        """Return the ids of a dynamic table that lost their row since the last call, int64 [n], in order of loss.

        Some may have a row again. A service can drop the vectors of the others.
        """
        gone, self._gone[name] = self._gone[name], []
        return _joined(gone)

    def vectors(self, name: str, *, decay: bool = True) -> tuple[np.ndarray, torch.Tensor]:
        """Return (ids int64 [n], their current rows [n, dim]) of a dynamic table, for publication."""
        entries, raw = self.ids[name].ids()
        return raw, self.tables.read(name, torch.from_numpy(entries + FIRST_ROW), decay=decay)

    def state_for_checkpoint(self) -> dict[str, Any]:
        """Return copies of all state that training needs to continue.

        The state has step counts, the id map of each dynamic table, the ids that :meth:`take_gone` would return, and
        all rows that ever belonged to an id.
        """
        return {
            "completed_steps": self.tables.completed_steps,
            "birth_step": self.tables.birth_step,
            "ids": {name: ids.state() for name, ids in self.ids.items()},
            "gone": {name: _joined(gone) for name, gone in self._gone.items()},
            "tables": {
                name: {part: rows[: self._num_used(name)].clone() for part, rows in self._parts(name).items()}
                for name in self._names
            },
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_for_checkpoint` returned.

        Raises:
            ValueError: the state is of other tables, or damaged; nothing has changed then.
        """
        if state["ids"].keys() != self.ids.keys() or state["tables"].keys() != set(self._names):
            raise ValueError(f"the state is of tables {sorted(state['tables'])}, these are {sorted(self._names)}")
        loaded = {name: DynamicIdMap(ids.settings) for name, ids in self.ids.items()}
        for name, ids in loaded.items():
            ids.load(state["ids"][name])
        for name, given in state["tables"].items():
            parts = self._parts(name)
            count = FIRST_ROW + loaded[name].num_used if name in loaded else len(parts["weight"])
            expected_shapes = {part: (count, *rows.shape[1:]) for part, rows in parts.items()}
            shapes = {part: tuple(rows.shape) for part, rows in given.items()}
            if shapes != expected_shapes:
                raise ValueError(f"table '{name}': the state has rows of shapes {shapes}, not {expected_shapes}")
        for name, given in state["tables"].items():
            for part, rows in self._parts(name).items():
                # Rows that never belonged to an id stay 0.
                rows[len(given[part]) : self._num_used(name)] = 0
                rows[: len(given[part])] = given[part]
        # States of earlier releases lack the ids that lost their row.
        gone = state.get("gone", {})
        self.ids, self._gone = loaded, {name: [gone[name]] if name in gone else [] for name in loaded}
        self.tables.discard()
        self.tables.birth_step, self.tables.completed_steps = state["birth_step"], state["completed_steps"]

    def _num_used(self, name: str) -> int:
        """Return the number of rows of a table up to the last that ever belonged to an id."""
        return FIRST_ROW + self.ids[name].num_used if name in self.ids else len(self.tables.weight(name))

    def _parts(self, name: str) -> dict[str, torch.Tensor]:
        return {"weight": self.tables.weight(name), **self.tables.state(name)}


def _joined(gone: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.int64), *gone])
