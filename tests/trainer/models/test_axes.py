"""Names of the inputs of models' first layers, by which a warm start moves their weights."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec import KeyedTensor

from tests.support.models import make_model
from trainer.data.batches.keys import Key
from trainer.models.base import Blocks, ModelInputs
from trainer.models.dnn import DNN
from trainer.models.registry import MODELS
from trainer.spec.models.dnn import DNNSpec

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "development" / "add_a_model.md"
KEYS = tuple(Key(name, name, False, "mean") for name in ("user", "item", "query"))
NUMBERS = [(("price",), 0), (("age",), 0)]
OF_ONE_LABEL = ("fm", "dnn", "wide_deep", "deepfm", "xdeepfm", "dcnv2", "dlrm", "pnn", "wukong", "autoint", "finalmlp")


class Rows(nn.Module):
    """The blocks given, in the order of a model's features."""

    def __init__(self, blocks: dict[str, torch.Tensor], names: tuple[str, ...]):
        super().__init__()
        self.blocks, self.names = blocks, names

    def forward(self, features: object) -> KeyedTensor | Blocks:
        return Blocks({name: self.blocks[name] for name in self.names})


@pytest.mark.parametrize("kind", [*OF_ONE_LABEL, "two_tower"])
def test_each_listed_axis_names_each_position(kind):
    model = make_model(kind, nn.Identity(), KEYS, num_dense=2)
    parameters = dict(model.named_parameters())
    listed = {name: one for name, one in model.axes(NUMBERS).items() if name in parameters}
    assert listed
    for name, axes in listed.items():
        assert {number: len(axis.names) for number, axis in axes.items()} == {
            number: parameters[name].shape[number] for number in axes
        }, name


def test_every_kind_with_a_tower_over_all_features_is_tried():
    assert set(OF_ONE_LABEL) <= set(MODELS)


def test_a_layer_with_other_inputs_than_are_named_is_refused():
    class Doubled(DNN):
        def __init__(self, embeddings, spec, inputs):
            super().__init__(embeddings, spec, inputs)
            self.tower = nn.Sequential(nn.Linear(2 * self.width, 1))

    model = Doubled(nn.Identity(), DNNSpec(kind="dnn", embedding_dim=4), ModelInputs(KEYS, num_dense=2))
    with pytest.raises(ValueError, match=r"^Doubled: tower.0.weight reads 28 inputs, but axes\(\) names 14: let axes"):
        model.axes(NUMBERS)


def test_the_model_of_the_guide_moves_its_weights_with_their_features(monkeypatch):
    spec_text, module_text = re.findall(r"```python\n# my_models/\w+.py\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    module = types.ModuleType("my_models")
    monkeypatch.setitem(sys.modules, "my_models", module)
    names = vars(module)
    for text in (spec_text, module_text):
        exec(compile(text, str(GUIDE), "exec"), names)
    spec = names["MeanProductSpec"](kind="mean_product", embedding_dim=4, hidden=[5], scale=2.0)
    generator = torch.Generator().manual_seed(0)
    blocks = {key.name: torch.randn(6, 4, generator=generator) for key in KEYS}
    numbers = torch.randn(6, 2, generator=generator)

    def model_of(keys):
        rows = Rows(blocks, tuple(key.name for key in keys))
        return names["MeanProduct"](rows, spec, ModelInputs(tuple(keys), num_dense=2, seed=3))

    before, after = model_of(KEYS), model_of(KEYS[::-1])
    (there,), (here,) = (list(one) for one in (before.axes(NUMBERS).values(), after.axes(NUMBERS[::-1]).values()))
    assert sorted(there[1].names, key=str) == sorted(here[1].names, key=str)
    after.load_state_dict(before.state_dict())
    moved = [there[1].names.index(name) for name in here[1].names]
    with torch.no_grad():
        after.tower[0].weight.copy_(before.tower[0].weight[:, moved])
    torch.testing.assert_close(after(None, numbers.flip(1)), before(None, numbers))
