"""What is wrong with a spec: one problem for each field, the same after pickling, for processes that pass it on."""

from __future__ import annotations

import pickle

import pytest

from trainer.spec import SpecError, parse_dataset
from trainer.spec.problems import FieldProblem, InvalidFieldsError, raise_if_invalid

PROBLEMS = (FieldProblem("epochs", "is 0", "use 1"), FieldProblem("", "is empty"))


def test_nothing_is_raised_without_problems():
    raise_if_invalid([])


def test_an_error_holds_and_says_all_problems():
    with pytest.raises(InvalidFieldsError) as caught:
        raise_if_invalid(iter(PROBLEMS))
    assert caught.value.problems == PROBLEMS
    assert str(caught.value) == "epochs: is 0: use 1; is empty"


@pytest.mark.parametrize("error", [InvalidFieldsError(PROBLEMS), SpecError("job.yaml", PROBLEMS)])
def test_it_survives_a_process_boundary(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.problems == PROBLEMS
    assert str(copy) == str(error)


def test_a_dataset_names_every_field_that_is_wrong():
    features = {
        "user": {"type": "id"},
        "item": {"type": "id", "shares": "product"},
        "price": {"type": "dense"},
        "seen": {"type": "id_list", "shares": "price"},
    }
    document = {"name": "d", "uri": "ftp://host/x.csv", "features": features, "label": {"column": "click"}}
    graphs = {"friends": {"uri": "g.csv", "source": "a", "target": "b", "of": "member"}}
    with pytest.raises(SpecError) as caught:
        parse_dataset({**document, "graphs": graphs})
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["features.seen.shares", "features.item.shares", "graphs.friends.of", "uri"]
