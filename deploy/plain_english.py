"""Rules of plain English that a machine can check: python -m deploy.plain_english.

- A docstring names a thing: it begins neither with a word of QUESTIONS nor with "Return what" or "Tell whether".
- The text below a constant or field says what it limits or holds: it begins neither with a word of QUESTIONS nor with a
  preposition.
- A sentence of a document, or its part before a semicolon or colon, has at most MAX_WORDS words.
- Modules and classes have no name of RETIRED_NAMES.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("embeddings", "trainer", "service", "deploy")
MAX_WORDS = 30
"""Most words of a sentence in a document."""
QUESTIONS = "What|How|Whether|Where|Which|When|Those|That|Who"
"""First words of a clause whose noun is missing."""
OPENING = re.compile(rf"\s*({QUESTIONS}|(Return|Yield|Tell|Say)s? (what|whether|how|where|which|why))\b")
CONSTANT = re.compile(rf"\s*({QUESTIONS}|Of|So|With|In|For so|By so|Without)\b")
RETIRED_NAMES = frozenset(
    {"halves", "leaving", "holding", "turns", "siblings", "kept_parts", "stored", "notice", "by_bucket", "opening"}
)
GENERATED = ("docs/gpu/", "CHANGELOG.md")
"""Documents that are written by code, or that nobody edits afterwards."""


def main() -> int:
    faults = [*_of_code(), *_of_documents()]
    print(*faults, sep="\n" if faults else "")
    return int(bool(faults))


def _of_code() -> Iterator[str]:
    for path in sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT)
        if path.stem in RETIRED_NAMES:
            yield f"{name}: another name for the module (deploy/plain_english.py)"
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                docstring = ast.get_docstring(node)
                if docstring and OPENING.match(docstring):
                    yield f"{name}:{node.body[0].lineno}: name the thing: {docstring.splitlines()[0]}"
                yield from (f"{name}:{line}: say what it limits or holds: {text}" for line, text in _constants(node))


def _constants(node: ast.AST) -> Iterator[tuple[int, str]]:
    body = getattr(node, "body", [])
    for statement, text in itertools.pairwise(body):
        if (
            isinstance(statement, ast.Assign | ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and CONSTANT.match(str(text.value.value))
        ):
            yield text.lineno, str(text.value.value).splitlines()[0]


def _of_documents() -> Iterator[str]:
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]):
        name = str(path.relative_to(ROOT))
        if not name.startswith(GENERATED):
            for sentence in sentences(path.read_text("utf-8")):
                # Formulas, and figures with their error, do not count as words.
                count = sum(
                    bool(re.search("[A-Za-z]{2}", word)) for word in re.sub("`[^`]*`", "code", sentence).split()
                )
                if count > MAX_WORDS:
                    yield f"{name}: {count} words: {sentence}"


def sentences(text: str) -> Iterator[str]:
    """Yield sentences, or their parts by semicolons, of paragraphs and lists: not of tables, headings and code."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    paragraphs: list[list[str]] = [[]]
    for line in text.splitlines():
        line = line.strip()
        item = re.match(r"([-*]|\d+\.) ", line)
        if not line or line.startswith(("#", "|", "![")):
            paragraphs.append([])
        elif item:
            paragraphs.append([line[item.end() :]])
        else:
            paragraphs[-1].append(line)
    for paragraph in paragraphs:
        plain = re.sub(r"\]\([^)]*\)", "]", " ".join(paragraph)).replace("**", "")
        yield from re.split(r"(?<=[.!?:;])[)\"'\]*]*\s+", plain) if plain else ()


if __name__ == "__main__":
    sys.exit(main())
