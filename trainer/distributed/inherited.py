"""A parent's checkpoint under the names and in the shapes of the job that continues from it (warm start).

Values and moments that both models have are the parent's, bit for bit: rows of common ids, weights of common inputs and
units. New parts begin so that scores are the parent's before the first step:

- rows of an added feature, and weights on other new inputs, are zeros (``added: fresh``: as in a new model);
- an added unit has the weights of a new model, and the next layer's weights on it are zeros;
- an added layer passes its inputs on unchanged;
- an added column of vectors is zero in every row that the parent had. The exception is one factor in models whose
  scores are only products of rows (:attr:`Inheritance.drawn`): if both factors were zero, they would never learn.

If the row optimizer has other settings, rows are first brought to the parent's last step with the parent's settings:
deferred updates of idle rows belong to the settings under which the rows were idle.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import RowOptimizer
from embeddings.optim.deferred_update import deferred_update_coefficients
from embeddings.tables.config import InitConfig, TableConfig
from embeddings.tables.initialization import initial_rows
from trainer.checkpoint.format import Checkpoint
from trainer.checkpoint.record import TablesRecord, TrainingRecord
from trainer.checkpoint.warm_start import dataset_of, id_map_file, inheritance_of, trained_optimizer
from trainer.data.batches.keys import keys_of, read_numeric_features
from trainer.data.columns.vectors import vectors_of
from trainer.distributed.build import model_of
from trainer.distributed.dynamic_tables import counts_file, state_file
from trainer.distributed.sharded_model import ShardedModel
from trainer.distributed.sharded_state import MODEL, OPTIMIZER, tensors_of
from trainer.models.base import Axis, Position, RankingModel, RowColumn
from trainer.models.layers.mlp import HiddenLayer
from trainer.spec import DatasetSpec, JobSpec
from trainer.spec.label_tasks import label_tasks
from trainer.spec.models.registry import parse_model
from trainer.spec.optimizer import DenseOptimizer
from trainer.spec.stored_specs import read


class InheritedCheckpoint(Checkpoint):
    """The parent's checkpoint, read as if the job's own model had written it.

    Rows of new ids and tables of new features are missing from it.

    ``optimizer_notes``: messages for the user about optimizers with other settings than the parent's.
    """

    def __init__(self, parent: Checkpoint, job: JobSpec, dataset: DatasetSpec, sharded: ShardedModel):
        super().__init__(parent.path)
        record = TrainingRecord.of(parent)
        self.inheritance = inheritance_of(job, dataset, parent)
        self._job = job
        self._model, self._optimizer = sharded.module, sharded.row_optimizer
        self._former_optimizer = trained_optimizer(record)
        self._settled = _differ(self._former_optimizer, self._optimizer)
        tables = TablesRecord.of(parent)
        self._birth_step, self._steps = tables.birth_step, tables.completed_steps
        if self._settled:
            # Drop the signature of the stored rows: :meth:`read_rows` converts them to rows of the job's optimizer.
            self.extra = {name: value for name, value in self.extra.items() if name != "rows"}
        self._names = {former: name for name, former in self.inheritance.features.items()}
        of_parent = dataset_of(parent) or dataset
        self._numbers = _numbers(job, dataset)
        before = job.model_copy(update={"model": parse_model(read(record.job, JobSpec, "model"), stored=True)})
        self._parent_model = _dense_model(before, of_parent)
        self._parent_numbers = _numbers(before, of_parent)
        self._moved_layers, self._added_layers = _deepened(self._parent_model, self._model)
        # The vector of all numbers (dlrm, wukong) has a name that no feature has.
        self._known = {*self.inheritance.features, *([""] if self._parent_numbers else [])}
        stored = read(record.job, JobSpec, "dense_optimizer")
        self._keeps_dense_moments = read(stored, DenseOptimizer, "kind") == job.dense_optimizer.kind
        self.optimizer_notes = []
        if self._settled:
            self.optimizer_notes.append(
                f"init_from: the row optimizer has other settings ({', '.join(self._settled)}): rows are brought to "
                f"the parent's step {self._steps} with the parent's settings, and are idle from there"
            )
        if not self._keeps_dense_moments:
            self.optimizer_notes.append(
                "init_from: dense_optimizer has another kind than the parent's, and begins without moments"
            )

    @property
    def tables(self) -> dict[str, int]:
        there = super().tables
        return {name: there[former] for name, former in self.inheritance.tables.items()}

    def attached(self, name: str) -> Any:
        for table, former in self.inheritance.tables.items():
            for file in (id_map_file, state_file, counts_file):
                if name == file(table):
                    return super().attached(file(former))
        return super().attached(name)

    def read_rows(
        self,
        table: str,
        row_start: int = 0,
        row_count: int | None = None,
        column_start: int = 0,
        column_count: int | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        former = self.inheritance.parent_of(table)
        if not (self._settled or self.inheritance.is_wider):
            return super().read_rows(former, row_start, row_count, column_start, column_count)
        weight, state = super().read_rows(former, row_start, row_count)
        if self._settled:
            weight, state = self._brought_up(weight, state)
        if self.inheritance.is_wider:
            weight, state = self._widened(table, row_start, weight, state)
        columns = slice(column_start, None if column_count is None else column_start + column_count)
        return weight[:, columns], {name: one[:, columns] if one.dim() == 2 else one for name, one in state.items()}

    def _widened(
        self, table: str, row_start: int, weight: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return rows and state with the job's number of columns, from rows and state with the parent's.

        ``row_start``: number of the first of these consecutive rows in the parent's table.
        """
        (before, after), width = self.inheritance.embedding_dim, self._job.model.table_columns(table)
        # A row may consist of two vectors of equal length (item2vec), or of a vector and then the id's weight.
        part, column = np.divmod(np.arange(width), after)
        known = torch.from_numpy(column < before)
        drawn = self.inheritance.drawn
        wide = weight.new_zeros(len(weight), width)
        if drawn is not None and drawn[0] == table:
            init = InitConfig("normal", self._job.model.effective_init.std)
            config = TableConfig(table, row_start + len(weight), width, ("rows",), init=init)
            values = torch.from_numpy(initial_rows(config, self._job.seed, row_start, row_start + len(weight)))
            wide[:, part == drawn[1]] = values.to(weight)[:, part == drawn[1]]
        wide[:, known] = weight

        def padded(one: Tensor) -> Tensor:
            moments = one.new_zeros(len(one), width)
            moments[:, known] = one
            return moments

        return wide, {name: padded(one) if one.dim() == 2 else one for name, one in state.items()}

    def _brought_up(self, weight: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return rows and state as the job's optimizer stores them, brought to the parent's last step."""
        before, after, steps = self._former_optimizer, self._optimizer, self._steps
        count, dim = weight.shape
        if not count:
            return weight, {name: torch.empty(self._state_shape(name, 0, dim)) for name in after.state_names}
        config = TableConfig("rows", count, dim, ("rows",), first_live_row=0)
        there = EmbeddingTables([config], before, dtype=weight.dtype)
        there.load("rows", weight, state)
        there.birth_step, there.completed_steps = self._birth_step, steps
        values, touched = there.read("rows").float(), state["last_update_step"].long()
        owing = (touched > 0) | before.decays_from_start
        left = torch.ones(count, dtype=torch.float64)
        coefficients = deferred_update_coefficients(before, "float64")
        if before.moments_decay and coefficients is not None:
            left = torch.from_numpy(coefficients.at(steps).for_rows(touched.numpy())[0])  # type: ignore[union-attr]
        moved: dict[str, Tensor] = {}
        for name in after.state_names:
            if name == "last_update_step":
                moved[name] = torch.where(owing | after.decays_from_start, steps, 0)
            elif type(before) is not type(after):
                moved[name] = torch.zeros(self._state_shape(name, count, dim))
            else:
                one = state[name].float()
                if before.dense_moments and before.betas is not None and name in ("m", "v"):
                    fade = before.betas[name == "v"] ** (steps - touched).double() * left ** (2 if name == "v" else 1)
                    one = one * torch.where(owing, fade, 1.0).float().view(-1, *[1] * (one.dim() - 1))
                moved[name] = one
        here = EmbeddingTables([config], after)
        here.load("rows", values, moved)
        here.completed_steps = steps
        # Reading subtracts movement that is still to come, which depends only on the moments: add it to what is stored.
        return 2 * values - here.read("rows"), moved

    def _state_shape(self, name: str, count: int, dim: int) -> list[int]:
        return [count] if name in (*self._optimizer.row_state_names, "last_update_step") else [count, dim]

    def read_dense(self) -> dict[str, Tensor]:
        saved, found = super().read_dense(), {}
        here, there = self._model.axes(self._numbers), self._parent_model.axes(self._parent_numbers)
        parents = {self._renamed_parameter(name): name for name, _ in tensors_of(self._parent_model)}
        for name, fresh in tensors_of(self._model):
            old = parents.get(name)
            before = self._passing_on(name) if old is None else saved[MODEL + old]
            axes = [here.get(name, {}).get(number) or _counted(number, size) for number, size in enumerate(fresh.shape)]
            if before is None:
                # Treat it as a parameter that the parent had, but for none of its features.
                axes_before = [Axis(()) if number in here.get(name, {}) else axis for number, axis in enumerate(axes)]
                stored = fresh.new_zeros([len(axis.names) for axis in axes_before])
                begins = torch.zeros_like(fresh) if self._is_silent_projection(name) else fresh
                found[MODEL + name] = self._moved(begins, axes, stored, axes_before) if name in here else begins
                continue
            named = {} if old is None else there.get(old, {})
            axes_before = [
                self._axis(named[number]) if number in named else _counted(number, size)
                for number, size in enumerate(before.shape)
            ]
            found[MODEL + name] = self._moved(fresh, axes, before, axes_before)
            for key, value in saved.items():
                owner, _, part = key.removeprefix(OPTIMIZER).rpartition("/")
                if key.startswith(OPTIMIZER) and owner == old and self._keeps_dense_moments:
                    is_whole = value.shape == before.shape and part != "step"
                    empty = torch.zeros(fresh.shape, dtype=value.dtype)
                    moments = self._moved(empty, axes, value, axes_before) if is_whole else value
                    found[f"{OPTIMIZER}{name}/{part}"] = moments
        return found

    def _moved(self, begins: Tensor, axes: Sequence[Axis], stored: Tensor, axes_before: Sequence[Axis]) -> Tensor:
        """Return a parameter with the parent's values at positions of equal names, and initial values elsewhere.

        ``begins``: the parameter of a new model. ``axes``: the names of its positions, dimension by dimension.
        ``stored``, ``axes_before``: the same for the parent's parameter. Weights on new inputs are set to zero if
        scores must not change.
        """
        value = begins.detach().cpu().clone()
        if not value.dim():
            return stored.to(value.dtype)
        positions = []
        for axis, before in zip(axes, axes_before, strict=True):
            index = {name: number for number, name in enumerate(before.names)}
            positions.append(torch.tensor([index.get(name, -1) for name in axis.names], dtype=torch.int64))
        unread, given = torch.zeros(value.shape, dtype=torch.bool), torch.ones(value.shape, dtype=torch.bool)
        padding = torch.zeros(value.shape, dtype=torch.bool)
        for number, (axis, position) in enumerate(zip(axes, positions, strict=True)):
            along = [-1 if number == other else 1 for other in range(value.dim())]
            if axis.reads:
                counts = torch.tensor([self._counts_at_once(*one) for one in axis.names], dtype=torch.bool)
                unread |= ((position < 0) & counts).view(along)
            else:
                given &= (position >= 0).view(along)
                pads = torch.tensor([self._is_padding(*one) for one in axis.names], dtype=torch.bool)
                padding |= ((position < 0) & pads).view(along)
        value[(unread & given) | padding] = 0
        known = [torch.nonzero(position >= 0).flatten() for position in positions]
        value[torch.meshgrid(*known, indexing="ij")] = stored[
            torch.meshgrid(*(position[position >= 0] for position in positions), indexing="ij")
        ].to(value.dtype)
        return value

    def _is_padding(self, features: tuple[str, ...], column: Hashable) -> bool:
        """Return True if a new position is an added column of the embeddings of features that the parent had."""
        return isinstance(column, RowColumn) and self._known.issuperset(features)

    def _counts_at_once(self, features: tuple[str, ...], column: Hashable) -> bool:
        """Return True if a new input has to begin with a weight of zero."""
        added = [name for name in features if name not in self._known]
        if not added:
            return not self._is_padding(features, column)  # it is new as a column or a unit
        return self.inheritance.keeps_scores and not self.inheritance.silent.intersection(added)

    def _is_silent_projection(self, name: str) -> bool:
        added = self.inheritance.silent if self.inheritance.keeps_scores else ()
        return any(name.startswith(f"vector_fields.projections.of_{one}.") for one in added)

    def _axis(self, axis: Axis) -> Axis:
        """Return an axis of the parent with the parent's names of features replaced by the job's."""
        return Axis(tuple((self._renamed(of), column) for of, column in axis.names), axis.reads)

    def _renamed(self, features: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(self._names.get(name, name) for name in features)
        # A pair of features is named in sorted order (pairs_of in trainer.models.base), so sort the new names too. A
        # product in xDeepFM's CIN names first the feature from the layer below, so keep that order.
        return tuple(sorted(found)) if len(features) == 2 and features == tuple(sorted(features)) else found

    def _renamed_parameter(self, name: str) -> str:
        layer, _, part = name.rpartition(".")
        if layer in self._moved_layers:
            return f"{self._moved_layers[layer]}.{part}"
        for former, new in self._names.items():
            if f".of_{former}." in name:
                return name.replace(f".of_{former}.", f".of_{new}.")
        return name

    def _passing_on(self, name: str) -> Tensor | None:
        """Return the initial value of an added layer's parameter, which passes inputs on; None for other parameters.

        The weight is the identity [units, units], the bias zeros [units].
        """
        layer, _, part = name.rpartition(".")
        units = self._added_layers.get(layer)
        return None if units is None else torch.eye(units) if part == "weight" else torch.zeros(units)

    def clear_new_tables(self, sharded: ShardedModel) -> None:
        """Set the rows of added features to zeros, unless the job says ``added: fresh``."""
        if not self.inheritance.keeps_scores:
            return
        for piece in sharded.local_pieces():
            if piece.name not in self.tables:
                piece.tables.weight(piece.name).zero_()


def _deepened(before: nn.Module, after: nn.Module) -> tuple[dict[str, str], dict[str, int]]:
    """Compare the stacks of linear layers in a parent's model and in the job's.

    Returns:
        The new names of moved layers, by their names in the parent's model; and the number of units that each added
        layer passes on, by its name.
    """
    moved: dict[str, str] = {}
    added: dict[str, int] = {}
    there = _stacks(before)
    for path, layers in _stacks(after).items():
        former = there.get(path, layers)
        more = len(layers) - len(former)
        if not more:
            continue
        sizes, former_sizes = ([one.out_features for _, one in stack] for stack in (layers, former))
        # A layer without ReLU stays the last one.
        all_hidden = layers[-1][0].endswith(".linear")
        for first in range(len(former) - 1 + all_hidden, 0, -1):
            passed = [*former_sizes[:first], *[former_sizes[first - 1]] * more, *former_sizes[first:]]
            if all(size >= least for size, least in zip(sizes, passed, strict=True)):
                break
        else:
            raise ValueError(f"init_from: layers {sizes} of {path} cannot continue {former_sizes}: leave init_from out")
        moved |= {name: layers[first + more + number][0] for number, (name, _) in enumerate(former[first:])}
        added |= dict.fromkeys((name for name, _ in layers[first : first + more]), former_sizes[first - 1])
    return moved, added


def _stacks(model: nn.Module) -> dict[str, list[tuple[str, nn.Linear]]]:
    """Return the stacks of linear layers by the containing module's name, each as a list of (name, layer) in order."""
    found: dict[str, list[tuple[str, nn.Linear]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            for name, one in module.named_children():
                if isinstance(one, HiddenLayer):
                    found.setdefault(path, []).append((f"{path}.{name}.linear", one.linear))
                elif isinstance(one, nn.Linear):
                    found.setdefault(path, []).append((f"{path}.{name}", one))
    return found


def _counted(number: int, size: int) -> Axis:
    """Return an axis whose entries are matched by their index: entry i of the parent is entry i here.

    ``number``: the dimension of the parameter: 0 for outputs, more for inputs.
    """
    return Axis(tuple(((), position) for position in range(size)), reads=number > 0)


def _differ(before: RowOptimizer, after: RowOptimizer) -> list[str]:
    """Return the names of differing settings that deferred updates of idle rows depend on."""
    if type(before) is not type(after):
        return ["kind"]
    names = dict.fromkeys((*before.deferred_settings, *after.deferred_settings))
    return [name for name in names if getattr(before, name, None) != getattr(after, name, None)]


def _dense_model(job: JobSpec, dataset: DatasetSpec) -> RankingModel:
    """Return a job's model without embedding tables, at initial values."""
    num_items = dataset.num_item_numbers if job.model.reads_items else 0
    return model_of(
        job, keys_of(dataset, job), nn.Module(), num_dense=len(read_numeric_features(dataset, job)) + num_items,
        num_item_numbers=num_items, vectors=vectors_of(dataset) if job.model.reads_vectors else (),
        tasks=label_tasks(dataset),
    )  # fmt: skip


def _numbers(job: JobSpec, dataset: DatasetSpec) -> list[Position]:
    """Return the names of the columns of a batch's numbers, in order (trainer.data.columns.vectors).

    Vectors that the model projects are not among the numbers.
    """
    items = {} if dataset.items is None or not job.model.reads_items else dataset.items.features
    given = [one for one in vectors_of(dataset) if not one.projected] if job.model.reads_vectors else []

    def of(names: Iterable[str], of_item: bool) -> Iterator[Position]:
        yield from (((name,), 0) for name in names)
        yield from (((one.name,), column) for one in given if one.of_item is of_item for column in range(one.dim))

    of_items = (name for name, one in items.items() if one.type == "dense")
    return [*of(read_numeric_features(dataset, job), False), *of(of_items, True)]
