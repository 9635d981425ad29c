"""`make demo`: runs the whole service once, in a temporary home and on a free port.

Starts the service, registers a dataset (the project's own click log, or `--data dataset.yaml`), trains a CTR model with
Adam and with AdamAR, publishes item vectors, refreshes them twice through a schedule, shows that a deliberately broken
refresh is held, fetches random-Fourier-feature vectors and recomputes them. It ends with the line DEMO OK, or says what
failed and exits with 1. It stops everything that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.dataset as pads
from safetensors.numpy import load as load_safetensors

from embeddings.refresh.publish import RefreshRequest, Settings, publish_candidate
from embeddings.rff import RandomFourierFeatures
from embeddings.store import open_store
from embeddings.vectors.item_vectors import FOUND, ItemVectors
from service.client import Client, ServiceError
from service.client.http import DEFAULT_URL
from trainer.data.sources.click_log import ClickLog, generate
from trainer.runs import run_process
from trainer.spec import DatasetSpec, JobSpec, SpecError, load_documents, parse_dataset, parse_job

COLLECTION = "items"
WINDOW_DAYS = 8
CLICK_LOG = Path(__file__).with_name("clicklog.yaml")
# Most seconds until the service has started, on a busy machine.
START_SECONDS = 180.0


class DemoFailure(Exception):
    """A phase did not show what it should."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise DemoFailure(message)


def say(text: str = "") -> None:
    print(text, flush=True)


class Demo:
    """The phases of the demo, in order. Each raises DemoFailure if its check fails."""

    home: Path
    client: Client
    dataset: DatasetSpec
    base_job: dict[str, Any]
    service: subprocess.Popen[bytes]
    seconds: dict[str, float]

    def __init__(self, home: Path, data: Path | None = None, num_rows: int = 200_000):
        self.home = home
        self.data = data
        self.num_rows = num_rows
        self.seconds = {}
        self.days: list[str] = []

    # --- phases ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        with self.phase("generate and register the dataset"):
            self.prepare_data()
            self.start_service()
            self.register()
        with self.phase("one-epoch overfitting: Adam beside AdamAR"):
            self.compare_optimizers()
        with self.phase("publish item vectors"):
            self.publish()
        with self.phase("two daily refreshes through a schedule"):
            self.refresh()
        with self.phase("a broken refresh"):
            self.hold_broken_refresh()
        with self.phase("fetch RFF vectors"):
            self.fetch()
        self.summary()

    @contextlib.contextmanager
    def phase(self, title: str) -> Iterator[None]:
        say(f"\n== {title}")
        start = time.monotonic()
        yield
        self.seconds[title] = time.monotonic() - start

    def prepare_data(self) -> None:
        """Load the dataset's manifest and base job; generate the click log if no manifest was given."""
        source = self.data or CLICK_LOG
        dataset, job = load_documents(source)
        require(dataset is not None, f"{source} holds no dataset")
        assert dataset is not None
        if self.data is None:
            rows = self.home / "clicklog"
            generate(ClickLog(num_rows=self.num_rows, num_days=10), rows)
            dataset = parse_dataset(dataset.model_dump(mode="json") | {"uri": str(rows)})
        else:
            dataset = parse_dataset(dataset.model_dump(mode="json") | {"uri": str(Path(dataset.uri).resolve())})
        self.dataset = dataset
        self.base_job = job.model_dump(mode="json") if job is not None else {"model": {"kind": "dnn"}, "epochs": 4}
        if dataset.partition is not None:
            self.days = partition_days(dataset)

    def start_service(self) -> None:
        """Start `evenkeel serve` in its own process, on a port that the system picks."""
        roots = [str(self.home), str(Path(self.dataset.uri).parent)]
        environment = os.environ | {
            "EVENKEEL_HOME": str(self.home / "evenkeel"),
            "EVENKEEL_DATA_ROOTS": os.pathsep.join(roots),
        }
        for name in ("EVENKEEL_API_KEY", "EVENKEEL_URL", "EVENKEEL_RAY_ADDRESS", "EVENKEEL_STORE_URL"):
            environment.pop(name, None)
        self.service = self.serve(environment)
        url = self.wait_for_address()
        self.wait_until_ready(url)
        self.client = Client(url, (self.home / "evenkeel" / "admin.key").read_text().strip())
        say(f"service on {url}, its home in {self.home}")

    def serve(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(self.home / "service.log", "wb") as log:
            return subprocess.Popen(
                [Path(sys.executable).with_name("evenkeel"), "serve", "--port", "0"],
                env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait_for_address(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            text = (self.home / "service.log").read_text()
            found = re.search(r"Evenkeel on (http://\S+)", text)
            if found:
                return found[1]
            require(self.service.poll() is None, f"the service ended at once: {text.strip()}")
            time.sleep(0.1)
        raise DemoFailure(f"the service did not start within {START_SECONDS:.0f} seconds")

    def wait_until_ready(self, url: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/readyz").is_success:
                    return
            require(self.service.poll() is None, "the service ended while it was starting")
            time.sleep(0.1)
        raise DemoFailure(f"the service was not ready within {START_SECONDS:.0f} seconds")

    def register(self) -> None:
        self.client.add_dataset(self.dataset)
        profile = self.client.profile(self.dataset.name)
        say(f"dataset '{self.dataset.name}': {profile['rows']:,} rows, {len(self.days) or 'no'} days")

    def compare_optimizers(self) -> None:
        """Run the same job twice, with different optimizers of the embedding tables."""
        curves: dict[str, list[float]] = {}
        for kind in ("adam", "adam_ar"):
            job = self.job(f"demo-{kind.replace('_', '-')}", optimizer={"kind": kind})
            job["resources"] = {"num_workers": 2, "cpus_per_worker": 1}
            done = self.run_job(job)
            curves[kind] = [metric["auc"] for metric in done["metrics"] if metric["split"] == "test"]
            require(len(curves[kind]) == job["epochs"], f"{kind}: expected an AUC for each of {job['epochs']} epochs")
        say("test AUC   " + "  ".join(f"epoch {epoch + 1}" for epoch in range(len(curves["adam"]))))
        for kind, curve in curves.items():
            say(f"  {kind:<8} " + "  ".join(f"{auc:7.4f}" for auc in curve))
        if self.data is None:
            # The generated click log makes Adam overfit; other data may not.
            adam, adam_ar = curves["adam"], curves["adam_ar"]
            require(max(adam) - adam[-1] > 0.005, "Adam did not overfit on the planted click log")
            require(adam_ar[-1] > adam[-1], "AdamAR ended below Adam on the planted click log")

    def publish(self) -> None:
        job = self.publishing_job("demo-items")
        if self.days:
            first = self.days[min(WINDOW_DAYS, len(self.days)) - 1]
            job["dataset"]["window"] = {"start": first, "days": WINDOW_DAYS}
        self.expect_published(self.run_job(job))

    def refresh(self) -> None:
        """Trigger a daily schedule for the days after the first window: warm start, align, gate, publish."""
        job = self.publishing_job("demo-refresh") | {"init_from": {"collection": COLLECTION, "version": "current"}}
        if self.days:
            job["dataset"]["window"] = {"start": "{firing_date}", "days": WINDOW_DAYS}
        self.client.add_schedule({"name": "daily", "cron": "0 3 * * *", "timezone": "Europe/Berlin", "job": job})
        upcoming = self.days[WINDOW_DAYS : WINDOW_DAYS + 2] or [None, None]
        require(len(upcoming) == 2, f"the demo needs {WINDOW_DAYS + 2} days of data, there are {len(self.days)}")
        for day in upcoming:
            firing = self.client.trigger("daily", **({"firing_date": day} if day else {}))
            self.expect_published(self.wait(firing["job_id"]))

    def hold_broken_refresh(self) -> None:
        """Publish today's vectors with shuffled ids, as a refresh would, and check that they are held."""
        store = open_store(self.home / "evenkeel" / "store")
        current = store.collection(COLLECTION).open()
        shuffled = np.random.default_rng(0).permutation(len(current.vectors))
        manifest = current.manifest
        outcome = publish_candidate(
            store,
            COLLECTION,
            RefreshRequest(
                ItemVectors(current.ids, np.array(current.vectors)[shuffled]),
                self.broken_settings(),
                job_id=None,
                parent_version=current.version,
                model=manifest.extra["model"],
            ),
        )
        require(outcome.status == "held", f"a refresh with shuffled ids was {outcome.status}, not held")
        served = self.client.version(COLLECTION)["version"]
        require(served == current.version, f"{served} is served, expected {current.version} to stay")
        held = self.client.version(COLLECTION, str(outcome.version))
        require(held["state"] == "held", f"version {outcome.version} is {held['state']}, expected held")
        say(f"{outcome.version} was held, {served} is served on:")
        for check in held["gate"]:
            if check["verdict"] != "pass":
                say(f"  {check['metric']:<28} {check['value']:.3f}, threshold {check['threshold']:.3f}")

    def broken_settings(self) -> Settings:
        return Settings()

    def fetch(self) -> None:
        """Fetch RFF vectors over HTTP; check dim = 2d, unit norm, and equality with phi recomputed from U."""
        store = open_store(self.home / "evenkeel" / "store")
        current = store.collection(COLLECTION).open()
        ids = np.random.default_rng(1).choice(np.asarray(current.ids)[np.asarray(current.statuses) == FOUND], 1000)
        ids = [identifier.item() if hasattr(identifier, "item") else str(identifier) for identifier in ids]
        seconds = []
        for _ in range(20):
            start = time.perf_counter()
            served = self.client.vectors(COLLECTION, ids)
            seconds.append(time.perf_counter() - start)
        require(bool(served.found.all()), "an item of the current version was not found")
        require(served.dim == 2 * current.dim, f"RFF vectors have dim {served.dim}, expected {2 * current.dim}")
        norms = np.linalg.norm(served.vectors.astype(np.float64), axis=1)
        require(bool(np.allclose(norms, 1.0, atol=1e-5)), "an RFF vector is not of unit norm")

        view = self.client.view(f"{COLLECTION}_rff")
        layer = load_safetensors(self.client.layer(view["name"]))["frequencies"]
        features = RandomFourierFeatures.from_frequencies(layer, sha256=view["sha256"])
        _, published = current.lookup(ids)
        difference = float(np.abs(features.transform(published) - served.vectors).max())
        require(difference < 1e-6, f"served vectors differ from phi recomputed from U by {difference:.1e}")
        p50 = 1000 * statistics.median(seconds)
        say(f"1000 ids, dim {served.dim}: p50 {p50:.1f} ms over HTTP, decode included")
        say(f"equal to phi(h; U) recomputed from the published U, largest difference {difference:.0e}")

    def summary(self) -> None:
        say("\n== what happened")
        for title, seconds in self.seconds.items():
            say(f"  {seconds:6.1f} s  {title}")
        for version in reversed(self.client.versions(COLLECTION)):
            say(f"  {version['version']}  {version['state']:<11} {version['rows']:,} items, parent {version['parent']}")
        say("\nNext:")
        say(f"  make serve                                   the service, dashboard at {DEFAULT_URL}")
        say("  .venv/bin/evenkeel datasets infer FILE       a proposed dataset for your own rows")
        say("  .venv/bin/evenkeel train examples/ml1m.yaml  a run without the service")

    # --- jobs --------------------------------------------------------------------------------------------------------

    def job(self, name: str, **changes: Any) -> dict[str, Any]:
        """Return the dataset's own job, renamed and changed, without ``publish``."""
        job = {**self.base_job, "name": name, "dataset": {"name": self.dataset.name}, "publish": None, **changes}
        if job["model"]["kind"] != "dnn":
            job["model"] = {"kind": "dnn"}
        job.setdefault("batch_size", 1024)
        return parse_job(job).model_dump(mode="json")

    def publishing_job(self, name: str) -> dict[str, Any]:
        """Return a job whose loss determines the item vectors: two_tower, or BPR if negatives are drawn or items have
        features of their own."""
        features = self.dataset.features
        require("user" in features and "item" in features, "publishing needs features named user and item")
        implicit = self.dataset.label.negatives is not None
        beside_item = any(feature.join is not None and feature.join.on == "item" for feature in features.values())
        job = self.job(name)
        kind, loss = ("bpr", "bpr") if implicit or beside_item else ("two_tower", "bce")
        job |= {
            "model": {"kind": kind, "loss": loss, "embedding_dim": 16},
            # On the user's own data a large rate would make rare items all move along their first step.
            "optimizer": {"learning_rate": 0.005 if self.data is None else 0.001},
            "epochs": 3,
            "publish": {"collection": COLLECTION, "feature": "item"},
        }
        return JobSpec.model_validate(job).model_dump(mode="json")

    def run_job(self, job: dict[str, Any]) -> dict[str, Any]:
        return self.wait(self.client.submit(job)["id"])

    def wait(self, job_id: str) -> dict[str, Any]:
        start = time.monotonic()
        job = self.client.wait(job_id, timeout_seconds=600)
        if job["state"] != "succeeded":
            error = job.get("error") or {}
            raise DemoFailure(f"job {job['name']} {job['state']}: {error.get('message', 'see its log')}")
        rate = job["progress"]["examples_per_second"]
        say(
            f"job {job['name']}: {job['state']} in {time.monotonic() - start:.0f} s, {rate:,.0f} examples/s in training"
        )
        return job

    def expect_published(self, job: dict[str, Any]) -> None:
        publication = job["publication"]
        reasons = "; ".join(publication["reasons"])
        require(publication["status"] == "published", f"job {job['name']}: {publication['status']}: {reasons}")
        manifest = self.client.version(COLLECTION, publication["version"])
        gate = {check["metric"]: check["value"] for check in manifest["gate"]}
        cosine = f", aligned cosine {gate['cosine_mean']:.3f}" if "cosine_mean" in gate else ""
        say(
            f"  {manifest['version']} published: {manifest['rows']:,} items "
            f"({manifest['carried']} carried, {manifest['missing']} missing), parent {manifest['parent']}{cosine}"
        )

    # --- end ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the service, then every run that it had started."""
        if hasattr(self, "client"):
            self.client.close()
        service = getattr(self, "service", None)
        if service is not None and service.poll() is None:
            service.terminate()
            try:
                service.wait(15)
            except subprocess.TimeoutExpired:
                service.kill()
                service.wait()
        for run_dir in sorted((self.home / "evenkeel" / "runs").glob("*")):
            run_process.terminate(run_dir, grace_seconds=2)


def partition_days(dataset: DatasetSpec) -> list[str]:
    """Return the distinct values of the partition column, in order."""
    column = dataset.partition_column
    assert column is not None
    rows = pads.dataset(dataset.uri, partitioning="hive")
    return sorted({str(day) for batch in rows.to_batches(columns=[column]) for day in batch[0].unique().to_pylist()})


def lead(demo: Demo, keep: bool = False) -> int:
    """Run the demo, clean up in any case, and return the exit code."""
    # SIGTERM ends the demo like Ctrl-C: through the clean-up below.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    succeeded = False
    try:
        demo.run()
        succeeded = True
    except KeyboardInterrupt:
        say("\ninterrupted")
    except (
        DemoFailure,
        ServiceError,
        SpecError,
        TimeoutError,
        ValueError,
        httpx.HTTPError,
    ) as error:
        say(f"\nDEMO FAILED: {error}")
    finally:
        demo.stop()
        if succeeded and not keep:
            shutil.rmtree(demo.home, ignore_errors=True)
        else:
            say(f"logs and run directories: {demo.home}")
    if succeeded:
        say(f"\n{time.monotonic() - started:.0f} seconds in all")
        say("DEMO OK")
    return 0 if succeeded else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a dataset manifest of your own (examples/ has some)")
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the generated click log")
    parser.add_argument("--keep", action="store_true", help="leave the temporary home for a look")
    options = parser.parse_args(arguments)
    home = Path(tempfile.mkdtemp(prefix="evenkeel-demo-"))
    return lead(Demo(home, options.data, options.rows), options.keep)


if __name__ == "__main__":
    sys.exit(main())
