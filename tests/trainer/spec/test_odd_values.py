"""A value of another type, wherever it stands in a job or a dataset, is told by its field and never a traceback."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.spec import SpecError, parse_dataset, parse_job, yaml_documents

EXAMPLES = Path(__file__).parents[3] / "examples"
ODD: list[Any] = [None, True, 0, -1, 1.5, "", "odd", [], [[]], [{}], {}, {"kind": {}}, {"kind": []}, {"odd": []}]


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value of a document, its own first."""
    yield at
    items = (
        document.items() if isinstance(document, dict) else enumerate(document if isinstance(document, list) else ())
    )
    for key, value in items:
        yield from places(value, (*at, key))


def replaced(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return copy.deepcopy(value)
    document = copy.deepcopy(document)
    inner = document
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = copy.deepcopy(value)
    return document


def documents() -> Iterator[tuple[str, Callable[..., Any], Any]]:
    for file in sorted(EXAMPLES.glob("*.yaml")):
        for number, document in enumerate(yaml_documents.load_all(file.read_text())):
            parse = parse_job if "model" in document else parse_dataset
            # As written, and with every default spelled out.
            for name, whole in (("", document), ("-whole", parse(document).model_dump(mode="json"))):
                yield f"{file.stem}-{number}{name}", parse, whole


DOCUMENTS = list(documents())


@pytest.mark.parametrize(("parse", "document"), [case[1:] for case in DOCUMENTS], ids=[case[0] for case in DOCUMENTS])
def test_values_of_another_type(parse: Callable[..., Any], document: Any) -> None:
    refused = 0
    for at in places(document):
        for odd in ODD:
            try:
                parse(replaced(document, at, odd))
            except SpecError:
                refused += 1
    assert refused > 10
