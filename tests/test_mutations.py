"""The list of mutations is kept as the code changes: each can be made, and names tests that are there."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutations import ROOT, DoesNotApply, Mutation, load

MUTATIONS = load()


def test_the_list_is_whole() -> None:
    assert len(MUTATIONS) >= 60
    assert all(count == 1 for count in Counter(mutation.id for mutation in MUTATIONS).values())
    folders = Counter(mutation.file.partition("/")[0] for mutation in MUTATIONS)
    assert min(folders[name] for name in ("embeddings", "trainer", "service")) >= 16, folders


def test_each_can_be_made_and_its_tests_are_there() -> None:
    problems = []
    for mutation in MUTATIONS:
        try:
            mutation.check(ROOT)
        except DoesNotApply as error:
            problems.append(str(error))
        named = {test.partition("::")[0] for test in mutation.tests}
        problems += [f"{mutation.id} names {name}, which is not there" for name in named if not (ROOT / name).is_file()]
        problems += [f"{mutation.id} names {test}, which is not there" for test in mutation.tests if not defined(test)]
        if not named or mutation.before == mutation.after:
            problems.append(f"{mutation.id} changes nothing, or names no test")
    assert not problems, "\n".join(problems)


def defined(test: str) -> bool:
    """Whether a module of the test's folder, or of those in it, has a function of that name; or it names none."""
    path, *names = test.partition("[")[0].split("::")
    files = (ROOT / path).parent.rglob("*.py")
    return not names or any(f"def {names[-1]}(" in file.read_text("utf-8") for file in files)


@pytest.mark.parametrize("text", ["", "a = 1\na = 1\n"])
def test_a_text_that_is_not_there_once_is_said(text: str) -> None:
    mutation = Mutation("twice", "any.py", "a fault", "a = 1", "a = 2", ("tests/test_mutations.py",))
    with pytest.raises(DoesNotApply, match="put what stands there"):
        mutation.applied_to(text)
