"""A collection of item vectors: its versions, their states, the switch between them, its views."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from embeddings.rff import RandomFourierFeatures
from embeddings.store.collection.directory import CollectionDirectory, Lookup
from embeddings.store.collection.erasure import Erasure
from embeddings.store.collection.reader import CollectionReader
from embeddings.store.collection.retention import Retention
from embeddings.store.collection.settings import LISTS_BY_ITEM, CollectionSettings
from embeddings.store.collection.switch import Switch, VersionSwitch
from embeddings.store.collection.views import CollectionViews
from embeddings.store.collection.writer import CollectionWriter, NewVersion
from embeddings.store.files import StoreError, disk_errors
from embeddings.store.manifest import VersionRecord
from embeddings.store.tombstones import ErasedIds
from embeddings.store.version import VersionReader
from embeddings.store.views import ViewRegistry
from embeddings.vectors.item_vectors import Array, ItemVectors

if TYPE_CHECKING:
    from embeddings.store.feature_store import Store


class Collection:
    """Versions and views of one collection; thread-safe.

    Attributes:
        name: of the collection.
        directory: its files on this machine.
    """

    def __init__(self, files: CollectionDirectory, store: Store):
        self.name = files.name
        self.directory = files.path
        registry = ViewRegistry(files.views, files.name)
        self._files = files
        self._reader = CollectionReader(files, store, registry)
        self._settings = CollectionSettings(files)
        self._views = CollectionViews(files, self._reader, registry, store)
        self._retention = Retention(files, self._reader)
        self._erasure = Erasure(files, self._reader, self._settings, self._retention)
        self._writer = CollectionWriter(files, registry, self._erasure)
        self._switch = VersionSwitch(files, self._reader)

    # --- reading ---------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Return True if there is any version."""
        return self._files.exists()

    def current(self) -> str | None:
        """Return the version that is served, None before the first one; another process's switch is seen at once."""
        return self._files.pointer.read().version

    def history(self) -> list[dict[str, Any]]:
        """Return the latest switches, oldest first.

        Each is {version, at, kind: publish|promote, reason, override_gate, key}.
        """
        return copy.deepcopy(self._files.pointer.read().history)

    def versions(self) -> list[dict[str, Any]]:
        """Return manifests of all versions, oldest first, with their states."""
        return [record.to_json() for record in self.records()]

    def records(self) -> list[VersionRecord]:
        """Return the same as :meth:`versions`, as objects and without copies: there may be very many."""
        return self._reader.records()

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
        return self._reader.record(version).to_json()

    def id_type(self) -> str:
        """Return int64 or string; raise UnknownCollection."""
        return self._reader.id_type()

    def open(self, version: str = "current") -> VersionReader:
        """Return a reader of a version, or of the one current now.

        Files are checked against the manifest's sha256 once per process. A damaged current version is not served: the
        one served before it is, an alert is raised (see ``damaged``), and ``reader.version`` says which it is.

        Raises:
            UnknownVersion: there is no such version.
            UnknownCollection: the collection has no version.
            CorruptStore: a version asked for by name is damaged, or no other is whole.
        """
        return self._reader.open(version)

    def lookup(self, ids: Any, version: str = "current") -> Lookup:
        """Look up ``ids`` in one version, as ``open(version).lookup(ids)`` does.

        Where the rows are in a remote store this takes one round trip instead of two. Raises what those raise.

        Returns:
            (version, status uint8 [n], vectors float32 [n, d]) of ``ids``, in the order asked for.
        """
        return self._reader.lookup(ids, version)

    def snapshot_read(self) -> contextlib.AbstractContextManager[None]:
        """Read one state of the collection inside this context, in this thread.

        Where the collection is remote, its index is looked at once: reads that belong together do not ask again and
        again, and see no switch in between.
        """
        return self._files.snapshot_read()

    def available_offline(self) -> bool:
        """Return True if vectors can be fetched with what is on this machine."""
        if not self._files.rows_are_remote:
            with contextlib.suppress(StoreError, OSError):
                self.open()
                return True
        return False

    def damaged(self) -> dict[str, str]:
        """Return the versions that this process found damaged, and what is wrong with each.

        A version that was restored and opened since is not among them.
        """
        return self._reader.damaged()

    def rotation(self, version: str = "current") -> Array:
        """Return R [d, d] float64 that turned the vectors of the model behind a version into the version's coordinates.

        The identity where nothing was turned.

        Raises:
            UnknownVersion: there is no such version, it has expired, or its R was not kept.
            CorruptStore: the file of R is damaged.
        """
        return self._reader.rotation(version)

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
        The many parameters are entries of the manifest, each by its name and each optional.

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
        new = NewVersion(
            parent=parent, job=job, anchor_generation=anchor_generation, anchor_version=anchor_version, missing=missing,
            alignment=alignment, gate=gate, extra=extra, rotation=rotation, dtype=dtype,
        )  # fmt: skip
        return self._writer.write(items, new)

    def clean(self) -> None:
        """Remove what killed writers left behind; writing does this by itself."""
        self._writer.clean()

    # --- what is served --------------------------------------------------------------------------------------------

    def publish(self, version: str, expected_parent: str | None) -> None:
        """Make ``version`` the current one if ``expected_parent`` (None: no version) is current now.

        The switch is atomic and durable. Does nothing where the version is current already.

        Raises:
            StaleParent: another version is current.
            UnknownVersion: there is no such version.
            StoreFull: the disk, quota or file size limit ended the write.
        """
        self._switch.publish(version, expected_parent)

    def hold(self, version: str, reasons: Sequence[str]) -> None:
        """Mark a candidate as held, with the reasons; what is served does not change.

        Raises:
            StoreError: the version is no candidate.
        """
        self._switch.hold(version, reasons)

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
        self._switch.promote(Switch(version, "promote", reason, override_gate, key), if_current)

    def retain(self, keep_last: int) -> list[str]:
        """Expire old versions and return what was expired.

        Kept are the last ``keep_last`` that were served, the current one, whatever is newer than the oldest kept, and
        the anchor versions of those kept. Manifests stay; open readers stay readable.

        Raises:
            ValueError: ``keep_last`` is less than 1.
        """
        return self._retention.retain(keep_last)

    def expire(self, version: str) -> None:
        """Remove what a version that is not served holds."""
        self._retention.expire(version)

    # --- erasure ---------------------------------------------------------------------------------------------------

    def erase(self, ids: Any, reason: str, *, key: str | None = None) -> dict[str, Any]:
        """Erase the rows of ``ids`` from every kept version, and keep them out until they are readmitted.

        What is interrupted is finished by the next writer.

        Args:
            ids: of the collection's type; ids that no version has are kept out all the same.
            reason: kept with the erasure.
            key: the id of the API key that asked for it.

        Returns:
            {"versions": the versions that were rewritten, "rows": how many rows they lost}.

        Raises:
            UnknownCollection: the collection has no version.
            ItemIdError: ids of another type.
            ValueError: there is no reason.
            StoreBusy: another process kept the lock for too long.
            StoreFull: the disk, quota or file size limit ended a write.
            CorruptStore: the current version cannot be read.
        """
        return self._erasure.erase(ids, reason, key)

    def readmit(self, ids: Any, reason: str, *, key: str | None = None) -> int:
        """Let erased ids be published again, and return how many of them were erased.

        What was erased stays so: the next run that finds them brings them back. Raises as ``erase`` does.
        """
        return self._erasure.readmit(ids, reason, key)

    def finish_erasure(self) -> None:
        """Finish an erasure that was interrupted; do nothing where there is none, or another process is at it."""
        self._erasure.finish()

    def erasures(self) -> list[dict[str, Any]]:
        """Return the log of erased and readmitted ids, oldest first; ids are known by hash alone.

        Each is {at, kind: erase|readmit, reason, key, ids, rows, versions}; the last may be under way: it has no
        ``rows`` yet.
        """
        return self._erasure.log()

    def erased(self) -> ErasedIds:
        """Return the ids that are kept out."""
        return self._erasure.erased_ids()

    def num_erasures(self) -> int:
        """Return the number of erasures so far, by whatever process.

        Copies of earlier rows that are kept outside the store are outdated once it differs.
        """
        return self._files.pointer.read().erasures

    # --- views -----------------------------------------------------------------------------------------------------

    def views(self, version: str = "current") -> list[dict[str, Any]]:
        """Return the views that can be fetched at a version, by name; none before the first version."""
        return self._views.all(version)

    def view(self, name: str, version: str = "current") -> dict[str, Any]:
        """Return a view, with the sha256 of its U.

        It is {name, collection, kind, dim, sigma, seed, frequencies, materialized, dim_in, anchor_generation,
        created_at, sha256 of U}.

        Raises:
            UnknownView: there is no such view.
        """
        return self._views.get(name, version)

    def view_names(self) -> list[str]:
        """Return names of views in any anchor generation."""
        return self._views.names()

    def knows_view(self, name: str) -> bool:
        """Return True if there is a view of that name in any anchor generation: one look at one folder."""
        return self.exists() and self._views.is_known(name)

    def has_view(self, name: str, anchor_generation: int) -> bool:
        """Return True if a view is defined for an anchor generation."""
        return self._views.has(name, anchor_generation)

    def create_view(
        self,
        name: str,
        *,
        dim_in: int | None = None,
        anchor_generation: int | None = None,
        materialized: bool = False,
        **parameters: Any,
    ) -> dict[str, Any]:
        """Create a view for the current anchor generation; again with the same parameters, return it.

        Before a first publication it is created for the ``dim_in`` and ``anchor_generation`` given.

        Args:
            name: of the view, unique in the store.
            dim_in: coordinates of the vectors.
            anchor_generation: the generation that the view is for.
            materialized: its rows are stored with every version written from now on.
            parameters: ``kind``, ``dim``, ``sigma``, ``seed`` and ``frequencies`` of
                :func:`embeddings.store.views.define_view`.

        Raises:
            ViewExists: a view of that name has other parameters or is of another collection.
            ValueError: parameters that cannot be.
        """
        return self._views.create(
            name, dim_in=dim_in, anchor_generation=anchor_generation, materialized=materialized, **parameters
        )

    def preview_view(self, name: str, *, materialized: bool = False, **parameters: Any) -> tuple[dict[str, Any], bool]:
        """Return the view that ``create_view`` would make of these arguments, and True if it exists just so.

        Nothing is made. Raises as ``create_view`` does.
        """
        return self._views.preview(name, materialized=materialized, **parameters)

    def delete_view(self, name: str) -> None:
        """Remove a view in every anchor generation; raise UnknownView."""
        self._views.delete(name)

    def frequencies(self, view: str, version: str = "current") -> Array:
        """Return U [m, d] float32 of an rff view, checked against its sha256."""
        return self.view_features(view, version).frequencies

    def view_features(self, view: str, version: str = "current") -> RandomFourierFeatures:
        """Return the map of an rff view, from its U, which is checked against its sha256.

        Raises:
            ValueError: a view of another kind.
            UnknownView: there is no such view.
            UnknownVersion: there is no such version, or it has expired.
            CorruptStore: U is damaged.
        """
        return self._views.features(view, version)

    def view_transform(self, view: str, h: Array, version: str = "current") -> Array:
        """Return phi(h) float32 [n, dim] of a view for vectors ``h`` [n, d] of ``version``.

        Zero rows (missing) stay zero.
        """
        return self._views.transform(view, h, version)

    def view_lookup(self, view: str, ids: Any, version: str = "current") -> tuple[Array, Array]:
        """Look up ``ids`` through a view.

        These are the rows of a materialized view where the version has them, else they are computed.

        Returns:
            (status uint8 [n], vectors float32 [n, dim]), in the order asked for. A missing id has a zero row.

        Raises:
            UnknownView: there is no such view.
            ItemIdError: ids of another type.
        """
        return self._views.lookup(view, ids, version)

    def cached_view(self, view: str, version: str = "current") -> dict[str, Any] | None:
        """Return the entry of a view if a lookup needs only what this process has checked and mapped already.

        Such a lookup, through the view in the version, takes no longer than its rows do. Else None, also for what there
        is not.
        """
        return self._views.cached(view, version)

    # --- settings --------------------------------------------------------------------------------------------------

    def settings(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return the collection's settings of one kind (``canary``, say), by name."""
        return self._settings.read(kind)

    def save_settings(self, kind: str, name: str, document: Mapping[str, Any] | None) -> None:
        """Put a document of finite JSON values there in one durable step; None removes it.

        Ids in it that were erased are taken out, where the kind of settings names items.

        Raises:
            ValueError: a name that is not ``[a-z0-9][a-z0-9_-]{0,62}``.
            StoreFull: the disk, quota or file size limit ended the write.
        """
        self._settings.save(kind, name, document)
        if kind in LISTS_BY_ITEM and document is not None:
            # Ids that were erased while it was made; an erasure that is recorded later finds it where it is.
            self._settings.remove_items(self.erased())
