"""The console script ``evenkeel``: the commands of service.cli.main, and `evenkeel train`, which has no use for
them."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """``evenkeel train`` becomes the trainer at once: to import the other commands takes a tenth of its start."""
    if sys.argv[1:2] == ["train"]:
        os.execv(sys.executable, [sys.executable, "-m", "trainer.launch.in_process", *sys.argv[2:]])
    from service.cli import main as cli_main

    cli_main.main()
