"""Actors of tests. Ray imports a class's module on its worker: this one imports no torch."""

from __future__ import annotations

import os
import time

from trainer.launch.rank_actors import RankActor, RankEnvironment


class Other:
    def ready(self) -> None:
        pass


class LosesItsPeer(RankActor):
    """A rank that fails by what it does not know, just before another one is seen to have died."""

    def train(self, environment: RankEnvironment, *_: object) -> None:
        if environment.rank == 0:
            raise KeyError("words that we do not know")
        time.sleep(2)
        os._exit(1)
