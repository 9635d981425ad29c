"""What a failure means: the code of an error, and the one among those of many ranks that explains the others."""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from embeddings.store import StoreBusy, StoreFull, StoreUnavailable
from tests.support import forked
from trainer.checkpoint.format import CheckpointError
from trainer.data.errors import DataAwayError, DataError
from trainer.runs.failures import (
    TRACEBACK_FILE,
    Cancelled,
    NonFiniteError,
    ResourceError,
    cause,
    classify,
    keep_traceback,
    record,
)
from trainer.spec import SpecError


def test_the_cause_is_found_among_its_consequences(tmp_path):
    folder = tmp_path / "failures"
    record(folder, 0, RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection reset by peer"))
    assert cause(folder, RuntimeError("x")).code == "worker_died"
    assert cause(folder, RuntimeError("x")).retryable
    record(folder, 1, KeyError("words that we do not know"))
    assert cause(folder, RuntimeError("x")).code == "internal"
    assert cause(folder, RuntimeError("x"), died=True).code == "worker_died"
    record(folder, 2, NonFiniteError(7, ("loss",)))
    assert cause(folder, RuntimeError("x"), died=True).code == "non_finite"


def keep_a_store(port: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    port.with_suffix(".part").write_text(str(store.port))
    port.with_suffix(".part").rename(port)
    time.sleep(600)


@pytest.mark.process
def test_a_rank_that_lost_the_store_of_rank_0_has_lost_a_peer(tmp_path):
    told = tmp_path / "port"
    keeper = forked.start(keep_a_store, told, log=tmp_path / "log")
    while not told.exists():
        time.sleep(0.01)
    port = int(told.read_text())
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
    store.set("a", "b")
    keeper.kill()
    keeper.join()
    for ask in (lambda: store.get("a"), lambda: dist.TCPStore("127.0.0.1", port, 2, timeout=timedelta(seconds=1))):
        with pytest.raises(dist.DistNetworkError) as error:
            ask()
        assert classify(error.value).code == "peer_lost"


def because(error, of):
    error.__cause__ = of
    return error


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (SpecError("spec.yaml", [("epochs", "is wrong")]), "bad_spec", False),
        (ResourceError("no Ray"), "no_resources", True),
        (DataError("no such column", where="rows.csv", remedy="correct it"), "bad_data", False),
        (DataAwayError("no answer", where="s3://rows", remedy="see that it is up"), "data_away", True),
        (OSError(28, "No space left on device"), "disk_full", True),
        (MemoryError(), "out_of_memory", False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out_of_memory", False),
        (RuntimeError("can't start new thread"), "out_of_memory", False),
        (OSError(12, "Cannot allocate memory"), "out_of_memory", False),
        (StoreBusy("store/LOCK: another process has kept the writer lock"), "store_busy", True),
        (StoreUnavailable("redis://store: Redis cannot be reached: Connection refused"), "store_away", True),
        (StoreFull("redis://store: command not allowed when used memory > 'maxmemory'"), "disk_full", True),
        (PermissionError(13, "Permission denied", "/store"), "not_permitted", False),
        (OSError(5, "Input/output error", "/run/checkpoints"), "io_error", True),
        (ConnectionResetError(104, "Connection reset by peer"), "peer_lost", True),
        (ValueError("Invalid process group specified"), "peer_lost", True),
        (ValueError("embedding_dim is 0"), "bad_input", False),
        (because(CheckpointError("not written"), RuntimeError("gloo: Read error")), "peer_lost", True),
        (because(CheckpointError("not written"), OSError(5, "Input/output error")), "checkpoint", True),
        (KeyError("surprise"), "internal", False),
    ],
)
def test_every_failure_has_a_code_and_a_remedy(error, code, retryable):
    failure = classify(error)
    assert (failure.code, failure.retryable) == (code, retryable)
    assert failure.message
    assert failure.remedy or code == "peer_lost"  # never shown: the cause is another rank's


@pytest.mark.parametrize(
    "error",
    [
        NonFiniteError(3, ("loss", "table item")),
        Cancelled("SIGTERM"),
        DataAwayError("no answer", where="s3://rows", remedy="see that it is up"),
    ],
)
def test_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert type(again) is type(error)
    assert again.__dict__ == error.__dict__


@pytest.mark.parametrize(
    ("error", "is_ours"),
    [
        (KeyError("surprise"), True),
        (DataError("is null", where="rows.csv", remedy="fill it in"), False),
        (SpecError("spec.yaml", []), False),
        (ValueError("features: the parent read user"), False),
        (CheckpointError("init_from: holds no valid checkpoint"), False),
        (StoreUnavailable("away"), False),
    ],
)
def test_only_a_fault_of_ours_prints_its_traceback(tmp_path, capsys, error, is_ours):
    try:
        raise error
    except type(error):
        keep_traceback(tmp_path, error, classify(error))
    assert ("Traceback" in capsys.readouterr().err) is is_ours
    assert (tmp_path / TRACEBACK_FILE).exists() is not is_ours
    if not is_ours:
        assert "in test_only_a_fault" in (tmp_path / TRACEBACK_FILE).read_text()
