"""YAML as data alone: the safe loader's types, no key twice in a mapping, no aliases that multiply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

MAX_ALIASES = 100


class _Loader(yaml.SafeLoader):
    """Refuses what the safe loader lets pass: it keeps the last of two equal keys, and expands aliases without end."""

    num_aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            self.num_aliases += 1
            if self.num_aliases > MAX_ALIASES:
                raise yaml.constructor.ConstructorError(
                    None, None, f"more than {MAX_ALIASES} aliases: write them out", self.peek_event().start_mark
                )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool) and key in seen:
                raise yaml.constructor.ConstructorError(
                    "in a mapping", node.start_mark, f"the key '{key}' is there twice: remove one", key_node.start_mark
                )
            if isinstance(key, str | int | float | bool):
                seen.add(key)
        return super().construct_mapping(node, deep)


def load_all(text: str) -> Iterator[Any]:
    """The documents of a text. Raises yaml.YAMLError."""
    yield from yaml.load_all(text, Loader=_Loader)
