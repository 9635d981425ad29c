"""Faults that the suite must catch: what shows that a faster suite has lost nothing.

``mutations.yaml`` holds them: a file, what the fault is, the exact text before and after, and tests that catch it.
``python -m tests.mutations`` makes each in a copy of the tree and runs those tests. They are faults that a person makes
(a wrong comparison, a forgotten branch, a call of the fence left out), none that ends a program at import.

Where they lie was drawn: ``random.Random(16).sample`` of all lines of the ``*.py`` files that git lists in a folder, in
the order of their names, without ``embeddings/kernels/cpu``: 30 lines of embeddings, 34 of trainer and of service each,
8 of benchmarks and examples together, at commit bd4e82f. ``drawn`` names such a line, by the file that holds its code
now; its fault is in the same file, at the nearest place where one can be made that a test should see. Lines without one
(tables of columns, command lines, what is printed) were passed over. Faults without ``drawn`` were put where the draw
had left out what is risky: swaps, the gate, fences, leases, signatures, daylight saving. What the suite of that time
did not catch is not in the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutations.yaml")


class DoesNotApply(Exception):
    """The text of a mutation is not in its file exactly once."""


@dataclass(frozen=True)
class Mutation:
    """``fault``: in one line. ``before`` occurs once in ``file``, and becomes ``after``. ``tests``: files or node ids
    of pytest, of which at least one fails then. ``drawn``: the line that the seed chose, numbered as at that time."""

    id: str
    file: str
    fault: str
    before: str
    after: str
    tests: tuple[str, ...]
    drawn: str | None = None

    def applied_to(self, text: str) -> str:
        """The mutated text of the file. Raises DoesNotApply."""
        count = text.count(self.before)
        if count != 1:
            raise DoesNotApply(
                f"{self.id}: the text to replace occurs {count} times in {self.file}, not once: put what stands there "
                f"now into {LIST.relative_to(ROOT)}, or another fault of the same kind:\n{self.before}"
            )
        return text.replace(self.before, self.after)

    def check(self, tree: Path) -> str:
        """The mutated text of its file in ``tree``. Raises DoesNotApply."""
        path = tree / self.file
        if not path.is_file():
            raise DoesNotApply(f"{self.id}: there is no {self.file}: name the file that holds this code now")
        return self.applied_to(path.read_text("utf-8"))

    def apply(self, tree: Path) -> None:
        """Mutates the file in ``tree``. Raises DoesNotApply."""
        (tree / self.file).write_text(self.check(tree), "utf-8")


def load() -> list[Mutation]:
    """All mutations of the list, in its order."""
    entries = yaml.safe_load(LIST.read_text("utf-8"))
    return [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
