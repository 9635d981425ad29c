"""A search in Ray Tune, in a Ray instance of its own that ends with the command.

A trial is a run of its own, whose validation figures are reported to Tune epoch by epoch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # the runs keep their metrics themselves
os.environ["RAY_AIR_NEW_OUTPUT"] = "0"

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator

from embeddings.durable_files import write_json
from trainer.runs.protocol import LOG_FILE
from trainer.runs.warm_pool import WarmPool
from trainer.search.folder import RAY, STORE, TRIAL_FILE, SearchFolder
from trainer.search.runs import POLL_SECONDS, TrialRun, figures_of
from trainer.search.spec import Distribution
from trainer.spec.problems import InvalidFieldsError

FOLDER, WORKING_DIRECTORY = "folder", "working_directory"
"""Further keys of a trial's configuration, in addition to the fields of the search space."""


class TrialError(RuntimeError):
    """The run of a trial has failed; the message says why."""


class Trial(tune.Trainable):
    """A detached run (trainer.runs.run_process), followed through its events.

    If the search was killed, the next one continues the trial's run from its checkpoints.
    """

    def setup(self, config: dict[str, Any]) -> None:
        # All runs of this process are forked from one pool, which does their imports once.
        self._warm_pool = WarmPool()
        self.has_begun = False
        self.reset_config(config)

    def reset_config(self, config: dict[str, Any]) -> bool:
        """Make this process serve another trial; return True, which tells Ray that this is supported."""
        self._end_run()
        self._values = dict(config)
        # The path of the rows is relative to the command's working directory; Ray has changed it.
        os.chdir(self._values.pop(WORKING_DIRECTORY))
        self.folder = SearchFolder.open(Path(self._values.pop(FOLDER)))
        self.run = TrialRun(self.folder.run_of(self.trial_id), self._warm_pool)
        self._last: dict[str, Any] = {}
        return True

    def step(self) -> dict[str, Any]:
        """Return the metric of the next epoch; with ``done`` once the run has succeeded.

        Raises:
            TrialError: the run has failed.
        """
        if not self.has_begun:
            # Not in setup: Ray may set up two processes for a trial, and steps in one.
            self._begin()
        while True:
            is_over = not self.run.is_alive
            for epoch, value in figures_of(self.run.path, self.folder.metric):
                if epoch > self._last.get("epoch", 0):
                    self._last = {"epoch": epoch, self.folder.metric: math.nan if value is None else value}
                    return self._last
            if is_over:
                error = self.run.error or (None if self._last else f"no figure. Remedy: see {self.run.path / LOG_FILE}")
                if error is not None:
                    raise TrialError(error)
                return {**self._last, "done": True}
            time.sleep(POLL_SECONDS)

    def _begin(self) -> None:
        self.has_begun = True
        self.run.path.mkdir(parents=True, exist_ok=True)
        try:
            job = self.folder.job_with(self._values)
        except InvalidFieldsError as error:
            write_json(self.run.path / TRIAL_FILE, {"values": self._values, "error": str(error)})
            raise TrialError(f"the values do not go together: {error}") from None
        write_json(self.run.path / TRIAL_FILE, {"values": self._values})
        self.run.begin(
            job, self.folder.dataset, run_id=f"{self.folder.path.name}-{self.trial_id}",
            store_url=str(self.folder.path / STORE),
        )  # fmt: skip

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Do nothing: the run writes its own checkpoints."""

    def cleanup(self) -> None:
        self._end_run()
        self._warm_pool.close()

    def _end_run(self) -> None:
        """End the run, which writes a checkpoint first, if it still trains."""
        if self.has_begun:
            self.run.end()
        self.has_begun = False


def values_of(config: dict[str, Any]) -> str:
    """Return the values of a trial's configuration in words."""
    return ", ".join(
        f"{path}={json.dumps(value)}" for path, value in config.items() if path not in (FOLDER, WORKING_DIRECTORY)
    )


DOMAINS: dict[str, Callable[..., Any]] = {
    "choice": lambda *values: tune.choice(list(values)),
    "uniform": tune.uniform,
    "loguniform": tune.loguniform,
}
"""Ray Tune's functions for distributions of values, by the field of :class:`Distribution`."""


def domain(distribution: Distribution) -> Any:
    """Return Ray Tune's domain for the values of a field."""
    (kind,) = distribution.model_fields_set
    return DOMAINS[kind](*distribution.examples)


def scheduler(folder: SearchFolder) -> TrialScheduler:
    """Return the scheduler that ends trials early: ASHA over epochs, or none."""
    search, epochs = folder.search, folder.job.epochs
    if search.scheduler == "none" or epochs <= search.grace_epochs:
        return FIFOScheduler()
    # A trial that has come to its last epoch ends by itself, with its last checkpoint.
    return ASHAScheduler(
        time_attr="epoch", max_t=epochs, grace_period=search.grace_epochs, reduction_factor=search.reduction_factor,
        stop_last_trials=False,
    )  # fmt: skip


def run(folder: SearchFolder, tell: Callable[[str], Any]) -> None:
    """Run the trials that have not ended, as many at once as the search says.

    The trials continue where an earlier call was killed. ``tell`` is called with a line of text for every trial that
    ends.
    """
    search, resources = folder.search, folder.job.resources
    cpus, gpus = (resources.num_workers * each for each in (resources.cpus_per_worker, resources.gpus_per_worker))
    ray.init(
        address="local", num_cpus=max(1, round(cpus * search.parallelism)), include_dashboard=False,
        log_to_driver=False, logging_level="error", configure_logging=False,
    )  # fmt: skip
    # Metrics are in the runs' events: Tune would warn that each trial lacks its files.
    logging.getLogger("ray.tune.analysis.experiment_analysis").setLevel(logging.ERROR)
    try:
        _tuner(folder, {"cpu": cpus, "gpu": gpus}, tell).fit()
    finally:
        ray.shutdown()


def _tuner(folder: SearchFolder, per_trial: dict[str, float], tell: Callable[[str], Any]) -> tune.Tuner:
    search, path = folder.search, folder.path / RAY
    trainable = tune.with_resources(Trial, per_trial)
    space = {name: domain(distribution) for name, distribution in search.space.items()}
    space |= {FOLDER: str(folder.path), WORKING_DIRECTORY: str(Path.cwd())}
    if tune.Tuner.can_restore(str(path)):
        return tune.Tuner.restore(str(path), trainable, resume_unfinished=True, param_space=space)
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric=folder.metric,
            mode=folder.mode,
            num_samples=search.num_trials,
            search_alg=BasicVariantGenerator(max_concurrent=search.parallelism, random_state=search.seed),
            scheduler=scheduler(folder),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name=path.name,
            storage_path=str(path.parent),
            verbose=0,
            callbacks=[_Told(tell, folder.metric)],
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )


class _Told(tune.Callback):
    """Callback of Ray Tune that calls ``tell`` with a line of text for each trial that ends."""

    def __init__(self, tell: Callable[[str], Any], metric: str):
        self._tell, self._metric = tell, metric

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        last = trial.last_result
        self._tell(
            f"{trial.trial_id}: {values_of(trial.config)}: {self._metric} {last.get(self._metric)} after epoch "
            f"{last.get('epoch')}"
        )

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._tell(f"{trial.trial_id}: {values_of(trial.config)}: failed")
