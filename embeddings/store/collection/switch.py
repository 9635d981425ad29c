"""Which version is served: publication, promotion, rollback, and candidates that are held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from embeddings.store.collection.directory import CollectionDirectory
from embeddings.store.collection.reader import CollectionReader
from embeddings.store.files import GateHeld, StaleParent, StoreError, UnknownVersion, disk_errors
from embeddings.store.pointer import Served
from embeddings.store.views import utc_now


@dataclass(frozen=True)
class Switch:
    """A switch that is asked for, as the history has it.

    Attributes:
        version: what is to be served.
        kind: publish or promote.
        reason: kept in the history.
        override_gate: serve it although the gate held it.
        key: the id of the API key that asked for it.
    """

    version: str
    kind: str
    reason: str
    override_gate: bool = False
    key: str | None = None


class VersionSwitch:
    """Moves the pointer of one collection."""

    def __init__(self, files: CollectionDirectory, reader: CollectionReader):
        self._files = files
        self._reader = reader

    def publish(self, version: str, expected_parent: str | None) -> None:
        """Make ``version`` the current one if ``expected_parent`` is current now (see Collection.publish)."""
        self._switch(Switch(version, "publish", "published"), expected=expected_parent, compare=True)

    def hold(self, version: str, reasons: Sequence[str]) -> None:
        """Mark a candidate as held (see Collection.hold)."""
        self._check_named(version)
        with disk_errors(self._files.path), self._files.writing():
            state = self._reader.record(version).state
            if state not in ("candidate", "held"):
                raise StoreError(f"version {version} of '{self._files.name}' is {state}: only a candidate can be held")
            self._files.save_state(version, {"state": "held", "reasons": list(reasons), "at": utc_now()})

    def promote(self, switch: Switch, if_current: str | None) -> None:
        """Make any kept version the current one (see Collection.promote)."""
        if not switch.reason.strip():
            raise ValueError("promote: a reason is kept in the history; say why")
        self._check_named(switch.version)
        record = self._reader.record(switch.version)
        failed = [str(check.get("metric")) for check in record.manifest.gate if check.get("verdict") == "fail"]
        gated = record.state == "held" or (record.state == "candidate" and bool(failed))
        if gated and not switch.override_gate:
            why = "; ".join(record.reasons) or "gate failed on " + ", ".join(failed)
            raise GateHeld(
                f"version {switch.version} of '{self._files.name}' is held: {why}. "
                "To serve it all the same, promote it with override_gate"
            )
        self._switch(switch, expected=if_current, compare=if_current is not None, overrides=gated)

    def _check_named(self, version: str) -> None:
        """Raise UnknownVersion unless a change gives the version's own name.

        What ``current`` means may be another version by the time the change happens.
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
            if compare and served.version != expected:
                remedy = "look at what is served now, then decide again"
                if switch.kind == "publish":
                    remedy = f"{version} rests on what is not served any more; refresh again from the current one"
                raise StaleParent(f"version {served.version} of '{name}' is current, not {expected}: {remedy}")
            state = self._reader.record(version).state
            if state == "expired":
                raise UnknownVersion(f"version {version} of '{name}' has expired: its vectors were removed")
            if switch.kind == "publish" and state != "candidate":
                raise StoreError(f"version {version} of '{name}' is {state}: only a candidate is published; promote it")
            self._reader.open(version)
            entry: dict[str, Any] = {**asdict(switch), "at": utc_now()}
            if overrides:
                # Before the switch: a version that is served over the gate's verdict always says who had it so.
                override = {part: entry[part] for part in ("reason", "key", "at")}
                before = self._files.read_state(version) or {"state": "held"}
                self._files.save_state(version, {**before, "override": override})
            self._files.pointer.switch(entry)


def _is_done(served: Served, switch: Switch, expected: str | None) -> bool:
    """Return True if the latest switch was this one, from ``expected``, for this reason and by this key."""
    if len(served.history) < 2:
        return False
    before, latest = served.history[-2:]
    asked = (expected, switch.version, switch.reason, switch.key)
    return (before["version"], latest["version"], latest["reason"], latest["key"]) == asked
