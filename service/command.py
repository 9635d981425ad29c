"""The console script ``evenkeel``: the commands of service.cli, and `evenkeel train`, which has no use for them."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """``evenkeel train`` becomes the trainer at once: to import the other commands takes a tenth of its start."""
    if sys.argv[1:2] == ["train"]:
        os.execv(sys.executable, [sys.executable, "-m", "trainer.train", *sys.argv[2:]])
    from service import cli

    cli.main()
