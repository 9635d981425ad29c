"""Filters of messages that libraries write in every run and that no reader can act on."""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    """Silence TorchRec's planner, which warns of its own defaults, and torch on an internal name that TorchRec uses."""
    logging.getLogger("torchrec.distributed.planner").setLevel(logging.ERROR)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="HeuristicalStorageReservation", category=FutureWarning)
