"""The trainer's small click log and runs."""

from tests.trainer.conftest import make_run, rows

__all__ = ["make_run", "rows"]
