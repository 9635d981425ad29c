"""Lifecycle of versions: publication, promotion, rollback, holding of candidates, and retention.

Expired versions keep their manifest and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from embeddings.store.collection.directory import CollectionDirectory, number_of
from embeddings.store.collection.reader import CollectionReader
from embeddings.store.files import GateHeld, StaleParent, StoreError, UnknownVersion, disk_errors
from embeddings.store.pointer import Served
from embeddings.store.views import utc_now


@dataclass(frozen=True)
class Switch:
    """A requested change of the served version, as the history records it; ``kind`` is publish or promote."""

    version: str
    kind: str
    reason: str
    override_gate: bool = False
    key: str | None = None


class VersionSwitch:
    """Changes of the served, held and kept versions; a base class of :class:`Collection`."""

    _files: CollectionDirectory
    _reader: CollectionReader

    def publish(self, version: str, expected_parent: str | None) -> None:
        """Make ``version`` the current version, provided that ``expected_parent`` (None: no version) is current.

        The switch is atomic and durable. If the version is current already, nothing changes.

        Raises:
            StaleParent: another version is current.
            UnknownVersion: there is no such version.
            StoreFull: the disk, quota or file size limit ended the write.
        """
        self._switch(Switch(version, "publish", "published"), expected=expected_parent, compare=True)

    def hold(self, version: str, reasons: Sequence[str]) -> None:
        """Mark a candidate as held, with the reasons; the served version does not change.

        Raises:
            StoreError: the version is neither a candidate nor held.
        """
        self._check_named(version)
        with disk_errors(self._files.path), self._files.writing():
            state = self._reader.record(version).state
            if state not in ("candidate", "held"):
                raise StoreError(f"version {version} of '{self._files.name}' is {state}: only a candidate can be held")
            self._files.save_state(version, {"state": "held", "reasons": list(reasons), "at": utc_now()})

    def promote(
        self,
        version: str,
        reason: str,
        override_gate: bool = False,
        if_current: str | None = None,
        *,
        key: str | None = None,
    ) -> None:
        """Make any kept version the current version; with an older version this is a rollback.

        Args:
            version: the version's own name, not ``current``.
            reason: reason that the history keeps.
            override_gate: True to serve a version that the gate held.
            if_current: refuse with StaleParent unless this version is current now. A repetition of the latest switch
                (same version, ``if_current``, reason and key) is not refused: its first response may have been lost.
            key: the id of the API key of the request, kept with the reason.

        Raises:
            GateHeld: the gate did not pass the version, and ``override_gate`` is False.
            StaleParent: ``if_current`` is not current.
            ValueError: the reason is empty.
            UnknownVersion: there is no such version.
        """
        if not reason.strip():
            raise ValueError("promote: a reason is kept in the history; say why")
        self._check_named(version)
        record = self._reader.record(version)
        failed = [str(check.get("metric")) for check in record.manifest.gate if check.get("verdict") == "fail"]
        gated = record.state == "held" or (record.state == "candidate" and bool(failed))
        if gated and not override_gate:
            why = "; ".join(record.reasons) or "gate failed on " + ", ".join(failed)
            raise GateHeld(
                f"version {version} of '{self._files.name}' is held: {why}. "
                "To serve it all the same, promote it with override_gate"
            )
        self._switch(
            Switch(version, "promote", reason, override_gate, key),
            expected=if_current,
            compare=if_current is not None,
            overrides=gated,
        )

    def retain(self, keep_last: int) -> list[str]:
        """Expire old versions and return their names.

        The current version and the last ``keep_last`` served versions are kept. So are all versions newer than the
        oldest of these, and their anchor versions. Manifests stay; open readers stay readable.

        Raises:
            ValueError: ``keep_last`` is less than 1.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}: the current version is always kept")
        with disk_errors(self._files.path), self._files.writing():
            served = self._files.pointer.read()
            if served.version is None:
                return []
            staying = {*served.versions[-keep_last:], served.version}
            manifests = [self._reader.manifest(version) for version in staying if not self._files.is_expired(version)]
            staying |= {manifest.anchor_version for manifest in manifests}
            # The version that drift is counted from, if it is not the generation's first.
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
        """Remove the files of a version that is not served."""
        with self._files.writing():
            mark = self._files.read_state(version)
            self._files.save_state(version, {**mark, "reasons": mark.get("reasons", []), "state": "expired"})
            self._reader.forget(version)
            self._files.remove_expired()

    def _check_named(self, version: str) -> None:
        """Raise UnknownVersion if ``version`` is ``current``.

        By the time of the change ``current`` might mean another version.
        """
        if version == "current":
            raise UnknownVersion(
                f"'current' of '{self._files.name}' is no name of a version: name one, such as v000001"
            )

    def _switch(self, switch: Switch, *, expected: str | None, compare: bool, overrides: bool = False) -> None:
        version, name = switch.version, self._files.name
        self._check_named(version)
        with disk_errors(self._files.path), self._files.writing():
            served = self._files.pointer.read()
            if served.version == version and (switch.kind == "publish" or not compare or expected == version):
                return
            if compare and _is_done(served, switch, expected):
                return
            has_lost_all = switch.kind == "publish" and not served.versions
            if compare and served.version != expected and not has_lost_all:
                remedy = "look at what is served now, then decide again"
                if switch.kind == "publish":
                    remedy = f"{version} is based on a version no longer served; refresh again from the current one"
                raise StaleParent(f"version {served.version} of '{name}' is current, not {expected}: {remedy}")
            state = self._reader.record(version).state
            if state == "expired":
                raise UnknownVersion(f"version {version} of '{name}' has expired: its vectors were removed")
            if switch.kind == "publish" and state != "candidate":
                raise StoreError(f"version {version} of '{name}' is {state}: only a candidate is published; promote it")
            if self._reader.open(version).manifest.users is not None:
                # Damage in either part is found before the switch.
                self._reader.recommender(version)
            entry: dict[str, Any] = {**asdict(switch), "at": utc_now()}
            if overrides:
                # Before the switch, so that a version served against the gate's verdict always records who promoted it.
                override = {part: entry[part] for part in ("reason", "key", "at")}
                before = self._files.read_state(version) or {"state": "held"}
                self._files.save_state(version, {**before, "override": override})
            self._files.pointer.switch(entry)


def _is_done(served: Served, switch: Switch, expected: str | None) -> bool:
    """Return True if the latest switch was from ``expected`` and has the version, reason and key of ``switch``."""
    if len(served.history) < 2:
        return False
    before, latest = served.history[-2:]
    asked = (expected, switch.version, switch.reason, switch.key)
    return (before["version"], latest["version"], latest["reason"], latest["key"]) == asked
