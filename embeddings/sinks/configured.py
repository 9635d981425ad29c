"""Sinks that the operator has configured: a YAML file of names, which EVENKEEL_SINKS names.

    warehouse:
      url: postgresql://loader:${WAREHOUSE_PASSWORD}@db.internal:5432/vectors?schema=recsys
      tenant: shop

Jobs name a sink and never its address. So users reach no host that the operator has not chosen, and see no password.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
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
            SinkError: the URL is invalid, or the package of its scheme is not installed.
        """
        try:
            return open_sink(self.url)
        except (ValueError, ImportError) as error:
            raise SinkError(f"sink '{self.name}': {error}") from None


def read_sinks(path: str | Path | None, environment: Mapping[str, str] | None = None) -> dict[str, ConfiguredSink]:
    """Return the sinks of a file by their names; none if ``path`` is None or empty.

    ``environment`` has the variables that URLs name as ``${NAME}``; None: those of this process.

    Raises:
        SinkError: the file cannot be read, or an entry is invalid; the message names the entry.
    """
    if not path:
        return {}
    try:
        document = yaml.safe_load(Path(path).read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise SinkError(
            f"{SINKS_VARIABLE}: {path} cannot be read: {error}: name a file of sinks, or unset it"
        ) from None
    except yaml.YAMLError as error:
        raise SinkError(f"{SINKS_VARIABLE}: {path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise SinkError(f"{SINKS_VARIABLE}: {path}: write NAME: {{url: URL}} for each sink")
    variables = os.environ if environment is None else environment
    return {
        str(name): _configured(f"{path}: sink '{name}'", name, entry, variables) for name, entry in document.items()
    }


def _configured(where: str, name: Any, entry: Any, variables: Mapping[str, str]) -> ConfiguredSink:
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise SinkError(f"{where}: name it by [a-z0-9][a-z0-9_-]{{0,62}}")
    if not isinstance(entry, dict) or not isinstance(entry.get("url"), str):
        raise SinkError(f"{where}: has no url: write {name}: {{url: URL}}")
    unknown = sorted(map(str, entry.keys() - set(_FIELDS)))
    if unknown:
        raise SinkError(f"{where}: {', '.join(unknown)}: no such field: a sink has {' and '.join(_FIELDS)}")
    missing = [variable for variable in _VARIABLE.findall(entry["url"]) if variable not in variables]
    if missing:
        raise SinkError(f"{where}: url names {', '.join(missing)}, which the environment does not have: set it")
    whole = _VARIABLE.fullmatch(entry["url"])
    # A part of a URL, such as a password, is quoted.
    url = variables[whole[1]] if whole else _VARIABLE.sub(lambda part: quote(variables[part[1]], ""), entry["url"])
    return ConfiguredSink(name, str(entry.get("tenant", "default")), url)
