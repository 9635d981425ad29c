"""Commands for published vectors, such as versions, promote, erase, fetch, recommend, advise and canaries."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import job_status, output
from service.cli.output import CommandError, JsonFlag, ask
from service.client import Client, ProblemError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from embeddings.refresh.consumer_accuracy import TaskAdvice
    from embeddings.vectors.item_vectors import Array


Collection = Annotated[str, typer.Argument(metavar="COLLECTION")]
OfUsers = Annotated[bool, typer.Option("--users", help="The ids are those of users, not of items.")]
BLOCK_USERS = 5000
"""Number of users whose items are in memory at once."""
canaries = typer.Typer(
    help="Canaries: frozen models on top of the vectors, evaluated on every candidate before it is published.",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    of_versions = (collections, versions, promote, erase, readmit)
    for command in (*of_versions, fetch, neighbors, recommend, tower, export_vectors, advise):
        app.command()(command)
    app.add_typer(canaries, name="canaries")


def collections(as_json: JsonFlag = False) -> None:
    """List collections: the served version of each, its rows and its views."""
    listed = ask(Client.collections)
    columns = output.headings("name", "current", "rows", "dim", "held", "views", "published_at")
    columns |= {"current": "SERVES", "compared": "MODEL (BEFORE)"}
    rows = [
        {**one, "held": (one.get("held") or {}).get("in_a_row") or None, "compared": job_status.compared(one)}
        for one in listed
    ]
    empty = "no collections yet: a job with `publish` makes one"
    output.print_list(listed, columns, empty, as_json, rows)


def neighbors(
    collection: Collection,
    item: Annotated[str, typer.Argument(metavar="ID")],
    k: Annotated[int, typer.Option("-k", min=1, help="Number of neighbours.")] = 10,
    version: Annotated[str, typer.Option(help="A version, or `current`.")] = "current",
    as_json: JsonFlag = False,
) -> None:
    """List the items whose vectors have the highest cosine with an item's."""
    with Client() as client:
        is_number = client.collection(collection).get("id_type") == "int64"
        if is_number and not item.removeprefix("-").isdecimal():
            raise CommandError(f"'{item}': ids of {collection} are integers", "give a number", output.USAGE)
        answer = client.neighbors(collection, id=int(item) if is_number else item, k=k, version=version)
    output.print_list(answer["items"], output.headings("id", "cosine"), "no neighbours", as_json)


def versions(collection: Collection, as_json: JsonFlag = False) -> None:
    """List a collection's versions, newest first, with the gate's verdicts."""
    with Client() as client:
        listed = client.versions(collection)
        shown = client.collection(collection)
    current, held = shown.get("current"), shown.get("held") or {}
    fields = ("version", "state", "parent", "rows", "dim", "carried", "missing", "job", "created_at")
    columns = {"current": ""} | output.headings(*fields, compared="MODEL (SERVED)", why="HELD BECAUSE")
    rows = [_version_row(version, current) for version in listed]
    output.print_list(listed, columns, f"no versions in '{collection}' yet", as_json, rows)
    if not as_json:
        for version in listed:
            job_status.maps(version)
    if held.get("in_a_row") and not as_json:
        message = f"{collection}: {job_status.in_a_row(held['in_a_row'], held['since'])}"
        advice = (held.get("diagnosis") or {}).get("advice")
        output.note(f"{message}. {advice}" if advice else message)
    if not as_json:
        job_status.judge(shown)


def _version_row(version: Mapping[str, Any], current: str | None) -> dict[str, Any]:
    mark = "*" if version["version"] == current else ""
    summary = (version.get("diagnosis") or {}).get("summary") if version["state"] == "held" else None
    why = summary or "; ".join(version.get("reasons") or ())
    return {**version, "current": mark, "compared": job_status.compared(version), "why": why}


def promote(
    collection: Collection,
    version: Annotated[str, typer.Argument(metavar="VERSION")],
    reason: Annotated[str, typer.Option(help="Reason for the promotion; kept with the version.")],
    override_gate: Annotated[
        bool, typer.Option("--override-gate", help="Publish a version that the gate held.")
    ] = False,
    if_current: Annotated[
        str | None, typer.Option(help="Promote only if this version is still the current one.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a version the current version; promoting an older version is a rollback."""
    answer = ask(Client.promote, collection, version, reason, override_gate=override_gate, if_current=if_current)
    output.print_answer(answer, f"{collection} now serves {answer.get('version', version)}", as_json)
    if not as_json:
        job_status.maps(answer)
        job_status.judge({**answer, "proposed_canary": None})
        job_status.compare(answer)


def erase(
    collection: Collection,
    ids: Annotated[list[str], typer.Argument(metavar="IDS...")],
    reason: Annotated[
        str, typer.Option(help="Reason for the erasure; kept in the collection's log, which stores ids as hashes.")
    ],
    users: OfUsers = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove the rows of ids from every kept version, and keep the ids out of later versions."""
    answer = ask(Client.erase, collection, ids, reason, users=users)
    rows, kept = output.counted(answer["rows"], "row"), output.counted(len(answer["versions"]), "version")
    text = f"{collection}: {rows} erased from {kept}"
    output.print_answer(answer, text, as_json)


def readmit(
    collection: Collection,
    ids: Annotated[list[str], typer.Argument(metavar="IDS...")],
    reason: Annotated[str, typer.Option(help="Reason for the readmission; kept in the collection's log.")],
    users: OfUsers = False,
    as_json: JsonFlag = False,
) -> None:
    """Allow erased ids to be published again, by the next run whose data contains them."""
    answer = ask(Client.readmit, collection, ids, reason, users=users)
    output.print_answer(answer, f"{collection}: {output.counted(answer['ids'], 'id')} may be published again", as_json)


def fetch(
    name: Annotated[
        str,
        typer.Argument(
            metavar="COLLECTION|VIEW",
            help="A view, a collection to use its default view, or either with @gN: as generation N has it.",
        ),
    ],
    ids: Annotated[list[str], typer.Argument(metavar="IDS...")],
    version: Annotated[str, typer.Option(help="A version, or `current`.")] = "current",
    dtype: Annotated[str, typer.Option(help="float32 or float16.")] = "float32",
    raw: Annotated[
        bool, typer.Option("--raw", help="The collection's vectors themselves, from its identity view.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the vectors to FILE.parquet or FILE.arrow instead.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Fetch vectors by id."""
    if file is not None and file.suffix not in (".parquet", ".arrow"):
        raise CommandError(
            f"--output {file}: the file name's ending chooses the format", "use .parquet or .arrow", output.USAGE
        )
    with Client() as client:
        table = _table(client, _raw_view(client, name) if raw else name, ids, version, dtype)
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    dim = table.schema.field("vector").type.list_size
    source = f"version {metadata.get('version')}, view {metadata.get('view')}, {output.counted(dim, 'coordinate')}"
    if file is not None:
        _write(table, file)
        output.note(f"{output.counted(table.num_rows, 'row')}, {source}, written to {file}")
        return
    items = table.to_pylist()
    if as_json:
        output.print_json({"version": metadata.get("version"), "view": metadata.get("view"), "items": items})
        return
    rows = [{**item, "vector": _short(item["vector"])} for item in items]
    output.note(source)
    output.print_table(rows, output.headings("id", "status", "vector"), "no ids")


def recommend(
    collection: Collection,
    users: Annotated[Path, typer.Argument(metavar="USERS.parquet", help="A file with a row for each user.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The Parquet file to write.")],
    k: Annotated[int, typer.Option(min=1, max=1000, help="Most items for each user.")] = 10,
    by: Annotated[
        str,
        typer.Option(
            help="Find users by `users` (ids), by `features`, or by `histories` (lists of items, oldest first)."
        ),
    ] = "users",
    column: Annotated[
        str | None,
        typer.Option(
            help="The column with the ids (default: user), or with the histories (default: the item's feature)."
        ),
    ] = None,
    exclude_seen: Annotated[
        bool,
        typer.Option("--exclude-seen", help="Leave out the items that the user had in training, or of the history."),
    ] = False,
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="COLUMN=VALUE[,VALUE]",
            help="Items with one of the values in a column of the item table.",
        ),
    ] = None,
    version: Annotated[str, typer.Option(help="A version, or `current`.")] = "current",
    as_json: JsonFlag = False,
) -> None:
    """Write the items of highest score for each user of a file, from one version.

    The file has the columns that were read, items and scores, in the order of USERS.parquet. A user whom the version
    does not have, or none of whose ids it knows, gets empty lists.
    """
    import pyarrow.parquet as pq

    if by not in ("users", "features", "histories"):
        raise CommandError(f"--by {by}: is not known", "use users, features or histories", output.USAGE)
    with Client() as client:
        manifest = client.version(collection, version)
        try:
            file = pq.ParquetFile(users)
            columns = _columns_read(manifest, by, column, file.schema_arrow.names, users)
        except (OSError, ValueError) as error:
            raise CommandError(f"{users}: {error}", "give a Parquet file") from None
        try:
            options = {"k": k, "exclude_seen": exclude_seen, "filter": _filter_of(filters or [])}
            num_users, num_unknown = _write_recommended(client, manifest, file, by, columns, out, options)
        except OSError as error:
            raise CommandError(
                f"{out}: {error.strerror or error}", "name a file in a folder that you can write to"
            ) from None
    answer = {
        "collection": collection, "version": manifest["version"], "file": str(out), "users": num_users,
        "unknown": num_unknown,
    }  # fmt: skip
    unknown = f", {num_unknown} of whom it does not have" if num_unknown else ""
    text = (
        f"items of {collection} {manifest['version']} for {output.counted(num_users, 'user')}{unknown} written to {out}"
    )
    output.print_answer(answer, text, as_json)


def _filter_of(filters: Sequence[str]) -> dict[str, list[str]]:
    """Return {column: values} of options such as ``brand=3,7``."""
    found: dict[str, list[str]] = {}
    for text in filters:
        name, equals, values = text.partition("=")
        if not (name and equals):
            raise CommandError(f"--filter {text}: has no value", "write COLUMN=VALUE,VALUE", output.USAGE)
        found.setdefault(name, []).extend(values.split(","))
    return found


def _columns_read(
    manifest: Mapping[str, Any], by: str, column: str | None, there: Sequence[str], file: Path
) -> list[str]:
    inputs = ((manifest.get("users") or {}).get("tower") or {}).get("inputs", {})
    if by == "features":
        found = [name for name in there if name in inputs]
        if not found and inputs:
            raise CommandError(
                f"{file}: has none of the features {', '.join(inputs)}", "name its columns like the features"
            )
        return found or list(there)
    column = column or ("user" if by == "users" else next(iter(inputs), "item"))
    if column not in there:
        raise CommandError(f"{file}: has no column '{column}' (there are {', '.join(there)})", "name one with --column")
    return [column]


def _write_recommended(
    client: Client,
    manifest: Mapping[str, Any],
    file: pq.ParquetFile,
    by: str,
    columns: list[str],
    out: Path,
    options: Mapping[str, Any],
) -> tuple[int, int]:
    """Write the recommendations, block by block; return the numbers of users and of unknown users."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from embeddings.durable_files import appearing

    item_type = pa.int64() if manifest["id_type"] == "int64" else pa.string()
    kept = [file.schema_arrow.field(name) for name in columns]
    schema = pa.schema(
        [*kept, ("items", pa.list_(item_type)), ("scores", pa.list_(pa.float32()))],
        metadata={"evenkeel.collection": manifest["collection"], "evenkeel.version": manifest["version"]},
    )
    num_users = num_unknown = 0
    with appearing(out, durable=False) as partial, pq.ParquetWriter(partial, schema) as writer:
        for batch in file.iter_batches(BLOCK_USERS, columns=columns):
            if by != "features" and batch.column(0).null_count:
                what = "ids" if by == "users" else "histories"
                raise CommandError(f"column '{columns[0]}': {batch.column(0).null_count} {what} are missing",
                                   "leave them out")  # fmt: skip
            queries = batch.to_pylist() if by == "features" else batch.column(0).to_pylist()
            given = {by: queries, "version": manifest["version"], **options}
            found = client.recommend(manifest["collection"], **given)["users"]
            items = [[item["id"] for item in user["items"]] for user in found]
            scores = [[item["score"] for item in user["items"]] for user in found]
            writer.write_batch(pa.record_batch([*batch.select(columns).columns, items, scores], schema=schema))
            num_users += len(found)
            num_unknown += sum(not user["found"] for user in found)
    return num_users, num_unknown


def tower(
    collection: Collection,
    file: Annotated[Path, typer.Argument(metavar="FILE.onnx")],
    version: Annotated[str, typer.Option(help="A version, or `current`.")] = "current",
    as_json: JsonFlag = False,
) -> None:
    """Download a version's query tower as ONNX: from features or a history to the vector that scores items."""
    with Client() as client:
        manifest = client.version(collection, version)
        try:
            client.tower(collection, file, manifest["version"])
        except OSError as error:
            raise CommandError(
                f"{file}: {error.strerror or error}", "name a file in a folder that you can write to"
            ) from None
    described = manifest["users"]["tower"]
    answer = {"collection": collection, "version": manifest["version"], "file": str(file), **described}
    names = ", ".join(described["inputs"])
    text = f"query tower of {collection} {manifest['version']}, which reads {described['of']} ({names}), in {file}"
    output.print_answer(answer, text, as_json)


def _raw_view(client: Client, collection: str) -> str:
    views = client.collection(collection)["views"]
    identities = (one["name"] for one in client.views() if one["kind"] == "identity" and "map" not in one)
    found = next((name for name in identities if name in views), None)
    if found is None:
        raise CommandError(f"'{collection}' has no identity view", "its next publication makes one; else without --raw")
    return found


def _table(client: Client, name: str, ids: list[str], version: str, dtype: str) -> pa.Table:
    """Fetch from the collection of this name, or from the view if the service knows no such collection."""
    if "@" in name:
        return client.vectors_table(view=name, ids=ids, version=version, dtype=dtype)
    try:
        return client.vectors_table(name, ids, version=version, dtype=dtype)
    except ProblemError as error:
        if error.status != 404:
            raise
        not_a_collection = error
    try:
        client.view(name)
    except ProblemError as error:
        if error.status != 404:
            raise
        raise not_a_collection from None
    return client.vectors_table(view=name, ids=ids, version=version, dtype=dtype)


def _write(table: pa.Table, file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.suffix == ".parquet":
        pq.write_table(table, file)
        return
    with pa.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table)


def _short(vector: Any, shown: int = 6) -> str:
    if vector is None:
        return ""
    numbers = " ".join(f"{x:+.4f}" for x in vector[:shown])
    return numbers + (f" ... ({len(vector)})" if len(vector) > shown else "")


@canaries.command("add")
def add_canary(
    collection: Collection,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    labels: Annotated[
        str, typer.Argument(metavar="LABELS", help="A table with ids and labels, such as the item table.")
    ],
    id_column: Annotated[str, typer.Option(help="Its column of ids.")] = "id",
    label_column: Annotated[str, typer.Option(help="Its column of labels.")] = "label",
    as_json: JsonFlag = False,
) -> None:
    """Fit a canary, a frozen consumer, on the current version; it is evaluated on every candidate from now on."""
    with Client() as client:
        if client.is_local and "://" not in labels and Path(labels).exists():
            labels = str(Path(labels).absolute())
        (answer,) = client.add_canary(collection, name, labels, id_column=id_column, label_column=label_column)["items"]
    text = (
        f"canary {name}: {answer['num_items']:,} items, {len(answer['classes'])} classes, "
        f"accuracy {answer['accuracy']:.3f} (most frequent class {answer['majority']:.3f})"
    )
    output.print_answer(answer, text, as_json)


@canaries.command("list")
def list_canaries(collection: Collection, as_json: JsonFlag = False) -> None:
    """List a collection's canaries."""
    listed = ask(Client.canaries, collection)
    columns = {
        "name": "NAME", "version": "FITTED ON", "anchor_generation": "GENERATION", "num_items": "ITEMS",
        "classes": "CLASSES", "accuracy": "ACCURACY", "created_at": "CREATED",
    }  # fmt: skip
    empty = f"'{collection}' has no canary: create one with `evenkeel canaries add`"
    rows = [{**canary, "classes": len(canary["classes"])} for canary in listed]
    output.print_list(listed, columns, empty, as_json, rows)


@canaries.command("delete")
def delete_canary(collection: Collection, name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Delete a canary."""
    ask(Client.delete_canary, collection, name)
    typer.echo(f"canary {name} removed")


def export_vectors(
    collection: Collection,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A file name that ends in .parquet, .safetensors, .usearch or .faiss."),
    ],
    version: Annotated[str, typer.Option(help="A version, or `current`.")] = "current",
    view: Annotated[
        str | None, typer.Option(help="Write the features of this view instead of the item vectors.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="The store (default: EVENKEEL_STORE_URL, else EVENKEEL_HOME/store).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write all vectors of a version to a file; reads the store directly, without a service."""
    from embeddings.store import StoreError, open_store, vector_files

    home = os.environ.get("EVENKEEL_HOME", ".evenkeel")
    url = store or os.environ.get("EVENKEEL_STORE_URL") or str(Path(home, "store"))
    try:
        exported = vector_files.export_vectors(open_store(url).collection(collection), file, version=version, view=view)
    except (ValueError, ImportError, StoreError, KeyError) as error:
        raise CommandError(str(error), "see `evenkeel export-vectors --help`") from None
    except OSError as error:
        raise CommandError(
            f"{file}: {error.strerror or error}", "name a file in a folder that you can write to"
        ) from None
    answer = {"collection": collection, "file": str(file), **exported._asdict()}
    text = f"{output.counted(exported.num_rows, 'vector')} of {collection} {exported.version} written to {file}"
    output.print_answer(answer, text, as_json)


def advise(
    collection: Collection,
    task: Annotated[Path, typer.Argument(metavar="TASK.parquet", help="A file with the columns id and label.")],
    version: Annotated[str, typer.Option(help="The version whose vectors are tried.")] = "current",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also draw a chart of the accuracies (needs matplotlib).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Try random Fourier features of several dims and sigmas on a prediction task, and recommend one view."""
    from embeddings.refresh.consumer_accuracy import advise as tried

    with tempfile.TemporaryDirectory(prefix="evenkeel-advise-") as folder, Client() as client:
        vectors, labels = _labelled(client.snapshot(collection, Path(folder) / "vectors.parquet", version), task)
    try:
        advice = tried(vectors, labels)
    except ValueError as error:
        raise CommandError(f"{task}: {error}", "give a label for the ids of this collection") from None
    if plot is not None:
        draw(advice, plot, f"{collection}, {task.stem}")
    best = advice.best
    if as_json:
        output.print_json(
            {
                "best": {"dim": best.dim, "sigma": best.sigma, "accuracy": best.accuracy},
                "majority": advice.majority,
                "standard_error": advice.standard_error,
                "items": advice.num_items,
                "tried": [
                    {"dim": trial.dim, "sigma": trial.sigma, "accuracy": trial.accuracy} for trial in advice.tried
                ],
            }
        )
        return
    rows = [{"dim": trial.dim, "sigma": trial.sigma or "vectors", "accuracy": trial.accuracy} for trial in advice.tried]
    output.print_table(rows, output.headings("dim", "sigma", "accuracy"), "")
    output.note(
        f"take dim {best.dim}, sigma {best.sigma:g}: accuracy {best.accuracy:.3f} on {advice.num_held_out} items that "
        f"were not used to fit the classifier (the vectors themselves {advice.tried[0].accuracy:.3f}, most frequent "
        f"class {advice.majority:.3f}; differences below {advice.standard_error:.3f} are chance)"
    )


def _labelled(snapshot: Path, task: Path) -> tuple[Array, list[Any]]:
    """Return (vectors [n, d], labels [n]) of the items that have both a vector and a label."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        labelled = pq.read_table(task, columns=["id", "label"]).drop_null()
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(f"{task}: {error}", "a Parquet file with the columns id and label") from None
    served = pq.read_table(snapshot, columns=["id", "status", "vector"])
    served = served.filter(pc.not_equal(served["status"].cast(pa.string()), "missing"))
    row_of = {identifier: row for row, identifier in enumerate(served["id"].to_pylist())}
    pairs = [
        (row_of[identifier], label)
        for identifier, label in zip(labelled["id"].to_pylist(), labelled["label"].to_pylist(), strict=True)
        if identifier in row_of
    ]
    column = served["vector"].combine_chunks()
    matrix = np.asarray(column.flatten(), dtype=np.float32).reshape(len(served), column.type.list_size)
    return matrix[[row for row, _ in pairs]], [label for _, label in pairs]


def draw(advice: TaskAdvice, path: Path, title: str) -> None:
    """Draw accuracy against dimension, one line per sigma, as PNG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CommandError("--plot draws with matplotlib, which is not installed", "pip install matplotlib") from None
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    identity = next(trial for trial in advice.tried if trial.sigma is None)
    for sigma in sorted({trial.sigma for trial in advice.tried if trial.sigma is not None}):
        line = sorted((trial.dim, trial.accuracy) for trial in advice.tried if trial.sigma == sigma)
        axes.errorbar(
            *zip(*line, strict=True), yerr=advice.standard_error, marker="o", capsize=3, label=f"sigma {sigma:g}"
        )
    axes.axhline(identity.accuracy, color="black", linestyle="--", label=f"the vectors themselves (dim {identity.dim})")
    axes.axhline(advice.majority, color="grey", linestyle=":", label="most frequent class")
    axes.set_xscale("log", base=2)
    ticks = sorted({trial.dim for trial in advice.tried if trial.sigma is not None})
    axes.set_xticks(ticks, [str(dim) for dim in ticks])
    axes.minorticks_off()
    axes.set(xlabel="dim of the view", ylabel="accuracy on held-out items", title=title)
    axes.legend(loc="best", fontsize="small")
    figure.savefig(path, format="png")
