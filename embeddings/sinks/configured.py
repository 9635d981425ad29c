"""Sinks that the operator has configured: a YAML file of names, which EVENKEEL_SINKS names.

    warehouse:
      url: postgresql://loader:${WAREHOUSE_PASSWORD}@db.internal:5432/vectors?schema=recsys
      tenant: shop

Jobs name a sink and never its address. So users reach no host that the operator has not chosen, and see no password.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from embeddings.sinks.base import Sink, SinkError
from embeddings.sinks.registry import open_sink
from embeddings.store import NAME_PATTERN

SINKS_VARIABLE = "EVENKEEL_SINKS"
_FIELDS = ("url", "tenant")
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class ConfiguredSink:
    """A sink by its name; ``tenant``: the tenant whose collections it may hold. ``url`` may hold a password."""

    name: str
    tenant: str
    url: str = field(repr=False)

    def open(self) -> Sink:
        """Return the sink; a server is contacted on first use.

        Raises:
            SinkError: the URL is invalid, a variable that it names is not set, or the package of its scheme is missing.
        """
        missing = [variable for variable in _VARIABLE.findall(self.url) if variable not in os.environ]
        if missing:
            raise SinkError(f"sink '{self.name}': its url names {', '.join(missing)}: set it in the environment")
        whole = _VARIABLE.fullmatch(self.url)
        # A part of a URL, such as a password, is quoted.
        url = os.environ[whole[1]] if whole else _VARIABLE.sub(lambda part: quote(os.environ[part[1]], ""), self.url)
        try:
            return open_sink(url)
        except (ValueError, ImportError) as error:
            raise SinkError(f"sink '{self.name}': {error}") from None


def read_sinks(path: str | Path | None) -> dict[str, ConfiguredSink]:
    """Return the sinks of a file by their names; none if ``path`` is None or empty.

    Raises:
        SinkError: the file cannot be read, or an entry is invalid; the message names the entry.
    """
    if not path:
        return {}
    where = f"{SINKS_VARIABLE}: {path}"
    try:
        document = yaml.safe_load(Path(path).read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise SinkError(f"{where} cannot be read: {error}: name a file of sinks, or unset it") from None
    except yaml.YAMLError as error:
        # The lines that the parser shows may hold a password.
        place = getattr(error, "problem_mark", None)
        raise SinkError(
            f"{where} is no YAML{'' if place is None else f', line {place.line + 1}'}: correct it"
        ) from None
    if not isinstance(document, dict):
        raise SinkError(f"{where}: write NAME: {{url: URL}} for each sink")
    return {str(name): _configured(f"{where}: sink '{name}'", name, entry) for name, entry in document.items()}


def _configured(where: str, name: Any, entry: Any) -> ConfiguredSink:
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise SinkError(f"{where}: name it by [a-z0-9][a-z0-9_-]{{0,62}}")
    if not isinstance(entry, dict) or not isinstance(entry.get("url"), str):
        raise SinkError(f"{where}: has no url: write {name}: {{url: URL}}")
    unknown = sorted(map(str, entry.keys() - set(_FIELDS)))
    if unknown:
        raise SinkError(f"{where}: {', '.join(unknown)}: no such field: a sink has {' and '.join(_FIELDS)}")
    return ConfiguredSink(name, str(entry.get("tenant", "default")), entry["url"])
