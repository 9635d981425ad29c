"""Learning-rate schedules against those of torch.optim.lr_scheduler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as theirs

from embeddings.optim import SGD
from embeddings.optim.lr_schedules import Constant, Cosine, LinearWarmup, Schedule, StepDecay

NUM_STEPS = 60


def torch_factors(make) -> np.ndarray:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(NUM_STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return np.array(rates)


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (Constant(), lambda o: theirs.LambdaLR(o, lambda _: 1.0)),
        (LinearWarmup(9, 0.2), lambda o: theirs.LinearLR(o, 0.2, total_iters=9)),
        (Cosine(decay_steps=60, final_factor=0.1), lambda o: theirs.CosineAnnealingLR(o, 60, eta_min=0.1)),
        (StepDecay(every_steps=7, gamma=0.5), lambda o: theirs.StepLR(o, 7, 0.5)),
        (
            Cosine(9, 0.2, decay_steps=51),
            lambda o: theirs.SequentialLR(
                o, [theirs.LinearLR(o, 0.2, total_iters=9), theirs.CosineAnnealingLR(o, 51)], [9]
            ),
        ),
    ],
)
def test_factors_are_those_of_torch(schedule, make):
    np.testing.assert_allclose(schedule.factors(np.arange(1, NUM_STEPS + 1)), torch_factors(make), rtol=0, atol=1e-14)
    assert SGD(0.3, schedule=schedule).rate(20) == pytest.approx(0.3 * torch_factors(make)[19], rel=1e-12)


@pytest.mark.parametrize("schedule", [LinearWarmup(9), Cosine(3, decay_steps=40, final_factor=0.3), Constant()])
def test_a_settled_schedule_stays_as_it_is(schedule):
    late = schedule.factors(np.arange(schedule.settled, schedule.settled + 100))
    assert (late == late[0]).all()
    assert schedule.settled == 1 or schedule.factors(np.array([schedule.settled - 1]))[0] != late[0]
    assert StepDecay(every_steps=5).settled is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (LinearWarmup, "warmup_steps must be at least 1"),
        (lambda: LinearWarmup(5, 1.5), "start_factor"),
        (Cosine, "decay_steps"),
        (lambda: Cosine(decay_steps=5, final_factor=-0.1), "final_factor"),
        (lambda: StepDecay(every_steps=0), "every_steps"),
        (lambda: StepDecay(every_steps=5, gamma=1.1), "gamma"),
        (lambda: Constant(warmup_steps=5), "use LinearWarmup"),
        (lambda: Schedule(warmup_steps=-1), "warmup_steps"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
