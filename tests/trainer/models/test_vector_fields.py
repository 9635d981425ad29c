"""Projected vectors in every model: a field like that of an id whose pooled row is the projection."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import JaggedTensor, KeyedTensor

from tests.support.model_specs import model_spec, table_columns
from trainer.data.batches.keys import Key
from trainer.data.columns.vectors import Vector
from trainer.models.base import ModelInputs, VectorFields
from trainer.models.registry import MODELS
from trainer.models.several_labels import SeveralLabelsModel
from trainer.spec.label_tasks import LabelTask
from trainer.spec.models.base import kinds_that

B, DIM, N = 5, 4, 2
VECTORS = (Vector("short", "short", 3), Vector("items", "items", 6))
TASKS = (LabelTask("click"), LabelTask("buy"))
FIELDS = {"xdeepfm": {"cin_layers": (5, 3)}, "finalmlp": {"first_gate": ("short",), "gate_hidden": (4,)}}


class Blocks(nn.Module):
    """Rows of each key, drawn once; of a vector what it is told."""

    def __init__(self, keys, columns, lists):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.columns, self.lists = columns, lists
        self.rows = {key.name: torch.randn(B, columns, generator=generator, dtype=torch.float64) for key in keys}

    def forward(self, features):
        if self.lists:
            ones = torch.ones(B, dtype=torch.int64)
            return {name: JaggedTensor(rows, lengths=ones) for name, rows in self.rows.items()}
        return KeyedTensor(list(self.rows), [self.columns] * len(self.rows), torch.cat(list(self.rows.values()), dim=1))


def keys_of(kind):
    names = ["user", "item", "tags"]
    keys = [Key(name, name, False, "mean") for name in names]
    return [*keys, Key("history", "item", True, "mean")] if kind == "din" else keys


def tasks_of(kind):
    return TASKS if issubclass(MODELS[kind], SeveralLabelsModel) else ()


@pytest.mark.parametrize("num_dense", [0, N])
@pytest.mark.parametrize("kind", kinds_that("reads_vectors"))
def test_a_projected_vector_is_a_field_like_a_row(kind, num_dense):
    spec = model_spec(kind, embedding_dim=DIM, hidden=(6, 4), **FIELDS.get(kind, {}))
    keys, columns = keys_of(kind), table_columns(kind, "item", DIM)
    settings = {"num_dense": num_dense, "seed": 3, "dtype": torch.float64, "tasks": tasks_of(kind)}

    def made(keys, **more):
        tables = Blocks(keys, columns, MODELS[kind].is_sequence)
        return MODELS[kind](tables, spec, ModelInputs(tuple(keys), **settings, **more)).eval()

    model = made(keys, vectors=VECTORS)
    others = [Key(one.name, one.name, False, "mean") for one in VECTORS]
    plain = made([*keys, *others])
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("vector_fields.")}
    plain.load_state_dict(weights)
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randn(B, num_dense, generator=generator, dtype=torch.float64)
    given = [torch.randn(B, one.dim, generator=generator, dtype=torch.float64) for one in VECTORS]
    given[0][2] = 0.0  # a missing one
    for one, x in zip(VECTORS, given, strict=True):
        layer = model.vector_fields.projections[f"of_{one.name}"]
        w, b = layer.weight.detach().numpy(), layer.bias.detach().numpy()
        plain.embeddings.rows[one.name] = torch.from_numpy(x.numpy() @ w.T + b)
    batch = torch.cat([numbers, *given], dim=1)
    expected = plain(None, numbers) if num_dense else plain(None)
    found = model(None, batch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert model.num_columns == num_dense + 9
    # Each vector matters, and a missing one reads as its bias.
    for start in (num_dense, num_dense + 3):
        other = batch.clone()
        other[:, start] += 1.0
        assert not torch.allclose(model(None, other), found)


def test_gradients_of_projections_are_the_finite_differences():
    inputs = ModelInputs((), seed=3, dtype=torch.float64, vectors=VECTORS)
    fields = VectorFields({"short": 2, "items": 3}, inputs)
    numbers = torch.randn(B, 1 + 9, dtype=torch.float64, requires_grad=True)
    parameters = {name: value.detach().requires_grad_() for name, value in fields.named_parameters()}

    def outputs(numbers, *values):
        named = dict(zip(parameters, values, strict=True))
        return tuple(torch.func.functional_call(fields, named, (numbers,)).values())

    assert torch.autograd.gradcheck(outputs, (numbers, *parameters.values()))
    first, second = outputs(numbers, *parameters.values())
    assert first.shape == (B, 2)
    assert second.shape == (B, 3)


def test_initial_projections_are_a_function_of_seed_and_name():
    def weights(seed, name):
        inputs = ModelInputs((), seed=seed, vectors=(Vector(name, name, 3),))
        return VectorFields({name: 4}, inputs).projections[f"of_{name}"].weight.detach().numpy()

    assert np.array_equal(weights(1, "v"), weights(1, "v"))
    assert not np.array_equal(weights(1, "v"), weights(2, "v"))
    assert not np.array_equal(weights(1, "v"), weights(1, "w"))
