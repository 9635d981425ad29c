"""Meaning of each environment variable; the reference's page on settings is generated from this module."""

from __future__ import annotations

from typing import NamedTuple

from trainer.spec.uri_schemes import OBJECT_PREFIXES


class Variable(NamedTuple):
    """A variable: its name without ``EVENKEEL_``, its purpose and form, and its default in words.

    ``default`` None: the default of the field of the same name in :class:`service.core.settings.Settings`.
    """

    name: str
    meaning: str
    default: str | None = None


VARIABLES: dict[str, tuple[Variable, ...]] = {
    "Service and commands": (
        Variable("HOME", "database, store, runs, `admin.key`", "`.evenkeel`"),
        Variable("URL", "address of the service, for the command line and the client", "`http://127.0.0.1:{port}`"),
        Variable(
            "API_KEY", "API key that the command line and the client send", "the key in `$EVENKEEL_HOME/admin.key`"
        ),
        Variable(
            "DATA_ROOTS",
            "locations that datasets may use, separated by colons: directories, "
            f"{', '.join(f'`{prefix}BUCKET/PREFIX`' for prefix in OBJECT_PREFIXES)}, "
            "`kafka://HOST:PORT,HOST:PORT` (or the same with `/TOPIC`)",
            "the working directory",
        ),
        Variable(
            "ALLOWED_HOSTS",
            "host names, besides the local ones, that requests may have in the Host header, separated by commas",
            "none",
        ),
        Variable(
            "DATABASE_URL",
            "PostgreSQL: `postgresql+asyncpg://USER:PASSWORD@HOST:PORT/DATABASE`",
            "SQLite in `EVENKEEL_HOME`",
        ),
        Variable("STORE_URL", "the feature store: a path or a URL ([store](../guides/store.md))", "in `EVENKEEL_HOME`"),
        Variable("REQUESTS_PER_SECOND", "most requests per second of one key in each process; 0: no limit"),
        Variable("MAX_RUNS", "most runs at the same time"),
        Variable("HOST_CORES", "cores of this host that runs may use", "all"),
        Variable("HOST_MEMORY_BYTES", "memory of this host that runs may use", "all"),
        Variable("HOST_GPUS", "GPUs of this host that runs may use", "all"),
        Variable("SILENCE_SECONDS", "a run that reports nothing for this many seconds is given up"),
        Variable("RETRY_BACKOFF_SECONDS", "pause before a run's second attempt; it doubles with each further attempt"),
        Variable("RANK_NICENESS", "niceness (scheduling priority) of a run's ranks", "0"),
        Variable(
            "LOG_FORMAT", "`json` or `text`", "text on a terminal, else JSON ([log](../guides/operations.md#log))"
        ),
        Variable("ACCESS_LOG", "`1`: a log line for each request; `0`: none", "`1` if the log format is JSON"),
        Variable(
            "TARGET_NETWORKS",
            "networks that webhooks may call although they are not public, separated by commas",
            "none",
        ),
        Variable(
            "TRACKING_URIS",
            "servers that jobs may name in `tracking`, separated by commas; runs send them credentials from the "
            "service's environment",
            "none",
        ),
        Variable(
            "SINKS",
            "YAML file of the databases that jobs may name in `publish.sinks` ([sinks](../guides/sinks.md))",
            "none",
        ),
        Variable(
            "TENSORBOARD_DIR",
            "directory for event files of TensorBoard; each run uses `JOB/RUN` below it",
            "`tensorboard/` in the run's directory",
        ),
        Variable("TENANT_DATA_ROOTS", "data roots of other tenants, `TENANT=ROOT` separated by colons", "none"),
        Variable("TENANT_MAX_JOBS", "most jobs of a tenant that wait or run", "no limit"),
        Variable("TRACES", "`1`: send traces to [OpenTelemetry](../guides/operations.md#opentelemetry)", "off"),
        Variable("METRICS", "`1`: send metrics to OpenTelemetry", "off"),
        Variable(
            "CPU_LEVEL",
            "instruction set of the CPU kernel: `x86-64-v2`, `-v3`, `-v4`",
            "the best that the processor supports",
        ),
        Variable(
            "HOST_MEMORY", "`0`: ranks on one host exchange data through gloo instead of shared memory", "shared memory"
        ),
    ),
    "Retention and disks": (
        Variable(
            "KEEP_JOBS_DAYS", "days that jobs are kept after their end ([database](../guides/reliability.md#database))"
        ),
        Variable("KEEP_LOGS_DAYS", "days that the logs of ended jobs are kept"),
        Variable("KEEP_CHECKPOINTS_DAYS", "days that the checkpoints of ended jobs are kept"),
        Variable("KEEP_EVENTS_DAYS", "days that the events of ended jobs are kept"),
        Variable("KEEP_FIRINGS_DAYS", "days that firings of schedules are kept"),
        Variable("DISK_WARN_BYTES", "free space below which the service warns"),
        Variable("DISK_RESERVE_BYTES", "free space below which the service starts no run"),
    ),
    "Where hosts come and go": (
        Variable(
            "RUN_STORAGE",
            "URI at which prepared data, checkpoints, exports and generalization reports of runs are stored ([run "
            "storage](../guides/reliability.md#run-storage)). "
            "With `ray_jobs` it may also be a directory in which nodes that do not share `EVENKEEL_HOME` keep runs",
            "under `EVENKEEL_HOME`",
        ),
        Variable(
            "CACHE",
            "directory in which a host caches fetched files; on the file system of the runs, files are linked and "
            "not copied",
            "`/var/tmp/evenkeel-cache`",
        ),
        Variable(
            "CACHE_BYTES",
            "largest size of the cache; it needs room for the prepared data and a rank's share of a checkpoint",
            "50 GiB",
        ),
        Variable(
            "PREPARED_BYTES",
            "largest size of the prepared data that runs of one host share in `EVENKEEL_CACHE`/prepared, over all "
            "tenants; a tenant never uses data that another one prepared; `0`: each run prepares its own. The data "
            "outlives its run: `evenkeel clean` removes it",
            "20 GiB",
        ),
    ),
    "Clusters": (
        Variable(
            "EXECUTOR",
            "`local`: runs are processes of this host; `ray_jobs`: runs are jobs of a Ray cluster; `kuberay`: runs are "
            "RayJobs ([Kubernetes](../guides/kubernetes.md)); other packages may add "
            "executors, whose settings begin with "
            "`EVENKEEL_NAME_` ([executors](../guides/reliability.md#executors))",
            "`local`",
        ),
        Variable("KUBERAY_TEMPLATE", "file with the RayClusterSpec of a run", "the chart sets it"),
        Variable("KUBERAY_NAMESPACE", "namespace in which RayJobs are created", "this pod's"),
        Variable("KUBERAY_QUEUE", "a LocalQueue of Kueue", "none"),
        Variable(
            "RAY_ADDRESS",
            "with `local` the Ray cluster that ranks join, `HOST:PORT`; with `ray_jobs` the dashboard, "
            "`http://HOST:PORT`",
            "none: processes of this host",
        ),
        Variable(
            "DRIVER_RESOURCES",
            "custom Ray resources that select the node of a run's driver, `NAME=NUMBER` separated by commas",
            "the head",
        ),
        Variable(
            "INTERNAL_URL",
            "address at which nodes that do not share `EVENKEEL_HOME` reach the service",
            "none: nodes share it",
        ),
        Variable(
            "UNANSWERED_SECONDS",
            "seconds without an answer of the cluster after which its jobs show the outage as their reason",
        ),
    ),
}
"""The variables, grouped by subject."""
