"""``evenkeel export``: a job's model as a folder that needs neither torch nor this run.

``python -m trainer.inference.export RUN_DIR [PLACE] [--checkpoint best|last|STEP]``. PLACE is a directory, or a URI of
a run storage. Default: ``exports/step-STEP`` in the run's storage. The folder holds (docs/guides/using_models.md):

    manifest.json         spec, versions, inputs, and every file's sha256
    table-NAME.arrow      raw ids, and embedding rows as the model reads them, in the order of the table's rows
    dense.onnx            the dense part, from looked-up rows to scores, if ONNX can express it
    dense.pt2             the dense part as a program of torch.export
    dense.safetensors     the dense part's weights, keyed by name
    join-FEATURE.parquet  the joined column of each feature that has a join
    items.parquet         the item table, if it has numbers or vectors
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import save

from embeddings.durable_files import appearing
from trainer.checkpoint.select import LAST
from trainer.checkpoint.warm_start import id_maps, vectors_read
from trainer.data.batches.keys import read_features
from trainer.data.errors import DataError
from trainer.data.sources.source import Source, beside
from trainer.inference import command_line
from trainer.inference.exported_model import CALIBRATED_VERSION, FORMAT, FORMAT_VERSION, ITEM_FILE, ONNX_FILE
from trainer.inference.manifest import MANIFEST, seal
from trainer.inference.onnx_export import DensePart, onnx_bytes, onnx_difference, write_program
from trainer.inference.predict import Predictor
from trainer.output_calibration.registry import as_json
from trainer.runs.protocol import leave
from trainer.spec import DatasetSpec
from trainer.storage.destinations import is_stored, written

PROGRAM_FILE, WEIGHTS_FILE = "dense.pt2", "dense.safetensors"
EXPORTS = "exports"
"""Name of the folder of exports in a run's storage."""
TOLERANCE = 1e-5
"""Largest difference between scores by ONNX and by torch with which the ONNX file is written."""


def export(run_dir: Path | str, directory: Path | str | None = None, *, checkpoint: str = LAST) -> dict[str, Any]:
    """Write the folder of the export, complete or not at all; return the report that the command prints as JSON.

    Args:
        run_dir: the run directory of a job.
        directory: the directory to create, or a URI of a run storage; None: a folder in the run's own storage.
        checkpoint: ``best``, ``last`` or a step.

    Raises:
        SpecError: the directory is no run directory.
        CheckpointError: there is no such checkpoint, or it is damaged.
        DataError: the directory exists, a joined file is missing, or no directory is given and the run has no storage.
        FileExistsError: the storage has the folder already.
        StorageError: the storage cannot be reached.
    """
    if directory is not None and not is_stored(directory) and Path(directory).exists():
        raise DataError("is there already", where=str(directory), remedy="remove it, or name another directory")
    predictor = Predictor(run_dir, checkpoint)
    if predictor.model.reads_training_rows:
        kind = predictor.job.model.kind
        raise DataError(
            f"{kind} scores with the graph of its training rows, which no export has",
            where=str(run_dir),
            remedy="export a model of bpr",
        )
    place = directory if directory is not None else _place_in_storage(predictor)
    with written(place, MANIFEST) as path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with appearing(path) as work:
            work.mkdir()
            body = _write(predictor, work)
            sha256 = seal(work, body, [path.name for path in work.iterdir()])
        num_bytes = sum(one.stat().st_size for one in path.iterdir())
    return {
        "directory": str(place),
        "sha256": sha256,
        "job": predictor.run.run_id,
        "model": predictor.job.model.kind,
        "step": predictor.checkpoint.step,
        "onnx": body["onnx"],
        "bytes": num_bytes,
        "notes": predictor.notes,
    }


def _place_in_storage(predictor: Predictor) -> str:
    run = predictor.run
    if run.storage is None:
        raise DataError(
            "it is kept in a directory, not in a run storage", where=str(run.directory), remedy="name a directory"
        )
    return f"{run.storage}/{EXPORTS}/{predictor.checkpoint.path.name}"


def _write(predictor: Predictor, work: Path) -> dict[str, Any]:
    job, dataset = predictor.job, predictor.run.dataset
    tables = predictor.tables
    candidates = predictor.candidates
    for name, ids in id_maps(predictor.checkpoint).items():
        columns = {"vector": tables.weight(name).numpy()}
        if candidates is not None and not np.array_equal(candidates, columns["vector"]):
            columns["candidate"] = candidates
        _write_table(work / f"table-{name}.arrow", ids.ids, columns)
    features = read_features(dataset, job)
    for name, feature in features.items():
        if feature.join is not None:
            on, column = feature.join.on, feature.join.column
            uri = beside(feature.join.uri, dataset.uri)
            _write_columns(work / f"join-{name}.parquet", uri, [on, column], ids=[on, column])
    if dataset.items is not None and (columns_read := _item_columns(dataset)):
        columns_read = [dataset.items.on, *columns_read]
        _write_columns(work / ITEM_FILE, beside(dataset.items.uri, dataset.uri), columns_read, dataset.items.id_columns)
    part = dense_part(predictor)
    # save_file would write a file for its owner alone; other users may read an export, if the umask allows it.
    (work / WEIGHTS_FILE).write_bytes(save({name: value.contiguous() for name, value in part.weights().items()}))
    write_program(part, work / PROGRAM_FILE)
    onnx = _write_onnx(part, work / ONNX_FILE)
    return {
        "format": FORMAT,
        # Versions that do not know calibration would return other probabilities: they must refuse the export.
        "format_version": CALIBRATED_VERSION if predictor.calibrators else FORMAT_VERSION,
        "job": job.model_dump(mode="json"),
        "dataset": dataset.model_dump(mode="json"),
        "run_id": predictor.run.run_id,
        "step": predictor.checkpoint.step,
        "numeric": [one.as_json() for one in predictor.numeric],
        "vectors": [asdict(one) for one in vectors_read(predictor.checkpoint)],
        "layout": part.layout,
        "length": part.length,
        "inputs": part.inputs,
        "output": part.output,
        **(
            {"output_calibration": {name: as_json(one) for name, one in predictor.calibrators.items()}}
            if predictor.calibrators
            else {}
        ),
        "onnx": onnx,
        "tables": {
            name: {"rows": len(tables.weight(name)), "columns": tables.weight(name).shape[1]}
            for name in predictor.checkpoint.tables
        },
        "versions": {name: importlib.metadata.version(name) for name in ("evenkeel", "torch", "pyarrow", "numpy")},
    }


def dense_part(predictor: Predictor) -> DensePart:
    """Return the part of the predictor's model that follows its embedding tables."""
    columns = {key.name: predictor.tables.weight(key.table).shape[1] for key in predictor.keys}
    features = {name: columns[name] for name in read_features(predictor.run.dataset, predictor.job)}
    length = max(1, predictor.job.model.history_length)
    lists = [key.name for key in predictor.keys if key.is_list]
    return DensePart(predictor.model, features, columns, lists, length)


def _write_table(path: Path, ids: pa.Array, columns: dict[str, np.ndarray[Any, Any]]) -> None:
    """Write a table as an Arrow file of one batch: column ``id``, and columns of float32 lists of fixed size.

    ``id`` is null in rows 0 (padding) and 1 (unknown id). ``columns``: name -> float32 [rows, size].
    """
    special = pa.nulls(2, ids.type)
    arrays = [pa.concat_arrays([special, ids])]
    for values in columns.values():
        flat = pa.array(np.ascontiguousarray(values, dtype=np.float32).reshape(-1))
        arrays.append(pa.FixedSizeListArray.from_arrays(flat, values.shape[1]))
    batch = pa.record_batch(arrays, names=["id", *columns])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def _item_columns(dataset: DatasetSpec) -> list[str]:
    """Return the columns of the item table if it has numbers or vectors. Else return []: joins read the ids."""
    assert dataset.items is not None
    features = dataset.items.features
    if all(one.has_ids for one in features.values()):
        return []
    return [one.column or name for name, one in features.items()]


def _write_columns(path: Path, uri: str, columns: Sequence[str], ids: Collection[str]) -> None:
    source = Source(uri, ids=ids)
    names = list(dict.fromkeys(columns))
    source.require(names)
    schema = pa.schema([(name, source.column_type(name)) for name in names])
    with pq.ParquetWriter(path, schema) as writer:
        for chunk in source.stream(names):
            writer.write_batch(
                pa.record_batch([chunk.column(name).cast(schema.field(name).type) for name in names], schema=schema)
            )


def _write_onnx(part: DensePart, path: Path) -> dict[str, Any]:
    """Write the dense part as ONNX; return the manifest's entry for it.

    The entry has ``written``, True or False. If True, ``difference``: largest difference from torch's scores (None: not
    checked). If False, ``reason``.
    """
    try:
        model = onnx_bytes(part)
        difference = onnx_difference(part, model)
    except Exception as error:  # any error of the exporter: the torch program is written all the same
        return {"written": False, "reason": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    if difference is not None and not difference <= TOLERANCE:
        return {"written": False, "reason": f"its results differ by {difference:.1e} from the model's"}
    path.write_bytes(model)
    return {"written": True, "difference": difference}


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="evenkeel export", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="the run directory of a job")
    place = "where the export goes, a directory or a URI that does not exist yet (default: in the run's storage)"
    parser.add_argument("directory", nargs="?", help=place)
    parser.add_argument("--checkpoint", default=LAST, help="best, last or a step (default: last)")
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")
    options = parser.parse_args(arguments)
    make = partial(export, options.run_dir, options.directory, checkpoint=options.checkpoint)
    return command_line.report(make, in_words, as_json=options.json)


def in_words(report: dict[str, Any]) -> str:
    onnx = report["onnx"]
    if not onnx["written"]:
        said = f"no ONNX ({onnx['reason']}): use {PROGRAM_FILE}"
    elif onnx["difference"] is None:
        said = "ONNX not checked: onnxruntime is not installed"
    else:
        said = f"ONNX checked, it differs by {onnx['difference']:.1e}"
    return "\n".join(
        [
            *report["notes"],
            f"{report['model']}, step {report['step']}, {report['bytes']:,} bytes; {said}",
            f"{report['directory']}: sha256 {report['sha256']}",
        ]
    )


if __name__ == "__main__":
    leave(main())
