"""Pages from templates: the Jinja environment, its filters, and the addresses of static files."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

from trainer.runs import published_epoch
from trainer.spec.evaluation import title_of

_HERE = Path(__file__).resolve().parent
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
STATIC = {file.name: _TYPES[file.suffix] for file in sorted((_HERE / "static").iterdir())}
"""The media type of each static file, by the file's name."""


def page(template: str, **values: Any) -> str:
    """Return a template's HTML; every value is escaped."""
    return _templates().get_template(template).render(values)


@functools.cache
def static_file(name: str) -> tuple[bytes, str]:
    """Return a static file and the short hash in its address, which makes browsers load a new file at once."""
    body = (_HERE / "static" / name).read_bytes()
    return body, hashlib.sha256(body).hexdigest()[:12]


def _address(name: str) -> str:
    return f"/static/{name}?v={static_file(name)[1]}"


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= FILTERS
    environment.globals |= {"static": _address, "dict": dict, "zip": zip}
    return environment


def instant(at: datetime.datetime | str) -> str:
    """Format a time as RFC 3339, for ``<time datetime>``."""
    if isinstance(at, str):
        return at
    return at.astimezone(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def utc(at: datetime.datetime | str) -> str:
    moment = datetime.datetime.fromisoformat(at) if isinstance(at, str) else at
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def duration(seconds: float | None) -> str:
    """Format a duration: ``47 s``, ``3 min 12 s``, ``2 h 5 min``."""
    if seconds is None:
        return "–"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def thousands(number: float | None) -> str:
    return "–" if number is None else f"{number:,.0f}"


def figure(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def size(num_bytes: float | None) -> str:
    """Format a number of bytes: ``512 B``, ``1.5 MiB``."""
    if num_bytes is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def document(value: Any) -> str:
    """Format a document for reading: JSON with an indent."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def verdicts(gate: list[dict[str, Any]]) -> str:
    """Summarize the gate's verdicts: ``6 passed`` or ``2 failed of 8``."""
    failed = sum(check.get("verdict") == "fail" for check in gate)
    return f"{failed} failed of {len(gate)}" if failed else f"{len(gate)} passed"


FILTERS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (instant, utc, duration, thousands, figure, size, document, verdicts)
} | {"quality": published_epoch.in_words, "beside": published_epoch.beside, "title_of": title_of}
