"""One collection of the embedded store: its versions, their states, the switch between them, its views."""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from embeddings.durable_files import fsync_path, make_directory, write_file
from embeddings.rff import RandomFourierFeatures
from embeddings.store import erasure
from embeddings.store.files import (
    CorruptStore,
    GateHeld,
    StaleParent,
    StoreError,
    UnknownCollection,
    UnknownVersion,
    UnknownView,
    ViewExists,
    Workspace,
    disk_errors,
    encode_document,
    read_document,
    replace_document,
    sweep,
    writer_lock,
)
from embeddings.store.pointer import Pointer, Served
from embeddings.store.tombstones import ErasedIds
from embeddings.store.version import (
    ITEMS_FILE,
    VersionReader,
    count_statuses,
    items_of,
    mark_verified,
    read_arrow,
    verify_file,
    write_arrow,
    write_items,
)
from embeddings.store.views import ROTATION_FILE, ViewRegistry, define_view, matrix_batch, read_matrix, utc_now
from embeddings.vectors.item_vectors import Array, ItemVectors

if TYPE_CHECKING:
    from embeddings.store.feature_store import Store

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
VERSION_PATTERN = re.compile(r"v\d{6,}")
MANIFEST_FILE = "manifest.json"
CACHED_READERS = 4

logger = logging.getLogger("evenkeel.store")


class Collection:
    """Versions and views of one collection."""

    versions_share_rows = False
    """Whether what a version lost may still be in what others rest on, so that an erasure rewrites all of them."""

    def __init__(self, store: Store, name: str):
        self.name = name
        self.directory = store.root / "collections" / name
        self._store = store
        self._versions = self.directory / "versions"
        self._states = self.directory / "states"
        self._views = ViewRegistry(self.directory / "views", name)
        self._pointer = Pointer(self.directory / "CURRENT")
        self._lock = threading.Lock()
        self._manifests: dict[str, dict[str, Any]] = {}
        self._readers: collections.OrderedDict[str, VersionReader] = collections.OrderedDict()
        self._erasures = 0
        self._damaged: dict[str, str] = {}

    # --- reading ---------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Return whether there is any version."""
        return self._pointer.read().version is not None or bool(self._version_names())

    def current(self) -> str | None:
        """Return the version that is served, None before the first one; another process's switch is seen at once."""
        return self._pointer.read().version

    def history(self) -> list[dict[str, Any]]:
        """Return the latest switches, oldest first.

        Each is {version, at, kind: publish|promote, reason, override_gate, key}.
        """
        return copy.deepcopy(self._pointer.read().history)

    def versions(self) -> list[dict[str, Any]]:
        """Return manifests of all versions, oldest first, with their states."""
        return [self.manifest(version) for version in self._version_names()]

    def manifest(self, version: str = "current") -> dict[str, Any]:
        """Return the manifest of a version or of the current one.

        It has, beside what was written with the version, ``state`` and, if held, ``reasons``; ``override``: {reason,
        key, at} where somebody had it served although the gate held it, else None; ``damaged``: what this process found
        wrong with the version's files, else None.

        Raises:
            UnknownVersion: there is no such version.
            UnknownCollection: the collection has no version.
            CorruptStore: the manifest is damaged.
        """
        version = self._resolve(version)
        manifest = self._stored_manifest(version)
        served = self._pointer.read()
        mark = read_document(self._states / f"{version}.json") or {}
        if served.version == version:
            state = "published"
        elif mark.get("state") == "expired":
            state = "expired"
        elif version in served.versions:
            state = "superseded"
        else:
            state = mark.get("state", "candidate")
        switches = [switch for switch in served.history if switch["version"] == version]
        return {
            **copy.deepcopy(manifest),
            "state": state,
            "reasons": mark.get("reasons", []),
            "published_at": switches[-1]["at"] if switches else None,
            "override": mark.get("override"),
            "damaged": self.damaged().get(version),
        }

    def open(self, version: str = "current") -> VersionReader:
        """Return a reader of a version, or of the one current now.

        Files are checked against the manifest's sha256 once per process. A damaged current version is not served: the
        one served before it is, an alert is raised (see ``damaged``), and ``reader.version`` says which it is.

        Raises:
            UnknownVersion: there is no such version.
            UnknownCollection: the collection has no version.
            CorruptStore: a version asked for by name is damaged, or no other is whole.
        """
        if version != "current":
            name = self._resolve(version)
            self._refuse_expired(name)
            return self._open_named(name)
        for attempt in range(5):
            name = self._resolve("current")
            try:
                return self._open_named(name)
            except (CorruptStore, UnknownVersion) as error:
                # A switch and a clean-up may both have happened since the pointer was read.
                if self.current() != name and attempt < 4:
                    continue
                if isinstance(error, UnknownVersion):
                    raise
                return self._instead_of(name, error)
        raise AssertionError("unreachable")

    def lookup(self, ids: Any, version: str = "current") -> tuple[str, Array, Array]:
        """Look up ``ids`` in one version, as ``open(version).lookup(ids)`` does.

        Where the rows are in a remote store this takes one round trip instead of two. Raises what those raise.

        Returns:
            (version, status uint8 [n], vectors float32 [n, d]) of ``ids``, in the order asked for.
        """
        reader = self.open(version)
        return reader.version, *reader.lookup(ids)

    def steady(self) -> contextlib.AbstractContextManager[None]:
        """Read one state of the collection inside this context, in this thread.

        Where the collection is remote, its index is looked at once: reads that belong together do not ask again and
        again, and see no switch in between.
        """
        return contextlib.nullcontext()

    def mapped(self, view: str, version: str = "current") -> dict[str, Any] | None:
        """Return the entry of a view if a lookup needs only what this process has checked and mapped already.

        Such a lookup, through the view in the version, takes no longer than its rows do. Else None, also for what there
        is not.
        """
        served = self._pointer.read()
        with self._lock:
            reader = self._readers.get((served.version if version == "current" else version) or "")
        if reader is None or served.erasures != self._erasures:
            return None
        with contextlib.suppress(UnknownView):
            entry = self._views.get(view, reader.manifest["anchor_generation"])
            if self._views.mapped(entry, reader.manifest, self._versions / reader.version):
                return entry
        return None

    def serves_alone(self) -> bool:
        """Return whether vectors can be fetched with what is on this machine."""
        with contextlib.suppress(StoreError, OSError):
            self.open()
            return True
        return False

    def damaged(self) -> dict[str, str]:
        """Return the versions that this process found damaged, and what is wrong with each.

        A version that was restored and opened since is not among them.
        """
        with self._lock:
            return dict(self._damaged)

    def _open_named(self, name: str) -> VersionReader:
        with self._lock:
            reader = self._readers.get(name)
            if reader is not None:
                self._readers.move_to_end(name)
                return reader
        manifest: dict[str, Any] | None = None
        try:
            manifest = self._stored_manifest(name)
            reader = self._make_reader(name, manifest)
        except CorruptStore as error:
            if manifest is not None and self._replaced(name, manifest):
                return self._open_named(name)
            self._refuse_expired(name)
            with self._lock:
                known = self._damaged.get(name)
                self._damaged[name] = str(error)
            if known is None:
                logger.error("collection '%s': version %s is damaged: %s", self.name, name, error)
            raise
        with self._lock:
            self._damaged.pop(name, None)
            if self._manifests.get(name) is not manifest:
                return reader  # rows were erased in the meantime: this one reader may finish, the next is another
            self._readers[name] = reader
            while len(self._readers) > CACHED_READERS:
                self._readers.popitem(last=False)
        return reader

    def _refuse_expired(self, name: str) -> None:
        """Raise UnknownVersion for an expired version, whichever process expired it.

        What this process has open of it is given out no more. The current version never expires: fetches of it need not
        ask.
        """
        if self._is_expired(name):
            self._forget(name)
            raise UnknownVersion(f"version {name} of '{self.name}' has expired: its vectors were removed") from None

    def _make_reader(self, name: str, manifest: dict[str, Any]) -> VersionReader:
        return VersionReader(self._versions / name, manifest)

    def _instead_of(self, name: str, error: CorruptStore) -> VersionReader:
        """Return a reader of the latest whole version that was served before the damaged one."""
        for previous in reversed(self._pointer.read().versions):
            if previous != name:
                with contextlib.suppress(CorruptStore, UnknownVersion):
                    self._refuse_expired(previous)
                    return self._open_named(previous)
        raise error

    def snapshot(self, path: Path | str, version: str = "current") -> Path:
        """Write a version to a Parquet file (see VersionReader.snapshot)."""
        with disk_errors(Path(path)):
            return self.open(version).snapshot(path)

    # --- writing ---------------------------------------------------------------------------------------------------

    def write(
        self,
        items: ItemVectors,
        *,
        parent: str | None = None,
        job: str | None = None,
        anchor_generation: int = 1,
        anchor_version: str | None = None,
        missing: int = 0,
        alignment: Mapping[str, Any] | Callable[[ItemVectors], Mapping[str, Any]] | None = None,
        gate: Sequence[Mapping[str, Any]] = (),
        extra: Mapping[str, Any] | None = None,
        rotation: Array | None = None,
        dtype: Literal["float32", "float16"] = "float32",
    ) -> str:
        """Write a new immutable version in state candidate and return its name; nothing that is served changes.

        Views of ``anchor_generation`` are recorded with copies of their frequencies, materialized ones with their rows.

        Args:
            items: rows, stored as they are: directions, all finite; they are read once, in order, a part at a time.
            parent: the version that this one was made from.
            job: the job that made it.
            anchor_generation: the generation whose coordinates the vectors are in.
            anchor_version: the first version of that generation.
            missing: how many ids have no vector.
            alignment: for the manifest; a function of the rows as they were written (memory-mapped) where it is only
                known then.
            gate: the gate's checks, for the manifest.
            extra: further entries of the manifest.
            rotation: [d, d], what turned the model's own vectors into those of the version, kept for consumers that
                have the former.
            dtype: what the vectors are stored as; lookups give float32 either way.

        Raises:
            ValueError: no rows, or rows that are not finite in ``dtype``.
            IdsErased: rows of ids that were erased.
            StoreFull: the disk, quota or file size limit ended the write.
        """
        if dtype not in ("float32", "float16"):
            raise ValueError(f"dtype '{dtype}' is not one of float32, float16")
        if not len(items):
            raise ValueError(f"collection '{self.name}': there is no item vector to publish")
        erasure.finish_erasure(self)
        erasure.refuse_erased(self, items.keys)
        with disk_errors(self.directory):
            self._prepare()
            with self._writing():
                self.clean_locked()
                workspace = Workspace(self._versions)
            with workspace:
                files = [write_items(workspace.path / ITEMS_FILE, items, dtype)]
                # From here on the rows as they were written: what computed them need not do it again.
                items = items_of(read_arrow(workspace.path / ITEMS_FILE))
                views = self._views.all(anchor_generation)
                files += self._views.write_into(workspace.path, views, items)
                if callable(alignment):
                    alignment = alignment(items)
                if rotation is not None:
                    files.append(write_arrow(workspace.path / ROTATION_FILE, matrix_batch(np.asarray(rotation, "<f8"))))
                with self._writing():
                    # Again: somebody may have erased ids while the rows were being written.
                    erasure.refuse_erased(self, items.keys)
                    version = self._next_version()
                    manifest = {
                        "collection": self.name,
                        "version": version,
                        "parent": parent,
                        "anchor_generation": anchor_generation,
                        "anchor_version": anchor_version or version,
                        "job": job,
                        "created_at": utc_now(),
                        **count_statuses(items),
                        "missing": missing,
                        "dim": items.dim,
                        "dtype": dtype,
                        "id_type": "int64" if items.keys.dtype.kind == "i" else "string",
                        "alignment": dict(alignment or {}),
                        "gate": [dict(check) for check in gate],
                        "views": [_public_view(view) for view in views],
                        "files": files,
                        **(extra or {}),
                    }
                    write_file(workspace.path / MANIFEST_FILE, encode_document(manifest))
                    fsync_path(workspace.path)
                    os.rename(workspace.path, self._versions / version)
                    fsync_path(self._versions)
                    for entry in files:
                        mark_verified(self._versions / version, entry)
        return version

    def publish(self, version: str, expected_parent: str | None) -> None:
        """Make ``version`` the current one if ``expected_parent`` (None: no version) is current now.

        The switch is atomic and durable. Does nothing where the version is current already.

        Raises:
            StaleParent: another version is current.
            UnknownVersion: there is no such version.
            StoreFull: the disk, quota or file size limit ended the write.
        """
        self._switch(version, kind="publish", reason="published", expected=expected_parent, compare=True)

    def hold(self, version: str, reasons: Sequence[str]) -> None:
        """Mark a candidate as held, with the reasons; what is served does not change.

        Raises:
            StoreError: the version is no candidate.
        """
        self._check_named(version)
        with disk_errors(self.directory), self._writing():
            state = self.manifest(version)["state"]
            if state not in ("candidate", "held"):
                raise StoreError(f"version {version} of '{self.name}' is {state}: only a candidate can be held")
            replace_document(
                self._states / f"{version}.json", {"state": "held", "reasons": list(reasons), "at": utc_now()}
            )

    def promote(
        self,
        version: str,
        reason: str,
        override_gate: bool = False,
        if_current: str | None = None,
        *,
        key: str | None = None,
    ) -> None:
        """Make any kept version the current one: an older one is the rollback, a held one needs ``override_gate``.

        Args:
            version: the version's own name.
            reason: kept in the history.
            override_gate: serve it although the gate held it.
            if_current: refuse with StaleParent unless this one is current now. Where ``version`` is current already,
                that is no refusal if the latest switch was this very one (from ``if_current``, for this reason, by this
                key): a caller asks again that did not get the answer.
            key: the id of the key that asked for it, kept with the reason.

        Raises:
            GateHeld: the gate did not pass the version.
            StaleParent: ``if_current`` is not current.
            ValueError: there is no reason.
            UnknownVersion: there is no such version.
        """
        if not reason.strip():
            raise ValueError("promote: a reason is kept in the history; say why")
        self._check_named(version)
        manifest = self.manifest(version)
        failed = [str(check.get("metric")) for check in manifest["gate"] if check.get("verdict") == "fail"]
        gated = manifest["state"] == "held" or (manifest["state"] == "candidate" and bool(failed))
        if gated and not override_gate:
            why = "; ".join(manifest["reasons"]) or "gate failed on " + ", ".join(failed)
            raise GateHeld(
                f"version {version} of '{self.name}' is held: {why}. "
                "To serve it all the same, promote it with override_gate"
            )
        self._switch(
            version, kind="promote", reason=reason, override_gate=override_gate, expected=if_current,
            compare=if_current is not None, key=key, overrides=gated,
        )  # fmt: skip

    def retain(self, keep_last: int) -> list[str]:
        """Expire old versions and return what was expired.

        Kept are the last ``keep_last`` that were served, the current one, whatever is newer than the oldest kept, and
        the anchor versions of those kept. Manifests stay; open readers stay readable.

        Raises:
            ValueError: ``keep_last`` is less than 1.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}: the current version is always kept")
        with disk_errors(self.directory), self._writing():
            served = self._pointer.read()
            if served.version is None:
                return []
            kept = {*served.versions[-keep_last:], served.version}
            kept |= {self._stored_manifest(version)["anchor_version"] for version in kept}
            oldest = min(served.versions[-keep_last:], key=_number)
            expired = []
            for manifest in self.versions():
                version = manifest["version"]
                if version in kept or _number(version) > _number(oldest) or manifest["state"] == "expired":
                    continue
                mark = {
                    "state": "expired", "reasons": manifest["reasons"], "at": utc_now(), "was": manifest["state"],
                    "override": manifest["override"],
                }  # fmt: skip
                replace_document(self._states / f"{version}.json", mark)
                expired.append(version)
            self._remove_expired()
        return expired

    def clean(self) -> None:
        """Remove what killed writers left behind; writing does this by itself."""
        if self.directory.is_dir():
            with self._writing():
                self.clean_locked()
            erasure.finish_erasure(self)

    # --- erasure (embeddings.store.erasure) ------------------------------------------------------------------------

    def erase(self, ids: Any, reason: str, *, key: str | None = None) -> dict[str, Any]:
        """Erase the rows of ``ids`` from every kept version and keep them out; return {"versions", "rows"}."""
        return erasure.erase(self, ids, reason, key=key)

    def readmit(self, ids: Any, reason: str, *, key: str | None = None) -> int:
        """Let erased ids be published again; return how many of them were erased."""
        return erasure.readmit(self, ids, reason, key=key)

    def erasures(self) -> list[dict[str, Any]]:
        """Return what was erased and readmitted, when and why; ids are known by hash alone."""
        return erasure.erasures(self)

    def erased(self) -> ErasedIds:
        """Return the ids that are kept out."""
        return erasure.erased_ids(self)

    def num_erasures(self) -> int:
        """Return how often ids were erased, by whatever process.

        Copies of earlier rows that are kept outside the store are outdated once it differs.
        """
        return self._pointer.read().erasures

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Return the writer lock."""
        locked: contextlib.AbstractContextManager[None] = self._writing()
        return locked

    def version_directory(self, version: str) -> Path:
        return self._versions / version

    def id_type(self) -> str:
        """Return int64 or string; raise UnknownCollection."""
        names = self._version_names()
        if not names:
            raise UnknownCollection(f"there is no collection '{self.name}': it has no version yet")
        return str(self._stored_manifest(names[-1])["id_type"])

    def stored_manifest(self, version: str) -> dict[str, Any]:
        """Return the manifest as it is on disk now."""
        with self._lock:
            self._manifests.pop(version, None)
        return self._stored_manifest(version)

    def replace_manifest(self, version: str, manifest: dict[str, Any]) -> None:
        """Put another manifest in a version's place, in one step; under the writer lock.

        Nothing of a version changes but by an erasure.
        """
        replace_document(self._versions / version / MANIFEST_FILE, manifest)
        self._forget(version)

    def expire(self, version: str) -> None:
        """Remove what a version that is not served holds."""
        with self._writing():
            mark = read_document(self._states / f"{version}.json") or {}
            replace_document(
                self._states / f"{version}.json", {**mark, "reasons": mark.get("reasons", []), "state": "expired"}
            )
            self._forget(version)
            self._remove_expired()

    def count_erasure(self) -> None:
        """Tell every process that versions lost rows; under the writer lock."""
        self._pointer.count_erasure()

    def _replaced(self, version: str, manifest: dict[str, Any]) -> bool:
        """Return whether a version has another manifest by now than the one that was read."""
        with contextlib.suppress(CorruptStore):
            return self.stored_manifest(version) != manifest
        return False

    def _forget(self, *versions: str) -> None:
        """Drop what this process remembers of versions, of all where none is named; open readers stay readable."""
        with self._lock:
            for version in versions or {*self._manifests, *self._readers}:
                self._manifests.pop(version, None)
                self._readers.pop(version, None)
        self._views.forget_rows()

    # --- views -----------------------------------------------------------------------------------------------------

    def views(self, version: str = "current") -> list[dict[str, Any]]:
        """Return the views that can be fetched at a version, by name; none before the first version."""
        if version == "current" and self.current() is None:
            return []
        return [_public_view(view) for view in self._views.all(self._generation(version))]

    def view(self, name: str, version: str = "current") -> dict[str, Any]:
        """Return a view, with the sha256 of its U.

        It is {name, collection, kind, dim, sigma, seed, frequencies, materialized, dim_in, anchor_generation,
        created_at, sha256 of U}.

        Raises:
            UnknownView: there is no such view.
        """
        return _public_view(self._views.get(name, self._generation(version)))

    def _generation(self, version: str) -> int:
        """Return the anchor generation of a version, without the rest of its manifest."""
        return int(self._stored_manifest(self._resolve(version))["anchor_generation"])

    def view_names(self) -> list[str]:
        """Return names of views in any anchor generation."""
        return self._views.names()

    def knows_view(self, name: str) -> bool:
        """Return whether there is a view of that name in any anchor generation: one look at one folder."""
        return self.exists() and self._views.known(name)

    def has_view(self, name: str, anchor_generation: int) -> bool:
        """Return whether a view is defined for an anchor generation."""
        return name in {view["name"] for view in self._views.all(anchor_generation)}

    def create_view(
        self,
        name: str,
        *,
        kind: str = "rff",
        dim: int | None = None,
        sigma: float = 0.4,
        seed: int = 0,
        frequencies: str = "orthogonal",
        dim_in: int | None = None,
        anchor_generation: int | None = None,
        materialized: bool = False,
    ) -> dict[str, Any]:
        """Create a view for the current anchor generation; again with the same parameters, return it.

        Before a first publication it is created for the ``dim_in`` and ``anchor_generation`` given.

        Args:
            name: of the view, unique in the store.
            kind: of its feature map: ``rff``, ``identity``, or one of another package.
            dim: output coordinates; left out: 2d for ``rff``, the vectors' own for ``identity``.
            sigma: standard deviation of the frequencies.
            seed: of the frequencies, uint32.
            frequencies: how they are drawn, one of ``FREQUENCIES``.
            dim_in: coordinates of the vectors.
            anchor_generation: the generation that the view is for.
            materialized: its rows are stored with every version written from now on.

        Raises:
            ViewExists: a view of that name has other parameters or is of another collection.
            ValueError: parameters that cannot be.
        """
        if dim_in is None or anchor_generation is None:
            manifest = self.manifest("current")
            dim_in, anchor_generation = manifest["dim"], manifest["anchor_generation"]
        parameters = define_view(name, dim_in, kind=kind, dim=dim, sigma=sigma, seed=seed, frequencies=frequencies)
        self._check_view_name(name)
        with disk_errors(self.directory):
            self._prepare()
            with self._writing():
                view = self._views.create(parameters, dim_in, anchor_generation, materialized=materialized)
                return _public_view(view)

    def preview_view(self, name: str, *, materialized: bool = False, **parameters: Any) -> tuple[dict[str, Any], bool]:
        """Return what ``create_view`` would make of the same arguments, and whether it is there just so.

        Nothing is made.

        Raises:
            ViewExists: a view of that name has other parameters or is of another collection.
            ValueError: parameters that cannot be.
        """
        manifest = self.manifest("current")
        defined = define_view(name, manifest["dim"], **parameters)
        self._check_view_name(name)
        known = self._views.same(defined, manifest["dim"], manifest["anchor_generation"])
        place = {"dim_in": manifest["dim"], "anchor_generation": manifest["anchor_generation"]}
        return {**defined, "collection": self.name, "materialized": materialized, **place}, known is not None

    def _check_view_name(self, name: str) -> None:
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"view name {name!r}: use [a-z0-9][a-z0-9_-]{{0,62}}")
        for other in self._store.collections():
            if other != self.name and name in self._store.collection(other).view_names():
                raise ViewExists(
                    f"view '{name}' exists in collection '{other}': names of views are unique; take another"
                )

    def delete_view(self, name: str) -> None:
        """Remove a view in every anchor generation; raise UnknownView."""
        with self._writing():
            self._views.delete(name)

    def frequencies(self, view: str, version: str = "current") -> Array:
        """Return U [m, d] float32 of an rff view, checked against its sha256."""
        return self.view_features(view, version).frequencies

    def view_features(self, view: str, version: str = "current") -> RandomFourierFeatures:
        """Return the map of an rff view, from its U, which is checked against its sha256.

        Raises:
            ValueError: a view of another kind.
            UnknownView: there is no such view.
            CorruptStore: U is damaged.
        """
        entry = self._views.get(view, self._generation(version))
        features = self._views.features(entry)
        if not isinstance(features, RandomFourierFeatures):
            raise ValueError(f"view '{view}' is {entry['kind']}: it has no frequencies")
        return features

    def view_transform(self, view: str, h: Array, version: str = "current") -> Array:
        """Return phi(h) float32 [n, dim] of a view for vectors ``h`` [n, d] of ``version``.

        Zero rows (missing) stay zero.
        """
        entry = self._views.get(view, self._generation(version))
        return self._views.features(entry).transform(h)

    def view_lookup(self, view: str, ids: Any, version: str = "current") -> tuple[Array, Array]:
        """Look up ``ids`` through a view.

        These are the rows of a materialized view where the version has them, else they are computed.

        Returns:
            (status uint8 [n], vectors float32 [n, dim]), in the order asked for. A missing id has a zero row.

        Raises:
            UnknownView: there is no such view.
            ItemIdError: ids of another type.
        """
        reader = self.open(version)
        entry = self._views.get(view, reader.manifest["anchor_generation"])
        return self._views.lookup(entry, reader, self._versions / reader.version, ids)

    def rotation(self, version: str = "current") -> Array:
        """Return R [d, d] float64 that turned the vectors of the model behind a version into the version's coordinates.

        The identity where nothing was turned.

        Raises:
            UnknownVersion: the version's R was not kept.
            CorruptStore: the file of R is damaged.
        """
        manifest = self.manifest(version)
        entry = next((file for file in manifest["files"] if file["name"] == ROTATION_FILE), None)
        if entry is not None:
            return read_matrix(verify_file(self._versions / manifest["version"], entry))
        if manifest["alignment"].get("kind") == "procrustes":
            raise UnknownVersion(f"version {manifest['version']} of '{self.name}' was turned by an R that was not kept")
        return np.eye(manifest["dim"])

    # --- settings --------------------------------------------------------------------------------------------------

    def settings(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return the collection's settings of one kind (``calibration``, ``canary``), by name."""
        directory = self.directory / "settings" / kind
        found = {path.stem: read_document(path) for path in sorted(directory.glob("*.json"))}
        return {name: document for name, document in found.items() if document is not None}

    def save_settings(self, kind: str, name: str, document: Mapping[str, Any] | None) -> None:
        """Put a document of finite JSON values there in one durable step; None removes it.

        Raises:
            ValueError: a name that is not ``[a-z0-9][a-z0-9_-]{0,62}``.
            StoreFull: the disk, quota or file size limit ended the write.
        """
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"{kind} name {name!r}: use [a-z0-9][a-z0-9_-]{{0,62}}")
        directory = self.directory / "settings" / kind
        with disk_errors(self.directory), self._writing():
            make_directory(directory)
            path = directory / f"{name}.json"
            if document is None:
                path.unlink(missing_ok=True)
                fsync_path(directory)
            else:
                replace_document(path, dict(document))

    # --- inside ----------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        for directory in (self._versions, self._states, self.directory / "views"):
            make_directory(directory)

    def _writing(self) -> Any:
        if not self.directory.is_dir():
            raise UnknownCollection(f"there is no collection '{self.name}'")
        return writer_lock(self.directory / "LOCK")

    def clean_locked(self) -> None:
        """Do what ``clean`` does for a caller that holds the writer lock."""
        for directory in (self.directory, self._versions, self._states, *self.directory.glob("settings/*")):
            sweep(directory)
        self._views.clean()
        self._remove_expired()

    def _remove_expired(self) -> None:
        for version in self._version_names():
            if self._is_expired(version):
                for path in (self._versions / version).iterdir():
                    if path.name != MANIFEST_FILE:
                        path.unlink(missing_ok=True)

    def _is_expired(self, version: str) -> bool:
        return (read_document(self._states / f"{version}.json") or {}).get("state") == "expired"

    def _version_names(self) -> list[str]:
        try:
            names = [entry.name for entry in os.scandir(self._versions)]
        except FileNotFoundError:
            return []
        return sorted((name for name in names if VERSION_PATTERN.fullmatch(name)), key=_number)

    def _next_version(self) -> str:
        names = self._version_names()
        return f"v{(_number(names[-1]) if names else 0) + 1:06d}"

    def _resolve(self, version: str) -> str:
        served = self._pointer.read()
        if served.erasures != self._erasures:
            self._forget()
            self._erasures = served.erasures
        if version == "current":
            current = served.version
            if current is None:
                kind = UnknownVersion if self.exists() else UnknownCollection
                raise kind(f"collection '{self.name}' has no published version yet: run a job that publishes to it")
            return current
        if not VERSION_PATTERN.fullmatch(version) or not (self._versions / version).is_dir():
            if not self.exists():
                others = ", ".join(self._store.collections()) or "none"
                raise UnknownCollection(f"there is no collection '{self.name}' (there are: {others})")
            raise UnknownVersion(f"collection '{self.name}' has no version {version!r}")
        return version

    def _check_named(self, version: str) -> None:
        """Raise UnknownVersion unless a change gives the version's own name.

        What ``current`` means may be another version by the time the change happens.
        """
        if version == "current":
            raise UnknownVersion(f"'current' of '{self.name}' is no name of a version: name one, such as v000001")

    def _stored_manifest(self, version: str) -> dict[str, Any]:
        with self._lock:
            manifest = self._manifests.get(version)
        if manifest is None:
            path = self._versions / version / MANIFEST_FILE
            manifest = read_document(path)
            if manifest is None:
                raise CorruptStore(
                    f"{path}: the manifest is gone: restore it from a backup, or promote another version"
                )
            with self._lock:
                self._manifests[version] = manifest
        return manifest

    def _switch(
        self,
        version: str,
        *,
        kind: str,
        reason: str,
        expected: str | None,
        compare: bool,
        override_gate: bool = False,
        key: str | None = None,
        overrides: bool = False,
    ) -> None:
        self._check_named(version)
        with disk_errors(self.directory), self._writing():
            served = self._pointer.read()
            if served.version == version and (kind == "publish" or not compare or expected == version):
                return
            if compare and _is_done(served, version, expected, reason, key):
                return
            if compare and served.version != expected:
                remedy = "look at what is served now, then decide again"
                if kind == "publish":
                    remedy = f"{version} rests on what is not served any more; refresh again from the current one"
                raise StaleParent(f"version {served.version} of '{self.name}' is current, not {expected}: {remedy}")
            state = self.manifest(version)["state"]
            if state == "expired":
                raise UnknownVersion(f"version {version} of '{self.name}' has expired: its vectors were removed")
            if kind == "publish" and state != "candidate":
                raise StoreError(
                    f"version {version} of '{self.name}' is {state}: only a candidate is published; promote it"
                )
            self.open(version)
            switch = {
                "version": version, "at": utc_now(), "kind": kind, "reason": reason, "override_gate": override_gate,
                "key": key,
            }  # fmt: skip
            if overrides:
                # Before the switch: a version that is served over the gate's verdict always says who had it so.
                path = self._states / f"{version}.json"
                override = {name: switch[name] for name in ("reason", "key", "at")}
                replace_document(path, {**(read_document(path) or {"state": "held"}), "override": override})
            self._pointer.switch(switch)


def _is_done(served: Served, version: str, expected: str | None, reason: str, key: str | None) -> bool:
    """Return whether the latest switch was from ``expected`` to ``version``, for this reason and by this key."""
    if len(served.history) < 2:
        return False
    before, latest = served.history[-2:]
    asked = (expected, version, reason, key)
    return (before["version"], latest["version"], latest["reason"], latest["key"]) == asked


def _number(version: str) -> int:
    return int(version[1:])


def _public_view(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return a view without the entry of its file."""
    return {name: value for name, value in view.items() if name != "file"}
