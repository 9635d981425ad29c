"""Entry point of the console script ``evenkeel``.

It runs the commands of service.cli.main, except `evenkeel train`: it starts the trainer without importing them.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run a command, but start the trainer directly for ``evenkeel train``.

    Importing the other commands would take a tenth of the time in which the trainer starts.
    """
    if sys.argv[1:2] == ["train"]:
        os.execv(sys.executable, [sys.executable, "-m", "trainer.launch.in_process", *sys.argv[2:]])
    from service.cli import main as cli_main

    cli_main.main()
