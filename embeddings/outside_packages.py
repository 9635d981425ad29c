"""Plugins: classes and functions that other packages register, by the group and name of an entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

Kind = TypeVar("Kind")


class OutsidePackageError(ValueError):
    """A plugin cannot be imported; the message names it, its package, and the remedy."""


class Registry(dict[str, Kind]):
    """Entries of this package, keyed by name; other names are searched among other packages' entry points.

    A package that cannot be imported is an error only when its entry is used. ``group`` is the group of entry points,
    such as ``evenkeel.stores``.
    """

    def __init__(self, group: str, own: Mapping[str, Kind]):
        super().__init__(own)
        self.group = group

    def __missing__(self, name: str) -> Kind:
        """Import the entry that another package registers under this name.

        Raises:
            KeyError: No package registers it.
            OutsidePackageError: It cannot be imported.
        """
        for entry in entry_points(group=self.group, name=name):
            return load(entry)
        raise KeyError(name)


@dataclass(frozen=True)
class UrlScheme(Generic[Kind]):
    """A function that opens the URLs of a scheme; messages show the URLs' ``form``, such as ``s3://BUCKET/PREFIX``."""

    form: str
    open: Callable[[str], Kind]

    def __call__(self, url: str) -> Kind:
        return self.open(url)


def usable_forms(registry: Registry[Any]) -> str:
    """List the URL patterns of a registry's schemes, for messages; for plugins only the scheme is known."""
    forms = [entry.form for entry in registry.values()]
    forms += [f"{entry.name}://..." for entry in entry_points(group=registry.group)]
    *others, last = dict.fromkeys(forms)
    return f"{', '.join(others)} or {last}" if others else last


def load_all(group: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Import a group's entry points; return {name: loaded object} and {name: error message of the import}."""
    loaded, broken = {}, {}
    for entry in entry_points(group=group):
        try:
            loaded[entry.name] = load(entry)
        except OutsidePackageError as error:
            broken[entry.name] = str(error)
    return loaded, broken


def load(entry: EntryPoint) -> Any:
    """Import the object that an entry point names.

    Raises:
        OutsidePackageError: It cannot be imported.
    """
    try:
        return entry.load()
    except Exception as error:  # an import may raise anything
        package = entry.dist.name if entry.dist is not None else entry.module
        raise OutsidePackageError(
            f"'{entry.name}' of package {package} cannot be imported (entry point {entry.value} of {entry.group}): "
            f"{type(error).__name__}: {error}; mend the package, or `pip uninstall {package}`"
        ) from error
