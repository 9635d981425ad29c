"""Meaning of each environment variable; the reference's page on settings is generated from this module."""

from __future__ import annotations

from typing import NamedTuple


class Variable(NamedTuple):
    """A variable without its prefix ``EVENKEEL_``.

    Attributes:
        name: Name in capitals.
        meaning: Purpose of the variable, and the form of its value.
        default: Default in words; None for the default of the field of the same name in
            :class:`service.core.settings.Settings`.
    """

    name: str
    meaning: str
    default: str | None = None


VARIABLES: dict[str, tuple[Variable, ...]] = {
    "Service and commands": (
        Variable("HOME", "database, store, runs, `admin.key`", "`.evenkeel`"),
        Variable("URL", "the service that command line and client talk to", "`http://127.0.0.1:{port}`"),
        Variable("API_KEY", "the key of command line and client", "that in `$EVENKEEL_HOME/admin.key`"),
        Variable(
            "DATA_ROOTS",
            "where dataset files may lie, separated by colons: directories, `s3://BUCKET/PREFIX`, "
            "`kafka://HOST:PORT,HOST:PORT` (or that with `/TOPIC`)",
            "the working directory",
        ),
        Variable("ALLOWED_HOSTS", "host names that are answered beside the local ones, separated by commas", "none"),
        Variable(
            "DATABASE_URL",
            "PostgreSQL: `postgresql+asyncpg://USER:PASSWORD@HOST:PORT/DATABASE`",
            "SQLite in `EVENKEEL_HOME`",
        ),
        Variable(
            "STORE_URL",
            "the feature store: a path, `redis://...`, `s3://...` ([store](../guides/store.md))",
            "in `EVENKEEL_HOME`",
        ),
        Variable("REQUESTS_PER_SECOND", "of one key in each process; 0: no limit"),
        Variable("MAX_RUNS", "runs at once"),
        Variable("HOST_CORES", "cores of this host that runs may use", "all"),
        Variable("HOST_MEMORY_BYTES", "memory of this host that runs may use", "all"),
        Variable("HOST_GPUS", "GPUs of this host that runs may use", "all"),
        Variable("SILENCE_SECONDS", "a run that reports nothing for so long is given up"),
        Variable(
            "RETRY_BACKOFF_SECONDS", "before a run's second attempt; each later one waits twice as long as the last"
        ),
        Variable("RANK_NICENESS", "niceness of a run's ranks beside other processes", "0"),
        Variable(
            "LOG_FORMAT", "`json` or `text`", "text on a terminal, else JSON ([log](../guides/operations.md#log))"
        ),
        Variable("ACCESS_LOG", "`0` or `1`: a line for each request", "1 where the format is JSON"),
        Variable(
            "TARGET_NETWORKS",
            "networks that are not public and may be called by webhooks, separated by commas",
            "none",
        ),
        Variable(
            "TRACKING_URIS",
            "servers that jobs may name in `tracking`, by commas: runs send them credentials of this environment",
            "none",
        ),
        Variable(
            "TENSORBOARD_DIR",
            "event files of TensorBoard lie in `JOB/RUN` below it",
            "`tensorboard/` in the run's directory",
        ),
        Variable("TENANT_DATA_ROOTS", "data roots of other tenants, `TENANT=ROOT` separated by colons", "none"),
        Variable("TENANT_MAX_JOBS", "how many jobs of a tenant may wait and run", "no limit"),
        Variable("TRACES", "`1`: traces to [OpenTelemetry](../guides/operations.md#opentelemetry)", "off"),
        Variable("METRICS", "`1`: metrics to OpenTelemetry", "off"),
        Variable(
            "CPU_LEVEL",
            "instructions of the CPU kernel: `x86-64-v2`, `-v3`, `-v4`",
            "the best that the processor has",
        ),
        Variable("HOST_MEMORY", "`0`: ranks of one host exchange by gloo, not in shared memory", "shared memory"),
    ),
    "Retention and disks": (
        Variable("KEEP_JOBS_DAYS", "jobs after their end ([database](../guides/reliability.md#database))"),
        Variable("KEEP_LOGS_DAYS", "their logs"),
        Variable("KEEP_CHECKPOINTS_DAYS", "their checkpoints"),
        Variable("KEEP_EVENTS_DAYS", "their events"),
        Variable("KEEP_FIRINGS_DAYS", "firings of schedules"),
        Variable("DISK_WARN_BYTES", "free space below which the service warns"),
        Variable("DISK_RESERVE_BYTES", "free space below which it starts no run"),
    ),
    "Where hosts come and go": (
        Variable(
            "RUN_STORAGE",
            "`s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `file:///DIRECTORY`: prepared data, checkpoints, exports "
            "and generalization reports of runs lie there ([run storage](../guides/reliability.md#run-storage)); with "
            "`ray_jobs` also a directory where nodes that do not share `EVENKEEL_HOME` keep runs",
            "under `EVENKEEL_HOME`",
        ),
        Variable(
            "CACHE",
            "where a host keeps what it has fetched; on the file system of the runs nothing is held twice",
            "`/var/tmp/evenkeel-cache`",
        ),
        Variable(
            "CACHE_BYTES",
            "the most that it keeps: at least the prepared data, and a rank's share of a checkpoint",
            "50 GiB",
        ),
        Variable(
            "PREPARED_BYTES",
            "prepared data that runs of one host share, below `EVENKEEL_CACHE`/prepared: the most that is kept, of all "
            "tenants together, none of whom takes what another has prepared; `0`: each run prepares its own. What "
            "stands there outlives its run: `evenkeel clean` removes it",
            "20 GiB",
        ),
    ),
    "Clusters": (
        Variable(
            "EXECUTOR",
            "`local`; `ray_jobs`: runs are jobs of a Ray cluster; `kuberay`: runs are RayJobs "
            "([Kubernetes](../guides/kubernetes.md)); other packages have more, whose own settings begin with "
            "`EVENKEEL_NAME_` ([executors](../guides/reliability.md#executors))",
            "`local`",
        ),
        Variable("KUBERAY_TEMPLATE", "file with the RayClusterSpec of a run", "the chart sets it"),
        Variable("KUBERAY_NAMESPACE", "where RayJobs are made", "this pod's"),
        Variable("KUBERAY_QUEUE", "a LocalQueue of Kueue", "none"),
        Variable(
            "RAY_ADDRESS",
            "ranks of local runs join this cluster, `HOST:PORT`; with `ray_jobs` the dashboard, `http://HOST:PORT`",
            "none: processes of this host",
        ),
        Variable(
            "DRIVER_RESOURCES",
            "custom resources of the node that a run's driver takes, `NAME=NUMBER` separated by commas",
            "the head",
        ),
        Variable("INTERNAL_URL", "how nodes that do not share `EVENKEEL_HOME` reach the service", "they share it"),
        Variable("UNANSWERED_SECONDS", "after so long without an answer of the cluster its jobs say so"),
    ),
}
"""The variables, grouped by subject."""
