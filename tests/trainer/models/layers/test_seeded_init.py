"""Initial values are a function of the job's seed and of what they are for, and leave torch's generator as it was."""

from __future__ import annotations

import torch

from trainer.models.layers.seeded_init import seeded


def drawn(seed: int, what: str) -> torch.Tensor:
    with seeded(seed, what):
        return torch.rand(8)


def test_every_seed_and_purpose_draws_its_own_values_and_one_repeats():
    """Seeds that differ above the low 32 bits too."""
    of = [(0, "cross"), (1, "cross"), (2**40, "cross"), (0, "output"), (1, "output")]
    values = {tuple(drawn(*asked).tolist()) for asked in of}
    assert len(values) == len(of)
    assert torch.equal(drawn(1, "cross"), drawn(1, "cross"))


def test_the_global_generator_goes_on_as_if_nothing_was_drawn():
    torch.manual_seed(3)
    expected = torch.rand(2, 4)
    torch.manual_seed(3)
    first = torch.rand(4)
    drawn(0, "cross")
    assert torch.equal(torch.stack([first, torch.rand(4)]), expected)
