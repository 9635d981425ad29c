"""What libraries say in every run to whoever reads a log or a command's output, and that nobody can act on."""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    """TorchRec's planner warns of its own defaults, torch of an internal name that TorchRec uses."""
    logging.getLogger("torchrec.distributed.planner").setLevel(logging.ERROR)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="HeuristicalStorageReservation", category=FutureWarning)
