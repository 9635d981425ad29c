"""DIN: attention of a target over a user's list (Zhou et al., KDD 2018)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from trainer.spec.base import later
from trainer.spec.models.base import ClickSpec, Units
from trainer.spec.models.size import NORMALISED, ModelSize, linear_layers
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec


class DINSpec(ClickSpec):
    """DIN: ``attention_hidden`` layers of the attention unit, and their activation."""

    kind: Literal["din"]
    reads_vectors = True

    keeps_rows_of_lists = True
    has_context = False
    attention_hidden: Units = later((36,), max_length=16)
    attention_activation: Literal["dice", "prelu", "relu"] = later("dice")

    pools = False

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        dim, units = self.embedding_dim, sum(self.attention_hidden)
        parameters, multiply_adds = linear_layers([4 * dim, *self.attention_hidden, 1])
        if self.attention_activation != "relu":
            parameters += units
        # Kept for each id: its row, the target's row, their combinations, the weighted row, and the layers.
        held = 8 * dim + units * (2 + (NORMALISED if self.attention_activation == "dice" else 1))
        held = int(list_ids * held)
        attention = ModelSize(num_lists * parameters, 0, held, held, int(list_ids * multiply_adds))
        return super().size(num_features, num_dense=num_dense) + attention

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        method = job.regularizers.dropout_method
        if self.attention_activation == "dice" and method != type(method)():
            yield FieldProblem(
                "regularizers.dropout_method",
                "it needs separate samples, which dice mixes",
                "use attention_activation prelu",
            )

    def fit_problems(self, job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
        features = dataset.features
        single = {one.shares or name for name, one in features.items() if one.type == "id"}
        if not any(one.type == "id_list" and (one.shares or name) in single for name, one in features.items()):
            yield FieldProblem(
                "model.kind",
                "din needs a list of ids that shares the table of a single id",
                f"add one, such as a history with shares: item (there are {', '.join(sorted(features))})",
            )
        yield from super().fit_problems(job, dataset)
        for name, one in features.items():
            if one.weights is not None:
                yield FieldProblem(
                    f"features.{name}.weights", "din weighs lists itself", "leave them out, or use another model"
                )
