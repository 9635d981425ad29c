"""Reader of models that ``evenkeel export`` wrote: it scores rows with numpy, pyarrow and onnxruntime, without torch.

model = Exported("my-export")
scores = model.predict(table)        # logit and probability for each row
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.batches.keys import Key, keys_of, read_features
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.numeric import numeric_of
from trainer.data.columns.row_encoder import EncodedRows, RowEncoder
from trainer.data.columns.vectors import vectors_from
from trainer.data.sources.item_table import ITEM_TABLE
from trainer.inference.manifest import SealError, unseal
from trainer.inference.scorer import Float32s, RowScorer
from trainer.inference.top_items import TopItems
from trainer.output_calibration.registry import of_json
from trainer.spec import parse_dataset, parse_job
from trainer.spec.label_tasks import label_tasks
from trainer.storage.destinations import fetch, is_stored

FORMAT, FORMAT_VERSION = "evenkeel-export", 1
CALIBRATED_VERSION = 2
"""Format version of exports with ``output_calibration``, which are otherwise as in version 1."""
ONNX_FILE = "dense.onnx"
ITEM_FILE = "items.parquet"
LENGTHS, DENSE = "__lengths", "dense"


class Exported(RowScorer):
    """An exported model. Rows of embedding tables are read from their files when they are needed.

    Histories are read from a column with the feature's name: an export has no earlier rows to derive them from.

    Args:
        directory: the folder of the export, or its URI in a run storage, from which it is fetched.
        sha256: checksum that the manifest must have, as ``evenkeel export`` printed it; None: files are only checked
            against the folder's own manifest.
        k: number of items for each user, for a sequence model.

    Raises:
        SealError: a file is missing or was changed, or the folder has another format version.
        StorageError: the run storage cannot be reached.
        ImportError: onnxruntime is not installed.

    Example:
        >>> from trainer.inference.exported_model import Exported
        >>> model = Exported(folder)  # what `evenkeel export` wrote; needs neither torch nor the run
        >>> model.predict(rows).column_names
        ['logit', 'probability']
    """

    def __init__(self, directory: Path | str, *, sha256: str | None = None, k: int = 10):
        folder = Path(directory)
        if is_stored(directory):
            folder = Path(tempfile.mkdtemp(prefix="evenkeel-export-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            fetch(str(directory), folder)
        manifest = unseal(folder, sha256)
        versions = (FORMAT_VERSION, CALIBRATED_VERSION)
        if manifest.get("format") != FORMAT or manifest.get("format_version") not in versions:
            raise SealError(
                f"{folder} is {manifest.get('format')} version {manifest.get('format_version')}, this version reads "
                f"{FORMAT} {' and '.join(map(str, versions))}: use the version of evenkeel that wrote it, or export "
                "again"
            )
        self.manifest = manifest
        job = parse_job(manifest["job"], str(folder), stored=True)
        dataset = parse_dataset(manifest["dataset"], str(folder))
        if not manifest["onnx"]["written"]:
            raise SealError(
                f"{folder} has no {ONNX_FILE} ({manifest['onnx']['reason']}): load dense.pt2 with torch.export.load"
            )
        self._session = _session(folder / ONNX_FILE)
        self._used = {one.name for one in self._session.get_inputs()}
        tables = {name: _Table(folder / f"table-{name}.arrow") for name in manifest["tables"]}
        features = read_features(dataset, job)
        self._keys: list[Key] = [key for key in keys_of(dataset, job) if key.name in features]
        self._vectors = {name: table.column("vector") for name, table in tables.items()}
        joins = {
            name: str(folder / f"join-{name}.parquet") for name, feature in features.items() if feature.join is not None
        }
        if (folder / ITEM_FILE).exists():
            joins[ITEM_TABLE] = str(folder / ITEM_FILE)
        top = None
        if job.model.reads_sequences:
            items = tables[self._keys[0].table]
            top = TopItems(items.column("candidate" if "candidate" in items.names else "vector"), items.ids, k)
        ids = {name: table.ids for name, table in tables.items()}
        numeric = [numeric_of(one) for one in manifest["numeric"]]
        vectors = vectors_from(manifest.get("vectors", []))
        encoder = RowEncoder(dataset, features, ids, numeric=numeric, vectors=vectors, joins=joins)
        calibrators = {name: of_json(one) for name, one in manifest.get("output_calibration", {}).items()}
        super().__init__(job, encoder, top, label_tasks(dataset), calibrators)

    def _forward(self, coded: EncodedRows) -> Float32s:
        if not coded.num_rows:
            return np.empty(0, dtype=np.float32)
        inputs: dict[str, npt.NDArray[Any]] = {}
        layout = self.manifest["layout"]
        for key in self._keys:
            rows, vectors = coded.rows[key.name], self._vectors[key.table]
            if isinstance(rows, Jagged):
                inputs[key.name + LENGTHS] = rows.lengths
            if layout == "pooled":
                inputs[key.name] = pooled(vectors, rows, key.pooling, coded.weights.get(key.name))
            elif layout == "sequence":
                assert isinstance(rows, Jagged)
                inputs[key.name] = padded(vectors, rows, self.manifest["length"])
            else:
                inputs[key.name] = vectors[rows.values if isinstance(rows, Jagged) else rows]
        if coded.dense is not None:
            inputs[DENSE] = coded.dense
        return self._session.run(None, {name: value for name, value in inputs.items() if name in self._used})[0]


def pooled(
    vectors: Float32s, rows: npt.NDArray[np.int64] | Jagged, pooling: str, weights: Float32s | None = None
) -> Float32s:
    """Return one vector for each sample [b, dim]: the row of its id, or the sum or mean of its list's rows.

    ``vectors``: rows of the table. ``rows``: row numbers [b], or lists of them. ``weights``: if given, factors of the
    lists' rows. An empty list gives zeros.
    """
    if not isinstance(rows, Jagged):
        return np.asarray(vectors[rows])
    lengths = rows.lengths
    out = np.zeros((len(lengths), vectors.shape[1]), dtype=np.float32)
    filled = lengths > 0
    if filled.any():
        list_rows = vectors[rows.values] if weights is None else vectors[rows.values] * weights[:, None]
        sums = np.add.reduceat(list_rows, rows.offsets[:-1][filled], axis=0)
        out[filled] = sums / lengths[filled, None].astype(np.float32) if pooling == "mean" else sums
    return out


def padded(vectors: Float32s, rows: Jagged, length: int) -> Float32s:
    """Return the embedding rows of lists of row numbers, [b, length, dim], oldest first, followed by zeros."""
    lengths = rows.lengths
    out = np.zeros((len(lengths), length, vectors.shape[1]), dtype=np.float32)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    out[owner, np.arange(len(rows.values)) - rows.offsets[:-1][owner]] = vectors[rows.values]
    return out


class _Table:
    """File of an embedding table, memory-mapped."""

    def __init__(self, path: Path):
        with pa.memory_map(str(path)) as file:
            self._batch = pa.ipc.open_file(file).get_batch(0)
        self.ids = self._batch.column(0).slice(NUM_SPECIAL_ROWS)
        self.names = self._batch.schema.names

    def column(self, name: str) -> Float32s:
        column = self._batch.column(name)
        return column.flatten().to_numpy().reshape(len(column), column.type.list_size)


def _session(path: Path) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise ImportError(f"{path} runs in onnxruntime, which is not installed: pip install onnxruntime") from None
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
