"""Entry point of the console script ``evenkeel``.

`evenkeel train` starts the trainer without importing service.cli.main, which has the other commands.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run a command, but start the trainer directly for ``evenkeel train``.

    Importing the other commands would make the trainer's start a tenth slower.
    """
    if sys.argv[1:2] == ["train"]:
        os.execv(sys.executable, [sys.executable, "-m", "trainer.launch.in_process", *sys.argv[2:]])
    from service.cli import main as cli_main

    cli_main.main()
