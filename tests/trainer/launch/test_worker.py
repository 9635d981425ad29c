"""What a rank does around its steps."""

from __future__ import annotations

import gc
import resource

import numpy as np


def page_faults(num_rounds):
    """Page faults of each round of blocks that are made, written and freed, as a step's temporaries are."""
    found = []
    for _ in range(num_rounds):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [np.ones(5 << 20, np.float32) for _ in range(6)]
        del blocks
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return found


def faults_and_frozen_objects():
    from trainer.launch.worker import steady_memory

    gc.unfreeze()  # what this process was forked with is frozen already (tests/support/forked.py)
    frozen = gc.get_freeze_count()
    with steady_memory():
        return page_faults(4), frozen, gc.get_freeze_count()


def test_steps_use_the_same_memory_again(ranks):
    ((first, *others), frozen, frozen_meanwhile) = ranks(1).run(faults_and_frozen_objects)[0]
    assert first > 1000  # 120 MB, some of it in huge pages
    assert max(others) < 100
    assert frozen_meanwhile > frozen + 10_000
    assert ranks(1).run(gc_freeze_count) == [frozen]


def gc_freeze_count():
    return gc.get_freeze_count()
