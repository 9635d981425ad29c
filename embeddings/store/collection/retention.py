"""Retention: versions that have expired keep their manifest and nothing else."""

from __future__ import annotations

from embeddings.store.collection.directory import CollectionDirectory, number_of
from embeddings.store.collection.reader import CollectionReader
from embeddings.store.files import disk_errors
from embeddings.store.views import utc_now


class Retention:
    """Expires versions of one collection."""

    def __init__(self, files: CollectionDirectory, reader: CollectionReader):
        self._files = files
        self._reader = reader

    def retain(self, keep_last: int) -> list[str]:
        """Expire old versions and return what was expired (see Collection.retain)."""
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}: the current version is always kept")
        with disk_errors(self._files.path), self._files.writing():
            served = self._files.pointer.read()
            if served.version is None:
                return []
            staying = {*served.versions[-keep_last:], served.version}
            manifests = [self._reader.manifest(version) for version in staying if not self._files.is_expired(version)]
            staying |= {manifest.anchor_version for manifest in manifests}
            # What the gate counts drift from, where that is not the generation's first.
            staying |= {version for manifest in manifests if (version := manifest.extra.get("drift_from"))}
            oldest = min(served.versions[-keep_last:], key=number_of)
            expired = []
            for record in self._reader.records():
                version = record.manifest.version
                if version in staying or number_of(version) > number_of(oldest) or record.state == "expired":
                    continue
                mark = {
                    "state": "expired", "reasons": record.reasons, "at": utc_now(), "was": record.state,
                    "override": record.override,
                }  # fmt: skip
                self._files.save_state(version, mark)
                expired.append(version)
            self._files.remove_expired()
        return expired

    def expire(self, version: str) -> None:
        """Remove what a version that is not served holds."""
        with self._files.writing():
            mark = self._files.read_state(version)
            self._files.save_state(version, {**mark, "reasons": mark.get("reasons", []), "state": "expired"})
            self._reader.forget(version)
            self._files.remove_expired()
