"""YAML as plain data: the safe loader's types, no duplicate key in a mapping, no aliases that multiply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

MAX_ALIASES = 100
MAX_MERGED = 1000


class _Loader(yaml.SafeLoader):
    """Safe loader of YAML that also refuses duplicate keys, too many aliases and large merges."""

    def __init__(self, stream: Any):
        super().__init__(stream)
        self.num_aliases = 0
        self.flattening: list[Any] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            self.num_aliases += 1
            if self.num_aliases > MAX_ALIASES:
                raise _refusal(self.peek_event(), f"more than {MAX_ALIASES} aliases: write them out")
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: Any) -> None:
        """Merge into ``node`` the mappings that its merge keys (``<<``) name.

        A mapping that is large, or contains ``node``, is refused.
        """
        self.flattening.append(node)
        for key_node, value_node in node.value:
            if key_node.tag != "tag:yaml.org,2002:merge":
                continue
            for named in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                if isinstance(named, yaml.MappingNode):
                    if any(named is outer for outer in self.flattening):
                        raise _refusal(key_node, "a merge key (<<) contains itself: write it out")
                    self.flatten_mapping(named)
                    if len(named.value) > MAX_MERGED:
                        raise _refusal(key_node, f"a merge key (<<) adds more than {MAX_MERGED} keys: write them out")
        self.flattening.pop()
        super().flatten_mapping(node)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool) and key in seen:
                raise yaml.constructor.ConstructorError(
                    "in a mapping", node.start_mark, f"the key '{key}' occurs twice: remove one", key_node.start_mark
                )
            if isinstance(key, str | int | float | bool):
                seen.add(key)
        return super().construct_mapping(node, deep)


def _refusal(node: Any, message: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, message, node.start_mark)


def load_all(text: str) -> Iterator[Any]:
    """Yield the documents of a text.

    Raises:
        yaml.YAMLError: The text is not valid YAML, or has duplicate keys or too many aliases.
    """
    yield from yaml.load_all(text, Loader=_Loader)
