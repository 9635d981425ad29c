"""Models with several labels: shared bottom, MMoE, PLE, ESMM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainer.spec.base import Spec, later
from trainer.spec.label_tasks import in_topological_order, label_tasks
from trainer.spec.losses import LOSSES
from trainer.spec.models.base import Layers, TowerSpec
from trainer.spec.models.size import ModelSize, tower_size
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec


class Task(Spec):
    """Dependence of one label on another: with ``given`` its score is conditional on the label ``given`` being 1.

    Its probability over all rows is then the product of both (Ma et al., ESMM, SIGIR 2018, equation 1).
    """

    given: str = Field(min_length=1)


class SeveralLabelsSpec(TowerSpec):
    """A model with a score for each of a dataset's ``labels``.

    ``tasks``: label -> task, which names the label on which the score is conditional.
    """

    tasks: dict[str, Task] = later({})

    losses = ()
    reads_labels = True
    reads_numbers = True
    has_dynamic_tables = True
    has_context = True
    counts_columns = None

    def size(
        self,
        num_features: int,
        *,
        num_dense: int = 0,
        num_lists: int = 0,
        list_ids: float = 0.0,
        num_labels: int = 1,
    ) -> ModelSize:
        """Return the size of the dense part of the model; ``num_labels``: number of the dataset's labels."""
        return self.size_on(num_features * self.embedding_dim + num_dense, num_labels)

    def size_on(self, inputs: int, num_labels: int) -> ModelSize:
        """Return the size of the dense part of the model on ``inputs`` inputs, all fields and numbers together."""
        raise NotImplementedError

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        if self.loss != "bce":
            yield FieldProblem("model.loss", f"each label of {self.kind} has its own", "set labels.NAME.loss instead")
        yield from super().problems(job)

    def fit_problems(self, job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
        yield from super().fit_problems(job, dataset)
        labels = {task.name: task for task in label_tasks(dataset)}
        if not labels:
            return
        there = f"there are {', '.join(labels)}"
        for name, task in self.tasks.items():
            if name not in labels:
                yield FieldProblem(f"model.tasks.{name}", f"no such label ({there})", "name one of them")
            elif task.given not in labels:
                yield FieldProblem(
                    f"model.tasks.{name}.given", f"no label '{task.given}' ({there})", "name one of them"
                )
            else:
                for one in (name, task.given):
                    if not LOSSES[labels[one].loss].is_logit:
                        yield FieldProblem(
                            f"model.tasks.{name}.given",
                            f"'{one}' is learned by {labels[one].loss}, and has no probability",
                            "use bce for both, or leave it out",
                        )
        try:
            list(in_topological_order({name: task.given for name, task in self.tasks.items()}, self._roots(labels)))
        except ValueError as error:
            yield FieldProblem("model.tasks", str(error), "leave one of them out")

    def _roots(self, labels: Iterable[str]) -> list[str]:
        """Return ``labels``, followed by names of ``given`` labels that are not in it, which other checks refuse."""
        return [*labels, *(task.given for task in self.tasks.values() if task.given not in labels)]


class _LabelTowersSpec(SeveralLabelsSpec):
    """A model with a tower of ``tower_hidden`` layers for each label, on top of other layers."""

    hidden: Layers = Field(default=(128, 64), min_length=1)
    tower_hidden: Layers = later((32,), max_length=16)

    @property
    def num_hidden(self) -> int:
        return len(self.hidden) + len(self.tower_hidden)

    def expert(self, inputs: int, count: int = 1) -> ModelSize:
        """Return the size of ``count`` experts, which share their ``inputs`` inputs."""
        size = sum((self.tower(inputs, logits=False) for _ in range(count)), ModelSize())
        return replace(size, tower=size.tower - (count - 1) * inputs)

    def label_towers(self, inputs: int, count: int) -> ModelSize:
        """Return the size of the towers of ``count`` labels."""
        one = tower_size(
            [inputs, *self.tower_hidden, 1], residual=self.residual, batch_norm=self.batch_norm, logits=True
        )
        return sum((one for _ in range(count)), ModelSize())

    def gates(self, inputs: int, *experts: int) -> ModelSize:
        """Return the size of several gates: their weights, and mixed outputs of experts.

        ``experts``: for each gate, the number of experts that it mixes.
        """
        total = sum(experts)
        mixed = total * (1 + self.hidden[-1])
        return ModelSize(total * inputs, 0, mixed, mixed, total * (inputs + self.hidden[-1]))


class SharedBottomSpec(_LabelTowersSpec):
    """Shared bottom: ``hidden`` layers that all labels share, and a tower for each (Caruana 1997)."""

    kind: Literal["shared_bottom"]
    reads_vectors = True

    def size_on(self, inputs: int, num_labels: int) -> ModelSize:
        return self.expert(inputs) + self.label_towers(self.hidden[-1], num_labels)


class MMoESpec(_LabelTowersSpec):
    """MMoE: ``experts`` of ``hidden`` layers, and for each label a gate over them and a tower (Ma et al., KDD 2018)."""

    kind: Literal["mmoe"]
    reads_vectors = True
    experts: int = later(4, ge=1, le=256)

    def size_on(self, inputs: int, num_labels: int) -> ModelSize:
        gates = self.gates(inputs, *[self.experts] * num_labels)
        return self.expert(inputs, self.experts) + gates + self.label_towers(self.hidden[-1], num_labels)


class PLESpec(_LabelTowersSpec):
    """PLE (Tang et al., RecSys 2020): ``levels`` levels of experts, all of which have ``hidden`` layers.

    A level has ``label_experts`` experts for each label, and ``shared_experts`` experts that all labels share. With one
    level it is the paper's CGC.
    """

    kind: Literal["ple"]
    reads_vectors = True
    label_experts: int = later(2, ge=1, le=256)
    shared_experts: int = later(2, ge=1, le=256)
    levels: int = later(2, ge=1, le=16)

    def size_on(self, inputs: int, num_labels: int) -> ModelSize:
        size = ModelSize()
        own = num_labels * self.label_experts + self.shared_experts
        for level in range(self.levels):
            gates = [self.label_experts + self.shared_experts] * num_labels
            gates += [own] if level + 1 < self.levels else []
            size += self.expert(inputs, own) + self.gates(inputs, *gates)
            inputs = self.hidden[-1]
        return size + self.label_towers(inputs, num_labels)


class ESMMSpec(SeveralLabelsSpec):
    """ESMM: a tower of ``hidden`` layers for each label over shared embedding rows (Ma et al., SIGIR 2018).

    A label that ``tasks`` names is conditional on another; its probability is the product of both.
    """

    kind: Literal["esmm"]
    reads_vectors = True

    def size_on(self, inputs: int, num_labels: int) -> ModelSize:
        one = self.tower(inputs, 1)
        return sum((one for _ in range(num_labels)), ModelSize())

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        if not self.tasks:
            yield FieldProblem(
                "model.tasks",
                "esmm multiplies conditional probabilities, but no label is conditional",
                "name them, such as tasks: {buy: {given: click}}, or use shared_bottom",
            )
