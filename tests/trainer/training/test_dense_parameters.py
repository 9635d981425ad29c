"""torch's optimizers without the marks for its compiler, beside torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.training.dense_parameters import without_compiler


def steps(kind: type[torch.optim.Optimizer], settings: dict[str, Any], saved: dict[str, Any] | None = None):
    """Two parameters and the optimizer after three steps, from ``saved`` where it is given."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in ((4, 3), (7,))]
    optimizer = kind(parameters, **settings)
    if saved is not None:
        optimizer.load_state_dict(saved)
    for _ in range(3):
        optimizer.zero_grad()
        torch.stack([(parameter**4).sum() for parameter in parameters]).sum().backward()
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.01, "fused": True}),
        (torch.optim.Adam, {"lr": 0.1, "fused": None}),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.5}),
    ],
)
def test_they_are_torchs_to_the_bit_and_take_their_state(kind: type[torch.optim.Optimizer], settings: dict[str, Any]):
    theirs, of_theirs = steps(kind, settings)
    ours, of_ours = steps(without_compiler(kind), settings)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert isinstance(of_ours, kind)
    resumed, _ = steps(without_compiler(kind), settings, of_theirs.state_dict())
    expected, _ = steps(kind, settings, of_ours.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(resumed, expected, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(resumed, ours, strict=True))
