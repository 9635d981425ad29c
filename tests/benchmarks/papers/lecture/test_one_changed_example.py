"""One changed example: descent takes the steps of its definition, and figures are of the sets they are named for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.papers.data.quick_texts import write_quick_sentences
from benchmarks.papers.lecture.changed_example import DESCENTS, sections
from benchmarks.papers.lecture.linear_margin import read_rows
from benchmarks.papers.lecture.one_changed_example import ChangedExampleSettings, dense, descend, measure

SMALL = ChangedExampleSettings(4, "one", 0.1, steps=120, points=3, examples=40, neighbours=2)


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    write_quick_sentences(tmp_path)
    return tmp_path / "sentence_polarity.parquet"


@pytest.mark.parametrize(
    ("steps", "rows"), [([-1], [0, 1, 2]), ([1], [1]), ([2, 0], [2, 0])], ids=["all", "one", "two"]
)
@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_a_step_goes_down_the_mean_logloss_of_its_examples(steps: list[int], rows: list[int], l2: float) -> None:
    x, labels = torch.randn(3, 2, dtype=torch.float64), torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    weight, bias = model.weight.detach().clone()[0], model.bias.detach().clone()
    for of in [rows] if steps == [-1] else [[row] for row in rows]:
        error = torch.sigmoid(x[of] @ weight + bias) - labels[of]
        weight, bias = (
            weight - 0.5 * ((error[:, None] * x[of]).mean(0) + 2 * l2 * weight),
            bias - 0.5 * (error.mean() + 2 * l2 * bias),
        )
    descend(model, x, labels, np.array(steps), 0.5, l2)
    assert model.weight[0].detach() == pytest.approx(weight)
    assert model.bias.detach() == pytest.approx(bias)


def test_rows_are_those_of_the_sparse_classifier(sentences: Path) -> None:
    rows, _, num_words = read_rows(sentences, 0)
    weights = torch.randn(num_words, dtype=torch.float64)
    assert dense(rows, num_words) @ weights.float() == pytest.approx(rows.products(weights), abs=1e-5)


@pytest.mark.parametrize("by", ["one", "all"])
def test_sets_that_do_not_differ_give_one_model_and_sets_that_do_give_others(sentences: Path, by: str) -> None:
    of = replace(SMALL, by=by)
    found = list(measure(of, sentences, 0))
    assert [one["epoch"] for one in found] == [1, 2, 3]
    assert [one["passes"] for one in found] == ([40, 80, 120] if by == "all" else [1, 2, 3])
    assert all(one["epsilon"] > 0 and one["parameters"] > 0 and one["apart"] >= 0 for one in found)
    assert found == list(measure(of, sentences, 0))
    # Before the first pass has come to the changed example, descent by single ones has seen no difference.
    early = list(measure(replace(of, steps=3), sentences, 1))
    assert [one["epsilon"] > 0 for one in early] == ([True] * 3 if by == "all" else [False] * 3)


def test_too_few_sentences_and_a_file_that_is_not_there_are_named(sentences: Path) -> None:
    with pytest.raises(ValueError, match=r"sentence_polarity\.parquet: 320 sentences train, 319 and one for each S'"):
        list(measure(replace(SMALL, examples=319), sentences, 0))
    with pytest.raises(ValueError, match=r"nothing\.parquet is not there: a row for each sentence"):
        list(measure(SMALL, sentences.with_name("nothing.parquet"), 0))


def test_the_report_compares_where_the_training_loss_is_the_same() -> None:
    def record(losses: list[float]) -> dict[str, object]:
        figures = [
            {"epoch": n, "split": "test", "passes": 10.0 * n, "logloss": loss, "apart": 0.01, "epsilon": n / 10,
             "parameters": 0.2, "examples": 70, "neighbours": 3}
            for n, loss in enumerate(losses, 1)
        ]  # fmt: skip
        about = {"key": str(losses), "finished_at": "2026-01-01", "packages": {}, "git_commit": "", "command": "c"}
        return about | {"metrics": figures, "machine": "m", "seconds": 1.0}

    place = next(iter(DESCENTS))
    (section,) = sections({place: [record([0.6, 0.4, 0.2]), record([0.5, 0.25, 0.2])]})
    cells = {line[2]: line[3:] for line in section.lines}
    assert cells["0.5"] == ("15", "0.150", "0.0100", "0.2000")
    assert cells["0.3"] == ("25", "0.250", "0.0100", "0.2000")
    assert set(cells["0.1"]) == {"–"}
    assert cells["at the end"] == ("30", "0.300", "0.0100", "0.2000")
    assert "S has 70 sentences" in section.notes[0]
    assert "of 3 S'" in section.notes[0]
    assert list(sections({})) == []
