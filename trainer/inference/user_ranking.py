"""Top items for each user of rows, by a model whose score is a product of a user's and an item's vector."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from trainer.checkpoint.warm_start import id_maps, vectors_read
from trainer.data.batches.keys import read_features
from trainer.data.columns import values
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.row_encoder import EncodedRows, RowEncoder
from trainer.data.columns.vocabulary import Codes
from trainer.data.errors import DataError
from trainer.data.sources.item_table import item_file
from trainer.data.sources.source import Chunk, Source
from trainer.inference.parquet_scoring import chunk_of
from trainer.inference.scorer import RANKED_ROWS
from trainer.inference.top_items import TopItems
from trainer.models.base import RankingModel

if TYPE_CHECKING:
    from trainer.inference.predict import Predictor

_ITEMS_AT_ONCE = 1 << 16


class UserRanking:
    """The ``k`` items of highest score for the user of each row; it scores files as a Scorer does.

    Rows have the user, and the other features of its side of the score. If they have the item's column, it holds lists
    of items that the user had, which are left out. Candidates are the items that training knows: by a row of their own,
    or by their features in the item table. A row none of whose ids is known gets empty lists.

    Args:
        predictor: the model; its ``ranks_all_items`` is true.
        k: largest number of items for a user.

    Raises:
        DataError: only hashes of the model's items are known.
    """

    def __init__(self, predictor: Predictor, k: int):
        self._predictor = predictor
        dataset, job = predictor.run.dataset, predictor.job
        features = read_features(dataset, job)
        ids = {name: one.ids for name, one in id_maps(predictor.checkpoint).items()}
        vectors = vectors_read(predictor.checkpoint)
        of_rows = dataset.model_copy(update={"items": None})
        of_items = {key.name for key in predictor.keys if key.of_item}
        num_of_rows = len(predictor.numeric) - dataset.num_item_numbers
        self.encoder = RowEncoder(
            of_rows,
            {name: feature for name, feature in features.items() if name != "item" and name not in of_items},
            ids,
            numeric=predictor.numeric[:num_of_rows],
            vectors=[one for one in vectors if not one.of_item],
            history_source=predictor.history_source,
        )
        self._items = RowEncoder(
            dataset,
            {name: feature for name, feature in features.items() if name == "item" or name in of_items},
            ids,
            numeric=predictor.numeric[num_of_rows:],
            vectors=[one for one in vectors if one.of_item],
        )
        table = features["item"].shares or "item"
        if pa.types.is_uint64(ids[table].type):
            raise DataError(
                "keeps hashes of its items' ids, which cannot be named",
                where=str(predictor.checkpoint.path),
                remedy="predict rows of users and items, without --k",
            )
        catalogue = self._catalogue(ids[table])
        self._item_column = dataset.column_of("item")
        sides, known = self._item_sides(catalogue)
        catalogue, sides = catalogue.filter(pa.array(known)), sides[known]
        lists = features["item"].model_copy(update={"type": "id_list"})
        self._had = RowEncoder(of_rows, {"item": lists}, {table: catalogue})
        special = np.zeros((NUM_SPECIAL_ROWS, sides.shape[1]), dtype=np.float32)
        self._top = TopItems(np.concatenate([special, sides]), catalogue, k)

    @property
    def outputs(self) -> dict[str, pa.DataType]:
        return {"items": pa.list_(self._top.ids.type), "scores": pa.list_(pa.float32())}

    @property
    def text_columns(self) -> Collection[str]:
        return {*self.encoder.text_columns, *self._had.text_columns}

    @property
    def id_columns(self) -> Collection[str]:
        return self.encoder.id_columns

    def columns(self, there: Sequence[str], where: str) -> list[str]:
        had = [self._item_column] if self._item_column in there else []
        return [*self.encoder.columns(there, where), *had]

    def check_events(self, source: Source) -> None:
        """Check that rows of single events can be gathered by user.

        Raises:
            DataError: a feature may differ between rows of a user.
        """
        dataset = self._predictor.run.dataset
        user = dataset.column_of("user")
        others = [name for name in self.encoder.columns(source.column_names(), source.uri) if name != user]
        if others:
            raise DataError(
                f"has rows of single items, and a user's scores depend on {', '.join(map(repr, others))}",
                where=source.uri,
                remedy=f"give a row for each user, without '{self._item_column}' or with lists of items to leave out",
            )

    def score(self, chunk: Chunk) -> tuple[list[pa.Array], EncodedRows]:
        coded = self.encoder.encode(chunk)
        had: Any = Jagged(np.empty(0, np.int64), np.zeros(len(chunk) + 1, np.int64))
        if self._item_column in chunk.batch.schema.names:
            had = self._had.encode(chunk).rows["item"]
        parts = [
            self._rank(coded.part(start, stop), had.part(start, stop))
            for start in range(0, len(chunk), RANKED_ROWS)
            for stop in [min(start + RANKED_ROWS, len(chunk))]
        ]
        columns = zip(*parts, strict=True) if parts else ((), ())
        return [
            pa.concat_arrays([pa.array([], type_), *column])
            for type_, column in zip(self.outputs.values(), columns, strict=True)
        ], coded

    @torch.no_grad()
    def _rank(self, coded: EncodedRows, had: Jagged) -> tuple[pa.Array, pa.Array]:
        model: RankingModel = self._predictor.model
        features = self._predictor.features(coded)
        queries = model.user_side(features, None if coded.dense is None else torch.from_numpy(coded.dense))
        offsets = model.user_offsets(features)
        return self._top.of(queries.numpy(), had, _is_known(coded), None if offsets is None else offsets.numpy())

    def _catalogue(self, trained: pa.Array) -> pa.Array:
        """Return the ids of the item table, then of other items with a row; ``trained``: the ids with a row."""
        items = item_file(self._predictor.run.dataset, ())
        if items is None:
            return trained
        kind: values.Kind = "int" if pa.types.is_int64(trained.type) else "string"
        ids = values.as_ids(items.ids, kind, f"{items.source.uri}, column of ids")
        found = Codes(trained).encode(ids)
        is_other = np.ones(len(trained), dtype=bool)
        is_other[found[found >= 0]] = False
        return pa.concat_arrays([ids.cast(trained.type), trained.filter(pa.array(is_other))])

    @torch.no_grad()
    def _item_sides(self, ids: pa.Array) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Return the item side of the score of ``ids``, float32 [n, d], and a mask of the items that training knows."""
        model: RankingModel = self._predictor.model
        sides, known = [], []
        for coded in self._encoded(ids):
            dense = None if coded.dense is None else torch.from_numpy(coded.dense)
            sides.append(model.item_side(self._predictor.features(coded), dense).numpy())
            known.append(_is_known(coded, self._items))
        return np.concatenate(sides), np.concatenate(known)

    def _encoded(self, ids: pa.Array) -> Iterator[EncodedRows]:
        for start in range(0, max(len(ids), 1), _ITEMS_AT_ONCE):
            table = pa.table({self._item_column: ids.slice(start, _ITEMS_AT_ONCE)})
            yield self._items.encode(chunk_of(table, "the catalogue"))


def _is_known(coded: EncodedRows, encoder: RowEncoder | None = None) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows with an id that training knows, or with a number or vector, bool [b].

    If an encoder is given, only its vectors count, if they are not zero: numbers do not identify an item.
    """
    known = np.zeros(coded.num_rows, dtype=bool)
    for rows in coded.rows.values():
        if isinstance(rows, Jagged):
            owners = np.repeat(np.arange(coded.num_rows), rows.lengths)
            known[owners[rows.values >= NUM_SPECIAL_ROWS]] = True
        else:
            known |= rows >= NUM_SPECIAL_ROWS
    if coded.dense is None:
        return known
    if encoder is None:
        return known | bool(coded.dense.shape[1])
    for name in encoder.vector_names:
        known |= coded.dense[:, encoder.dense_columns[name]].any(axis=1)
    return known
