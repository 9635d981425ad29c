"""A search in Ray Tune, on a Ray of its own that lives as long as the command."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # the runs keep their figures themselves
os.environ["RAY_AIR_NEW_OUTPUT"] = "0"

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator

from trainer.search.folder import RAY, SearchFolder
from trainer.search.spec import Distribution
from trainer.search.trial import FOLDER, WORKING_DIRECTORY, Trial, values_of

DOMAINS: dict[str, Callable[..., Any]] = {
    "choice": lambda *values: tune.choice(list(values)),
    "uniform": tune.uniform,
    "loguniform": tune.loguniform,
}
"""Ray Tune's, by the field of :class:`Distribution`."""


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

    Args:
        folder: the search; trials go on where an earlier call was killed.
        tell: is told of every trial that ends, in words.
    """
    search, resources = folder.search, folder.job.resources
    cpus, gpus = (resources.num_workers * each for each in (resources.cpus_per_worker, resources.gpus_per_worker))
    ray.init(
        address="local", num_cpus=max(1, round(cpus * search.parallelism)), include_dashboard=False,
        log_to_driver=False, logging_level="error", configure_logging=False,
    )  # fmt: skip
    # Figures are the runs' own: Tune's last look for its files would warn of each trial.
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
    """Tells of trials that end."""

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
