"""A model without its tables: from looked-up rows to scores, as a torch program and as ONNX.

Models must take shapes from tensors (``x.shape[0]``, ``unflatten``), not from Python's ``len`` and ``int``, which a
tracer treats as constants.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.inference.exported_model import DENSE, LENGTHS
from trainer.models.base import Blocks, RankingModel
from trainer.models.next_item import NextItemModel

OPSET = 17
# Tracers compare sizes: this number of example rows differs from all sizes of models.
_EXAMPLE_ROWS = 3


class Lists:
    """Stand-in for a JaggedTensor, with its two methods that models call: ``values`` [n, dim] and ``lengths`` [b]."""

    def __init__(self, values: Tensor, lengths: Tensor):
        self._values, self._lengths = values, lengths

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths


class DensePart(nn.Module):
    """The part of a model that follows its embedding tables, in evaluation mode; it returns scores [b] or [b, labels].

    Inputs depend on ``layout`` and are named like features:
      pooled: a block [b, columns] for each feature that it scores with.
      rows: the same for single ids; for a list the rows of its ids [n, columns], and ``NAME__lengths`` int64 [b].
      sequence: rows of a user's items [b, l, columns], oldest first and then zeros, and ``item__lengths``. The output
      is queries [b, dim], to multiply with candidates.
    The last input is ``dense`` [b, n], if the model reads numeric features or vectors.

    Args:
        features: feature that it scores with -> number of columns; the model's other features are zeros.
        keys: feature -> number of columns, for all features of the model.
        lists: names of the features that are lists.
        length: l of a sequence.
    """

    def __init__(
        self,
        model: RankingModel,
        features: Mapping[str, int],
        keys: Mapping[str, int],
        lists: Sequence[str],
        length: int = 1,
    ):
        super().__init__()
        tables, model.embeddings = model.embeddings, nn.Identity()
        try:
            self.model = copy.deepcopy(model)
        finally:
            model.embeddings = tables
        self.features, self.length = dict(features), length
        self._keys = dict(keys)
        self.layout = "pooled"
        if model.is_sequence:
            self.layout = "sequence" if isinstance(model, NextItemModel) else "rows"
        # The whole module, because exporters restore the mode of each part afterwards.
        self.eval()
        self.lists = [name for name in features if name in lists and self.layout != "pooled"]

    @property
    def inputs(self) -> list[str]:
        names = [each for name in self.features for each in (name, *([name + LENGTHS] if name in self.lists else []))]
        return [*names, DENSE] if self.model.num_columns else names

    @property
    def output(self) -> str:
        return "query" if self.layout == "sequence" else "score"

    def forward(self, *inputs: Tensor) -> Tensor:
        if isinstance(self.model, NextItemModel):
            return self.model.encode(*inputs)
        given = dict(zip(self.inputs, inputs, strict=True))
        dense = given.pop(DENSE, None)
        # The embeddings are an identity here: the model looks up the given inputs themselves.
        looked_up = Blocks(self._rows(given) if self.layout == "rows" else self._blocks(given))
        return self.model(looked_up, dense) if dense is not None else self.model(looked_up)

    def _blocks(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        first = next(iter(given.values()))
        return {
            name: given[name] if name in given else first.new_zeros(first.shape[0], columns)
            for name, columns in self._keys.items()
        }

    def _rows(self, given: dict[str, Tensor]) -> dict[str, Lists]:
        return {
            name: Lists(
                given[name],
                given[name + LENGTHS] if name in self.lists else torch.ones_like(given[name][:, 0], dtype=torch.int64),
            )
            for name in self.features
        }

    def example(self, rows: int = _EXAMPLE_ROWS) -> tuple[Tensor, ...]:
        """Return example inputs for ``rows`` samples, in the order of the inputs, drawn from a fixed seed."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        inputs = []
        for number, (name, columns) in enumerate(self.features.items()):
            if self.layout == "sequence":
                lengths = torch.arange(rows) % (self.length + 1)
                inputs.append(
                    draw(rows, self.length, columns) * (torch.arange(self.length) < lengths[:, None])[:, :, None]
                )
                inputs.append(lengths)
            elif name in self.lists:
                lengths = (torch.arange(rows) + number) % 4
                inputs += [draw(int(lengths.sum()), columns), lengths]
            else:
                inputs.append(draw(rows, columns))
        return tuple([*inputs, draw(rows, self.model.num_columns)] if self.model.num_columns else inputs)

    def dynamic(self) -> dict[str, dict[int, str]]:
        """Return each input's axis of variable size and its name: the batch, or the number of ids in all its lists."""
        ids = self.lists if self.layout == "rows" else ()
        return {name: {0: f"{name}__ids" if name in ids else "batch"} for name in self.inputs}

    def weights(self) -> dict[str, Tensor]:
        """Return the model's parameters and buffers, keyed by their names in a checkpoint."""
        return {name: value.detach() for name, value in (*self.model.named_parameters(), *self.model.named_buffers())}


def write_program(part: DensePart, path: Path) -> None:
    """Write the dense part as a program of torch.export, for any number of rows; the file contains no pickle."""
    free = part.dynamic()
    sizes = {name: torch.export.Dim(name) for one in free.values() for name in one.values()}
    shapes = tuple({axis: sizes[name] for axis, name in free[given].items()} for given in part.inputs)
    with warnings.catch_warnings():
        # torch.nn.GRU keeps a separate list of its parameters, which tracing replaces; torch warns about that.
        warnings.filterwarnings("ignore", message=r".*_flat_weights\[", category=UserWarning)
        program = torch.export.export(part, part.example(), dynamic_shapes={"inputs": shapes})
    # Remove the examples, which would be stored as a pickle; weights are stored as bytes.
    program._example_inputs = None
    torch.export.save(program, path)


def onnx_bytes(part: DensePart) -> bytes:
    """Return the dense part as ONNX, for any number of rows.

    Raises the exporter's own errors about operators that it does not support.
    """
    out = io.BytesIO()
    with warnings.catch_warnings():
        # Ignore the deprecation of this exporter: its successor needs one more package (docs/adr/0035).
        warnings.simplefilter("ignore")
        torch.onnx.export(
            part,
            part.example(),
            out,  # type: ignore[arg-type]  # a file, which this exporter takes as well
            input_names=part.inputs,
            output_names=[part.output],
            dynamic_axes={**part.dynamic(), part.output: {0: "batch"}},
            opset_version=OPSET,
            dynamo=False,
        )
    return out.getvalue()


def onnx_difference(part: DensePart, model: bytes) -> float | None:
    """Return the largest difference of torch's and ONNX's scores, relative above 1; None if onnxruntime is missing."""
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    worst = 0.0
    for number in (1, 7):
        inputs = part.example(number)
        with torch.no_grad():
            expected = part(*inputs)
        given: dict[str, Any] = {name: value.numpy() for name, value in zip(part.inputs, inputs, strict=True)}
        used = {one.name for one in session.get_inputs()}
        actual = torch.from_numpy(session.run(None, {name: given[name] for name in used})[0])
        if actual.shape != expected.shape:
            return float("inf")
        worst = max(worst, float(((actual - expected).abs() / expected.abs().clamp(min=1.0)).max()))
    return worst
