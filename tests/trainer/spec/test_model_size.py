"""The arithmetic of models beside the models: what forward keeps for backward, and multiply-adds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.support.model_specs import model_spec
from trainer.data.batches.keys import Key
from trainer.models.base import ModelInputs
from trainer.models.registry import MODELS
from trainer.spec import Model
from trainer.spec.label_tasks import LabelTask

SAMPLES, LENGTH, DIM, HIDDEN = 256, 6, 16, (64, 32)
KEYS = (
    *(Key(name, name, False, "mean") for name in ("user", "item", "query", "context", "page")),
    Key("history", "item", True, "mean"),
)
NAMES = tuple(key.name for key in KEYS)
TASKS = (LabelTask("click"), LabelTask("buy"), LabelTask("visits", "poisson"))
KINDS = (
    "dnn",
    "fm",
    "wide_deep",
    "deepfm",
    "xdeepfm",
    "dcnv2",
    "dlrm",
    "pnn",
    "wukong",
    "autoint",
    "finalmlp",
    "din",
    "two_tower",
)


class Random(nn.Module):
    """Rows that need a gradient, as those of a lookup do."""

    def __init__(self, columns: int, pooled: bool):
        super().__init__()
        self.columns, self.pooled = columns, pooled

    def forward(self, features: KeyedJaggedTensor) -> object:
        if self.pooled:
            values = torch.randn(SAMPLES, len(NAMES) * self.columns, requires_grad=True)
            return KeyedTensor(list(NAMES), [self.columns] * len(NAMES), values)
        return {
            name: JaggedTensor(
                torch.randn(int(features[name].lengths().sum()), self.columns, requires_grad=True),
                lengths=features[name].lengths(),
            )
            for name in NAMES
        }


def made(spec: Model) -> nn.Module:
    kind = MODELS[spec.kind]
    embeddings = Random(spec.table_columns("item"), not kind.is_sequence)
    return kind(embeddings, spec, ModelInputs(KEYS, tasks=TASKS if spec.reads_labels else ())).train()


def features() -> KeyedJaggedTensor:
    lengths = torch.tensor([LENGTH if key.is_list else 1 for key in KEYS]).repeat_interleave(SAMPLES)
    return KeyedJaggedTensor(list(NAMES), torch.ones(int(lengths.sum()), dtype=torch.int64), lengths=lengths)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {}) for kind in KINDS),
        *((kind, {"residual": True, "batch_norm": True}) for kind in ("dnn", "din")),
        ("dcnv2", {"structure": "parallel", "low_rank": 8}),
        ("xdeepfm", {"cin_layers": (200, 200)}),
        ("xdeepfm", {"cin_layers": (200,)}),
        ("xdeepfm", {"cin_layers": (60, 50, 40)}),
        ("finalmlp", {"second_hidden": (48,), "fusion_heads": 8, "first_gate": ("user", "history")}),
        ("shared_bottom", {}),
        ("mmoe", {"experts": 8}),
        ("mmoe", {"batch_norm": True, "tower_hidden": ()}),
        ("ple", {"levels": 3}),
        ("ple", {"levels": 1, "label_experts": 4}),
        ("esmm", {"tasks": {"buy": {"given": "click"}}}),
        ("autoint", {"hidden": (), "attention_layers": 2, "attention_heads": 4, "attention_units": 8}),
    ],
)
def test_what_a_step_keeps_and_computes_is_what_is_counted(kind, fields):
    spec = model_spec(**{"kind": kind, "embedding_dim": DIM, "hidden": HIDDEN, **fields})
    model, batch = made(spec), features()
    of_model = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_model:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with FlopCounterMode(display=False) as counter:
            scores = model(batch)
    assert scores.shape == ((SAMPLES, len(TASKS)) if spec.reads_labels else (SAMPLES,))
    own = {"num_labels": len(TASKS)} if spec.reads_labels else {}
    size = spec.size(len(KEYS), num_lists=1, list_ids=float(LENGTH), **own)
    counted = 4 * SAMPLES * (size.tower + size.interaction)
    # Memory is predicted as three times this: what is kept, and what backward makes of it.
    assert counted / 3 < sum(kept.values()) < 1.5 * counted
    # The counter knows matrix products alone, of which fm has none.
    assert kind == "fm" or counter.get_total_flops() / 2 == pytest.approx(SAMPLES * size.multiply_adds, rel=0.25)
