"""FinalMLP: two MLPs of differently gated features, fused by products (Mao et al., AAAI 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from trainer.spec.base import later
from trainer.spec.models.base import ClickSpec, Layers, Size
from trainer.spec.models.size import ModelSize, linear_layers, tower_size
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec


class FinalMLPSpec(ClickSpec):
    """FinalMLP: a stream of ``hidden`` layers and one of ``second_hidden`` layers (default: those of ``hidden``).

    Each stream is gated by an MLP of ``gate_hidden`` layers that reads the features ``first_gate`` or ``second_gate``
    (none: a learned vector). The streams are fused by products of ``fusion_heads`` heads.
    """

    kind: Literal["finalmlp"]
    reads_vectors = True
    hidden: tuple[Size, ...] = (128, 64)  # they cannot grow: the fusion's heads cut the last layer into parts
    second_hidden: tuple[Size, ...] | None = later(None, min_length=1)
    gate_hidden: Layers = later((64,), max_length=16)
    first_gate: tuple[str, ...] = later(())
    second_gate: tuple[str, ...] = later(())
    fusion_heads: int = later(1, ge=1, le=4096)

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        dim, width = self.embedding_dim, num_features * self.embedding_dim + num_dense
        streams = (self.hidden, self.second_hidden or self.hidden)
        size = ModelSize(tower=width)
        for told, hidden in zip((self.first_gate, self.second_gate), streams, strict=True):
            sizes = [max(1, len(told)) * dim, *self.gate_hidden, width]
            parameters, multiply_adds = linear_layers(sizes)
            if told:
                size += ModelSize(parameters, 0, sum(sizes) + 2 * width, width, multiply_adds)
            else:
                # A learned vector is computed once for a batch, not for each sample.
                size += ModelSize(parameters + dim)
            size += tower_size([width, *hidden], residual=self.residual, batch_norm=self.batch_norm, logits=False)
        first, second = streams[0][-1], streams[1][-1]
        products = first * second // self.fusion_heads
        return size + ModelSize(first + second + 1 + products, 0, 2 * (first + second), 0, first + second + products)

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        if not self.hidden:
            yield FieldProblem("model.hidden", "finalmlp fuses the hidden layers of two streams", "give at least one")
        for name in ("hidden", "second_hidden"):
            sizes = getattr(self, name)
            if sizes and sizes[-1] % self.fusion_heads:
                yield FieldProblem(
                    "model.fusion_heads",
                    f"{self.fusion_heads} heads do not divide the last of {name}, {sizes[-1]}",
                    "use a divisor",
                )

    def fit_problems(self, job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
        yield from super().fit_problems(job, dataset)
        for field in ("first_gate", "second_gate"):
            for name in getattr(self, field):
                if name not in dataset.features:
                    there = ", ".join(sorted(dataset.features))
                    yield FieldProblem(f"model.{field}", f"no such feature '{name}' (there are {there})")
                elif dataset.features[name].gives_numbers:
                    yield FieldProblem(
                        f"model.{field}", f"'{name}' is a number, but gates read vectors of ids", "name features of ids"
                    )
