"""The stages of a preparation by tasks, each a function that makes the result of one task. Torch-free.

==========  ============================  =================================================================
stage       one task for each             result
==========  ============================  =================================================================
read        span of rows                  the span's distinct ids, and columns as codes that number them
split       span of rows                  the span's examples by split, as these codes, and counts of ids
table       table                         the table's ids in order of rows; for each span, the row of each code
number      numeric feature               the feature's statistics
rows        span of rows                  the span's examples with table rows instead of codes
==========  ============================  =================================================================
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.batches.prepared_columns import FORMAT_VERSION
from trainer.data.columns.dynamic_ids import UNKNOWN_ROW, IdMap
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.numeric import numeric_of
from trainer.data.columns.vocabulary import Codes
from trainer.data.prepare import encode
from trainer.data.prepare.arrays import CODE, OFFSET, USER_CODES, Appender, map_array, open_ids, write_array, write_ids
from trainer.data.prepare.bad_rows import BadRows
from trainer.data.prepare.by_tasks.tasks import Desk, Setting, Task, planned, write_state
from trainer.data.prepare.coding import TableIds
from trainer.data.prepare.drift import sample_stride
from trainer.data.prepare.encode import Encoded, Span
from trainer.data.prepare.examples import CHUNK_ROWS, AllRows, ExampleRows
from trainer.data.prepare.numbers import fit_numbers, write_numbers
from trainer.data.prepare.part_cache import PartCache
from trainer.data.prepare.plan import DataPlan
from trainer.data.prepare.split import SPLIT_NAMES, TRAIN, VALIDATION, TimeLimits
from trainer.data.prepare.table_rows import finish_table, occurrences
from trainer.data.prepare.workers import Workers
from trainer.data.prepare.writing import SplitWriter, append_examples, code_files
from trainer.storage.cache import cache_of_host
from trainer.storage.folders import put_tree
from trainer.storage.shared_directory import link_or_copy

BAD_ROWS = "bad-rows"
TABLE, COUNTS, PARENT, ROWS_OF_CODES, IDS = "table.arrow", "counts.bin", "parent.bin", "rows-of-codes.bin", "ids.arrow"


def read(desk: Desk, task: Task, out: Path) -> None:
    """Read and encode a span of rows; ``task.arguments``: the span's start and stop, each (file, row)."""
    plan = desk.plan
    start, stop = task.arguments
    parts = PartCache(desk.directory / "parts", str(FORMAT_VERSION))
    bad_rows = None if plan.dataset.max_bad_rows is None else BadRows(plan, desk.directory / BAD_ROWS, parts.folder)
    span = Span(tuple(start), tuple(stop))
    encoded, counted = encode.encode_span(plan, parts, desk.workers, bad_rows, span)
    types = write_encoded(plan, encoded, out)
    for number, path in enumerate([] if bad_rows is None else bad_rows.files()):
        link_or_copy(path, out / f"{BAD_ROWS}-{number}")
    names_validation = plan.sides is not None and bool((encoded.values[plan.sides.name] == VALIDATION).any())
    write_state(out, counted | {"types": types, "names_validation": names_validation})


def split(desk: Desk, task: Task, out: Path) -> None:
    """Make the examples of a span of rows.

    ``task.arguments`` has ``first_row`` (number of the span's first row), ``num_rows`` (number of all rows),
    ``time_limits`` (of a split by time) and ``names_validation`` (True if a column marks validation rows).
    """
    plan = desk.plan
    asked = task.arguments
    name = f"read-{task.number:05d}"
    folder, state = desk.fetch(name), desk.state(name)
    encoded = open_encoded(plan, folder, state["num_rows"], state["types"])
    limits = None if asked["time_limits"] is None else TimeLimits(*asked["time_limits"])
    first_row: int = asked["first_row"]
    writers = {side: SplitWriter(out / side, plan) for side in SPLIT_NAMES}
    pieces: dict[int, int] = {}
    for examples in ExampleRows(plan, encoded, AllRows(first_row, limits, asked["names_validation"])).chunks():
        append_examples(plan, writers, examples, encoded, desk.workers)
        # Float labels are added up in pieces of all rows, not of the span: the sum's rounding must not depend on spans.
        begin = (first_row + int(examples.rows[0])) // CHUNK_ROWS
        trains = (examples.rows[examples.sides == TRAIN] + first_row) // CHUNK_ROWS
        for piece, count in enumerate(np.bincount(trains - begin).tolist(), begin):
            pieces[piece] = pieces.get(piece, 0) + count
    for writer in writers.values():
        writer.close()
    for number, domain in enumerate(plan.kinds):
        counts = occurrences(plan, domain, out / "train", len(encoded.codes[domain].ids))
        write_array(out / f"counts-{number}.bin", counts, OFFSET)
    for one in (*plan.numeric, *plan.row_vectors):
        sample = _sample(encoded.values[one.name], first_row, asked["num_rows"])
        write_array(out / sample_file(one.name), sample.reshape(-1), sample.dtype)
    write_state(
        out,
        {
            "num_examples": {side: writer.num_examples for side, writer in writers.items()},
            "labels": {side: [one.state() for one in writer.label_figures] for side, writer in writers.items()},
            "weight": writers["train"].weight,
            "pieces": sorted(pieces.items()),
        },
    )


def table(desk: Desk, task: Task, out: Path) -> None:
    """Assign the ids of a table their rows.

    ``task.arguments`` has ``spans``, the numbers of the spans, and ``base``, the warm start's ids (None without a warm
    start).
    """
    number = task.number
    plan, spans, base = desk.plan, task.arguments["spans"], task.arguments["base"]
    domain = list(plan.kinds)[number]
    parts = PartCache(desk.directory / "parts", str(FORMAT_VERSION))
    known = TableIds(plan.kinds[domain], "table", parts)
    places: list[tuple[int, int, int]] = []
    for span in spans:
        ids = open_ids(ids_file(desk.fetch(f"read-{span:05d}", [ids_file(Path(), number).name]), number))
        places.append((*known.append(ids), len(ids)))
        if known.distinct.num_bytes > encode.IDS_BYTES:
            known.spill()
    ids = known.finish(encode.IDS_BYTES // 16)
    known.places.flush()
    counts = np.zeros(len(ids) + 1, dtype=np.int64)
    file = f"counts-{number}.bin"
    for span, (run, start, count) in zip(spans, places, strict=True):
        of_span = known.codes(run, start, start + count)
        occurred = map_array(desk.fetch(f"split-{span:05d}", [file]) / file, OFFSET)
        counts[of_span.astype(np.int64) + 1] += occurred[1:]
        counts[0] += occurred[0]
    grown, row_counts = finish_table(plan, domain, Codes(ids), counts, None if base is None else IdMap(*base))
    for span, (run, start, count) in zip(spans, places, strict=True):
        of_span = known.codes(run, start, start + count)
        write_array(out / f"rows-{span:05d}.bin", np.append(grown.row_of_code[of_span], grown.row_of_code[-1]), CODE)
        if plan.keeps_users and plan.single("user").domain == domain:
            write_array(out / f"codes-{span:05d}.bin", np.append(of_span, CODE.type(-1)), CODE)
    write_ids(out / IDS, ids)
    grown.ids.write(out / TABLE)
    write_array(out / ROWS_OF_CODES, grown.row_of_code, CODE)
    write_array(out / COUNTS, row_counts, OFFSET)
    write_array(out / PARENT, grown.parent_rows, OFFSET)
    parts.close()


def number(desk: Desk, task: Task, out: Path) -> None:
    """Compute a numeric feature's statistics over the training rows; ``task.arguments``: the numbers of the spans."""
    feature = desk.plan.all_numeric[task.number]
    whole = Appender(desk.directory / "whole", np.float64)
    name = f"train/{feature.split_file}"
    for span in task.arguments:
        whole.append(map_array(desk.fetch(f"split-{span:05d}", [name]) / name, np.float64))
    whole.close()
    write_state(out, fit_numbers(desk.plan, feature, whole.path).as_json())


def rows(desk: Desk, task: Task, out: Path) -> None:
    """Write the examples of a span as ranks read them; ``task.arguments``: numeric features with statistics."""
    plan, span = desk.plan, f"{task.number:05d}"
    source = desk.fetch(f"split-{span}")
    rows_of = {domain: _of_table(desk, f"rows-{span}.bin", index) for index, domain in enumerate(plan.kinds)}
    unknown: dict[str, dict[str, int]] = {}
    numeric = [numeric_of(one) for one in task.arguments]
    for side in SPLIT_NAMES:
        files = {path.name: feature for feature, path in code_files(plan, source / side).items()}
        (out / side).mkdir()
        for path in (source / side).iterdir():
            if path.name not in files and path.name != USER_CODES:
                link_or_copy(path, out / side / path.name)
        for name, feature in files.items():
            table_of = next(one.table for one in plan.trained if one.name == feature)
            unknown.setdefault(feature, {})[side] = _rewrite(source / side / name, out / side / name, rows_of[table_of])
        if plan.keeps_users:
            codes = _of_table(desk, f"codes-{span}.bin", list(plan.kinds).index(plan.single("user").domain))
            _rewrite(source / side / USER_CODES, out / side / USER_CODES, codes)
    if numeric:
        write_numbers(numeric, out, desk.workers)
    write_state(out, {"unknown": unknown})


def ids_file(folder: Path, domain: int) -> Path:
    """Return the path of the file with a domain's distinct ids; ``domain`` is its number among ``plan.kinds``."""
    return folder / f"ids-{domain}.arrow"


def write_encoded(plan: DataPlan, encoded: Encoded, folder: Path) -> dict[str, str]:
    """Write encoded rows as the files that :func:`open_encoded` reads; return the types of values by column name.

    Arrays that are memory-mapped files already are linked or copied.
    """
    for number, domain in enumerate(plan.kinds):
        write_ids(ids_file(folder, number), encoded.codes[domain].ids)
    for name, array in _arrays(plan, encoded):
        if isinstance(array, np.memmap) and array.filename is not None and array.offset == 0:
            link_or_copy(Path(array.filename), folder / name)
        else:
            array.tofile(folder / name)
    return {name: array.dtype.str for name, array in encoded.values.items()}


def open_encoded(plan: DataPlan, folder: Path, num_rows: int, types: dict[str, str]) -> Encoded:
    """Return encoded rows, memory-mapped.

    ``types``: result of :func:`write_encoded`.
    """
    columns: dict[Any, Any] = {}
    for number, use in enumerate(plan.uses):
        if use.is_list:
            values = map_array(folder / f"column-{number}.values", CODE)
            columns[use] = Jagged(values, map_array(folder / f"column-{number}.offsets", OFFSET))
        else:
            columns[use] = map_array(folder / f"column-{number}", CODE)
    return Encoded(
        num_rows,
        {domain: Codes(open_ids(ids_file(folder, number))) for number, domain in enumerate(plan.kinds)},
        columns,
        {
            one.name: map_array(folder / plan.value_file(one.name), types[one.name]).reshape(-1, *one.shape)
            for one in plan.values
            if one.name in types
        },
    )


def _arrays(plan: DataPlan, encoded: Encoded) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for number, use in enumerate(plan.uses):
        column = encoded.columns[use]
        if isinstance(column, Jagged):
            yield f"column-{number}.values", column.values
            yield f"column-{number}.offsets", column.offsets
        else:
            yield f"column-{number}", column
    for name, array in encoded.values.items():
        yield plan.value_file(name), array


def sample_file(feature: str) -> str:
    return f"{feature}.sample.bin"


def _sample(values: npt.NDArray[Any], first_row: int, num_rows: int) -> npt.NDArray[Any]:
    """Return the span's part of an evenly spaced sample of all rows, by which runs are compared."""
    stride = sample_stride(num_rows, math.prod(values.shape[1:]))
    return values[-first_row % stride :: stride]


def _of_table(desk: Desk, file: str, table: int) -> Any:
    return map_array(desk.fetch(f"table-{table:05d}", [file]) / file, CODE)


def _rewrite(source: Path, target: Path, of_code: Any) -> int:
    """Write ``of_code[code]`` for each code of a file; return the number of results that are the unknown id's row."""
    # The last entry of of_code belongs to code -1, a missing id.
    codes = map_array(source, CODE)
    written, unknown = Appender(target, CODE), 0
    for start in range(0, len(codes), CHUNK_ROWS):
        found = of_code[codes[start : start + CHUNK_ROWS]]
        unknown += int(np.count_nonzero(found == UNKNOWN_ROW))
        written.append(found)
    written.close()
    return unknown


def as_arguments(base: IdMap | None) -> Any:
    """Return the ids of a warm start as plain arrays, for the arguments of a task."""
    if base is None:
        return None
    return [base.ids, np.asarray(base.last_seen), base.run, base.retired, np.asarray(base.retired_in)]


STAGES: dict[str, Callable[[Desk, Task, Path], None]] = {
    "read": read,
    "split": split,
    "table": table,
    "number": number,
    "rows": rows,
}


def perform(setting: Setting, task: Task, directory: Path) -> None:
    """Perform a task on this host, and put its result into the storage.

    ``directory``: folder for temporary files.

    Raises:
        DataError: rows cannot be trained on, or this host sees other files than the leading host.
        StorageError: the storage does not answer, or the result of another task is damaged.
    """
    plan, folders = planned(setting), setting.folders()
    with tempfile.TemporaryDirectory(dir=directory, prefix=f"{task.name}-") as own, Workers(setting.threads) as workers:
        out = Path(own) / "out"
        out.mkdir()
        STAGES[task.stage](Desk(plan, folders, Path(own), workers), task, out)
        # A host that can read the storage's files by a path needs no cache of them.
        put_tree(folders, task.name, out, cache_of_host() if folders.storage.path(folders.prefix) is None else None)
