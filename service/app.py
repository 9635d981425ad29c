"""The application: ``create_app(settings)`` builds it, ``serve(settings, host, port)`` runs it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import gc
import importlib
import importlib.metadata
import logging
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator

import uvicorn
from fastapi import Depends, FastAPI
from fastapi.telemetry import TelemetryConfig
from prometheus_client import Metric
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DatabaseError, SQLAlchemyError
from starlette.datastructures import State

from embeddings.sinks.configured import read_sinks
from embeddings.sinks.follow import SinkFollower
from embeddings.store import Store, open_store
from service import DEFAULT_PORT
from service.api import middleware, openapi, routes
from service.core import disk, errors, logs, modes, tenants
from service.core.database import Database, UrlError
from service.core.inline_io import InlineIO, is_local
from service.core.settings import LOCAL_HOSTS, MIN_FREE_BYTES, Role, Settings
from service.core.task_health import TaskHealth, repeat
from service.core.text_validation import refuse_odd_text
from service.features.indexes import Indexes
from service.features.store_health import StoreHealth
from service.identity import audit, keys
from service.identity.audit import Audit
from service.identity.auth import AWAY, Authenticator
from service.jobs.executors.base import Executor, ExecutorUnavailable
from service.jobs.executors.registry import executor_of
from service.jobs.runner import Runner
from service.ops import collectors, metrics, otlp_metrics, retention, workers
from service.schedules import scheduler
from service.webhooks import sender
from trainer.runs import tracing

log = logging.getLogger("evenkeel")

PATIENCE_SECONDS = 10.0
"""Longest wait for the database at the start in the role ``vectors``, which can serve without a database."""

PING_SECONDS = 10.0
"""Time between two checks that the cluster of the runs answers."""

SWITCH_SECONDS = 0.0005
NUM_FILES = 65_536
"""Open files that the service asks the system for, if its limit is lower."""
PENDING = 2048
"""Connections that may wait to be taken."""
TAKEN_AT_ONCE = 64
"""Connections that asyncio takes in a row; without free files, it fails as often in a row, each second."""


def create_app(settings: Settings, executor: Executor | None = None) -> FastAPI:
    """Build the service for the settings.

    The app's ``state`` holds ``settings``, ``database``, ``store``, ``authenticator``.

    Its lifespan migrates the database, creates the first key, and in the roles ``all`` and ``scheduler`` runs the job
    runner and the scheduler. The end of the lifespan does not stop training runs. In the role ``vectors`` it also
    starts while the database is down, and then accepts the API keys that it knew last.

    Args:
        settings: The configuration, including the role.
        executor: The executor that starts training runs; None for the executor that the settings name.
    """
    app = FastAPI(
        title="Evenkeel",
        version=importlib.metadata.version("evenkeel"),
        description="Distributed recommender training whose item vectors stay put.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
        dependencies=[Depends(refuse_odd_text)],
        responses=errors.responses(401, 403, 413, 421, 422, 429, 503),
        telemetry=_telemetry(),
    )
    app.state.settings = settings
    app.state.database = Database(settings.database_url)
    app.state.store = open_store(settings.store_url)
    app.state.inline_io = InlineIO(is_local(app.state.store))
    app.state.store_health = StoreHealth(app.state.store)
    keys_file = settings.home / keys.KNOWN_KEYS_FILE if settings.role == "vectors" else None
    app.state.authenticator = Authenticator(app.state.database, file=keys_file)
    app.state.indexes = Indexes(settings.store_url, settings.home / "neighbors")
    app.state.metrics = metrics.Metrics()
    app.state.audit = Audit(app.state.database, settings.home / audit.FILE_NAME)
    app.state.first_key = None
    app.state.task_health = ()
    app.state.executor = executor
    app.state.methods = {}
    errors.install(app)
    middleware.install(app, settings)
    for name in routes.for_role(settings.role):
        router = importlib.import_module(f"service.api.routes.{name}").router
        app.include_router(router)
        for route in router.routes:
            app.state.methods.setdefault(route.path, []).extend(sorted(route.methods))
    app.openapi = lambda: openapi.document_of(app)  # type: ignore[method-assign]
    return app


def _telemetry() -> TelemetryConfig:
    """Return the tracing settings: one span per request if tracing is on, but no span for health checks and scrapes."""
    provider = tracing.provider()
    return {
        "tracing": provider is not None,
        "tracer_provider": provider,
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "auto_configure": False,
        "exclude": lambda scope: scope["path"] in ("/healthz", "/readyz", "/metrics"),
    }


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    settings: Settings = app.state.settings
    database: Database = app.state.database
    _make_home(settings)
    if settings.role != "vectors":  # serve() has tried the database, which may be down
        await database.start()
        app.state.first_key = await keys.create_first(database, settings)
        _show(settings, app.state.first_key)
    app.state.store_health.start()
    try:
        async with _background(app):
            yield
    finally:
        app.state.store_health.stop()
        app.state.indexes.close()
        await database.stop()


@contextlib.asynccontextmanager
async def _background(app: FastAPI) -> AsyncIterator[None]:
    """Run the background tasks of the role; ending them stops no training run."""
    state = app.state
    tasks = []
    executor: Executor | None = state.executor
    follower: SinkFollower | None = None
    if state.settings.role == "vectors":
        state.authenticator.recall()
        tasks = [asyncio.create_task(state.authenticator.keep_informed())]
    if state.settings.role in ("all", "scheduler"):
        executor = executor or executor_of(state.settings)
        runner = Runner(state.database, state.settings, state.store, executor)
        errors_of = state.metrics.background_errors
        for outcome in sender.OUTCOMES:
            state.metrics.webhooks.labels(outcome)  # start at 0: Prometheus misses an increase from nothing to 1
        state.task_health = healths = tuple(
            TaskHealth(name, on_error=errors_of.labels(name).inc)
            for name in ("runner", "scheduler", "webhooks", "retention", "executor")
        )
        rounds = [
            runner.run(healths[0]),
            scheduler.run(state.database, state.settings.schedule_seconds, healths[1]),
            sender.run(
                state.database, state.settings, healths[2], lambda outcome: state.metrics.webhooks.labels(outcome).inc()
            ),
            retention.run(state.database, state.settings, state.store, healths[3]),
            repeat(functools.partial(_reach, executor), PING_SECONDS, healths[4]),
        ]
        tasks = [asyncio.create_task(round_) for round_ in rounds]
        sinks = read_sinks(state.settings.sinks).values()
        follower = SinkFollower(sinks, functools.partial(tenants.store_of, state.store))
        follower.start()
        if executor is not state.executor:
            tasks.append(asyncio.create_task(asyncio.to_thread(executor.warm_up)))
    if state.settings.role in ("all", "api"):
        tasks.append(asyncio.create_task(_finish_erasures(state.database, state.store)))
    if (sending := otlp_metrics.exporter()) is not None:
        tasks.append(asyncio.create_task(otlp_metrics.run(sending, functools.partial(_metrics, state))))
    try:
        yield
    finally:
        if follower is not None:
            follower.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if executor is not None and executor is not state.executor:
            await asyncio.to_thread(executor.close)  # waits for a run that is just being started


class ClusterAway(Exception):
    """Error for /readyz, which anyone may read: the cluster's address is only in its cause, for the log."""


async def _reach(executor: Executor) -> None:
    try:
        await asyncio.to_thread(executor.ping)
    except (ExecutorUnavailable, errors.Problem) as error:
        raise ClusterAway("the cluster of the runs cannot be used; see the service's log") from error


async def _metrics(state: State) -> list[Metric]:
    gauges = await collectors.of_service(state.settings, state.database, state.store, state.store_health)
    return state.metrics.families(gauges)  # type: ignore[no-any-return]


async def _finish_erasures(database: Database, store: Store) -> None:
    """Finish the erasures of all tenants that were interrupted when a process was killed."""
    try:
        async with database.read() as connection:
            known_tenants = [row.name for row in await connection.execute(keys.tenants())]
        for tenant in known_tenants:
            await asyncio.to_thread(tenants.store_of(store, tenant).finish_erasures)
    except Exception as error:
        log.error("an erasure that was interrupted could not be finished: %s", error)


def _make_home(settings: Settings) -> None:
    """Create EVENKEEL_HOME, or revoke other users' access to it, since it holds vectors and ids of all tenants."""
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if modes.is_open(settings.home):
        modes.close(settings.home)
    settings.runs.mkdir(mode=0o700, exist_ok=True)


async def _try_start(settings: Settings) -> None:
    """Prepare EVENKEEL_HOME, database and first key, so that an error is shown as a line of text, not a traceback."""
    _make_home(settings)
    database = Database(settings.database_url)
    try:
        await database.start()
        _show(settings, await keys.create_first(database, settings))
    finally:
        await database.stop()


def _show(settings: Settings, first_key: str | None) -> None:
    if first_key is not None and sys.stdout.isatty():
        print(f"Admin key (also in {settings.admin_key_file}): {first_key}", flush=True)


def _why_not(settings: Settings, error: Exception) -> str:
    """Return the reason why the service cannot start, and the remedy, as one line."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, UrlError):
        return reason
    if type(error) is DatabaseError:  # the SQLite file is damaged, or is not a database
        reason += ": restore a backup, or move the file away to begin anew (published vectors stay)"
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(settings.home).free
        if disk.is_read_only(settings):
            reason += f": EVENKEEL_HOME {disk.READ_ONLY}"
        elif free < MIN_FREE_BYTES:
            reason += f": only {free} bytes are free under {settings.home}, make room"
    of_disk = (errno.ENOSPC, errno.EROFS)
    is_home = isinstance(error, OSError) and (error.errno in of_disk or error.filename == str(settings.home))
    if is_home:
        return f"cannot start in EVENKEEL_HOME {settings.home}: {reason}"
    shown = make_url(settings.database_url).render_as_string(hide_password=True)
    return f"the database ({shown}) cannot be used: {reason}"


def serve(
    settings: Settings,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    role: Role | None = None,
    executor: Executor | None = None,
    num_workers: int = 1,
) -> int:
    """Run until SIGTERM or Ctrl-C and return the exit code: 0, or 1 if it could not start (port in use, ...).

    Ending the service does not end training runs: the next start of the service finds them.

    Args:
        settings: The configuration.
        host: The address to listen on.
        port: The port to listen on; 0 chooses a free one. The address is printed once the socket listens.
        role: Overrides the role of the settings, unless None.
        executor: The executor that starts training runs; None for the executor that the settings name.
        num_workers: Number of processes that share the port. Several are possible only in the role ``vectors``: the
            other roles manage jobs, which is done once per home.
    """
    if role is not None:
        settings = dataclasses.replace(settings, role=role)
    if host not in (*LOCAL_HOSTS, "0.0.0.0", "::"):
        settings = dataclasses.replace(settings, allowed_hosts=(*settings.allowed_hosts, host.lower()))
    os.umask(modes.umask_for(settings.home))
    _allow_files()
    form = settings.log_format or ("text" if sys.stderr.isatty() else "json")
    logs.install(form, access_log=form == "json" if settings.access_log is None else settings.access_log)
    try:
        listener = listen(host, port)
    except OSError as error:
        remedy = (
            "choose another port with --port, or stop the process that listens there" if port else "check the host name"
        )
        print(f"evenkeel: cannot listen on {host}:{port}: {error.strerror}: {remedy}", file=sys.stderr)
        return 1
    with contextlib.ExitStack() as together:
        together.enter_context(listener)
        reason = asyncio.run(_reason_not_to_start(settings))
        try:
            if executor is None:
                executor_of(settings)  # checks the settings; the lifespan creates and closes its own executor
            for sink in read_sinks(settings.sinks).values():
                if settings.role in ("all", "scheduler"):
                    sink.open()
            tracing.provider()
            otlp_metrics.exporter()
        except (ValueError, RuntimeError) as error:
            reason = str(error)
        if reason is not None:
            print(f"evenkeel: {reason}", file=sys.stderr)
            return 1
        together.enter_context(metrics.shared_by_workers() if num_workers > 1 else contextlib.nullcontext())
        listener.listen(PENDING)  # clients may connect once they read the address; they wait until the start is done
        shown = f"[{host}]" if listener.family == socket.AF_INET6 else host
        print(f"Evenkeel on http://{shown}:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(
            create_app(settings, executor),
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=5,
            backlog=TAKEN_AT_ONCE,
            server_header=False,
            lifespan="on",
        )
        config.load()
        if settings.role == "vectors":
            # Before the workers fork: otherwise pyarrow imports pandas in each of them, with its first array.
            importlib.import_module("pandas")
        # A full garbage collection takes a tenth of a second, in which no request is answered. The objects of modules
        # and routes live as long as the process: freezing excludes them from collections, and workers continue sharing
        # their memory.
        gc.collect()
        gc.freeze()
        gc.enable()
        # A thread that computes lets the event loop run after 0.5 ms, not after Python's default of 5 ms.
        sys.setswitchinterval(SWITCH_SECONDS)
        if settings.role != "vectors":
            return _serve_on(listener, config)
        return workers.run(num_workers, lambda: _serve_on(listener, config))


def _allow_files() -> None:
    """Raise the limit of open files, one for each connection, from the usual 1,024 to NUM_FILES, if that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = NUM_FILES if hard == resource.RLIM_INFINITY else min(hard, NUM_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, not yet listening.

    Raises:
        OSError: The address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm, with which small answers take 40 ms, only for sockets made with IPPROTO_TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


async def _reason_not_to_start(settings: Settings) -> str | None:
    """Try to start and return the reason for a failure, or None; the role ``vectors`` starts without the database."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS if settings.role == "vectors" else None):
            await _try_start(settings)
    except (*AWAY, SQLAlchemyError, ImportError, RuntimeError) as error:
        if settings.role != "vectors" or isinstance(error, ImportError | UrlError) or not settings.home.is_dir():
            return _why_not(settings, error)
        log.warning("%s; meanwhile vectors are served to the API keys known before", _why_not(settings, error))
    return None


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(PENDING)  # asyncio has set TAKEN_AT_ONCE


def _serve_on(listener: socket.socket, config: uvicorn.Config) -> int:
    """Run one server until a signal stops it, and return the exit code."""
    server = _Server(config)

    def stop(number: int, frame: object) -> None:
        server.should_exit = True

    # uvicorn raises the signal again after it has stopped. This handler ignores that, so the exit code is 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.run(sockets=[listener])
    return 0 if server.started else 1
