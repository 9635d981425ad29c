"""GPUs of ranks, machines and clusters: which is whose, which are there, and what is said where they are not."""

from __future__ import annotations

import importlib.metadata

import pytest

from trainer.launch.driver import execute
from trainer.launch.on_ray import room_for, worker_resources
from trainer.runs.directory import THIS_CLUSTER, choose_backend
from trainer.runs.protocol import EXIT_RETRYABLE
from trainer.sizing.gpus import (
    check_gpus,
    cluster_gpus,
    device_of_rank,
    gpu_problem,
    installed_gpus,
    known_gpu_bytes,
    machine_gpu_bytes,
    missing_gpus,
    torch_problem,
    visible_gpus,
)
from trainer.spec import SpecError, parse_job


def job_of(**resources):
    return parse_job({"name": "job", "dataset": {"name": "log"}, "model": {"kind": "dnn"}, "resources": resources})


def test_ranks_of_a_host_take_its_gpus_in_order():
    assert device_of_rank(0, 3, ()) == "cpu"
    assert device_of_rank(0, 3, ("0", "1")) == "cpu"
    assert [device_of_rank(1, rank, ("0", "1")) for rank in range(2)] == ["cuda:0", "cuda:1"]
    # CUDA numbers what it sees from 0, whatever it is called.
    assert [device_of_rank(1, rank, ("3", "GPU-5e8a", "1")) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    with pytest.raises(ValueError, match=r"rank 2 of this host has no GPU of its own \(there are 2\): lower"):
        device_of_rank(1, 2, ("0", "1"))


def test_what_ray_assigned_goes_before_the_rank():
    # Two workers of this run beside one of another, which holds GPU 4.
    assert [device_of_rank(1, rank, ("2", "7"), [name]) for rank, name in enumerate("72")] == ["cuda:1", "cuda:0"]
    with pytest.raises(ValueError, match=r"rank 0 of this host was given GPU 4, but its process sees 2, 7"):
        device_of_rank(1, 0, ("2", "7"), ["4"])


@pytest.mark.parametrize(
    ("installed", "variable", "seen"),
    [
        (2, None, ["0", "1"]),
        (2, "", []),
        (4, "3,1", ["3", "1"]),
        (2, "1, 0", ["1", "0"]),
        (2, "0,-1,1", ["0"]),
        (2, "1,2,0", ["1"]),
        (2, "NoDevFiles", []),
        (2, "GPU-5e8a,MIG-77", ["GPU-5e8a", "MIG-77"]),
        (0, None, []),
        (0, "0,1", []),
    ],
)
def test_a_process_sees_what_cuda_would_let_it_see(installed, variable, seen):
    assert visible_gpus(installed, variable) == seen


def test_process_groups_speak_nccl_for_tensors_on_gpus_alone():
    assert choose_backend(0) == "gloo"
    assert choose_backend(1) == "cpu:gloo,cuda:nccl"


def test_a_rank_works_on_one_gpu():
    assert job_of(gpus_per_worker=1).resources.gpus_per_worker == 1
    for wrong in (0.5, 2):
        with pytest.raises(SpecError, match=f"a rank works on one GPU of its own, not on {wrong:g}: use 1"):
            job_of(gpus_per_worker=wrong)


def test_ray_sets_cpus_and_gpus_aside():
    assert worker_resources(job_of(cpus_per_worker=2)) == {"CPU": 2.0}
    needed = worker_resources(job_of(cpus_per_worker=2, gpus_per_worker=1))
    assert needed == {"CPU": 2.0, "GPU": 1.0}
    nodes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 64.0}, {"CPU": 3.0, "GPU": 8.0}]
    assert room_for(nodes, needed) == 3
    assert room_for(nodes, {"CPU": 2.0}) == 4 + 32 + 1


def test_what_is_missing_is_said_with_place_and_remedy():
    assert missing_gpus(2, 2, "this machine") is None
    message, remedy = missing_gpus(4, 2, "the Ray cluster at 10.0.0.5:6379 (3 nodes)")
    assert message == (
        "resources.gpus_per_worker: 4 workers need 4 GPUs, the Ray cluster at 10.0.0.5:6379 (3 nodes) has 2"
    )
    assert remedy.startswith("lower resources.num_workers to 2")
    assert torch_problem("2.13.0+cu130") is None
    message, remedy = torch_problem("2.13.0+cpu")
    assert "torch 2.13.0+cpu of this installation is built for the CPU only" in message
    assert remedy.startswith("`make setup EXTRA=cuda`")


def test_a_machine_without_gpus_is_found_out():
    assert gpu_problem(job_of(num_workers=2)) is None
    if installed_gpus() and not importlib.metadata.version("torch").endswith("+cpu"):
        return
    job = job_of(num_workers=2, gpus_per_worker=1)
    message, remedy = gpu_problem(job)
    assert message.startswith("resources.gpus_per_worker: ")
    assert "resources.gpus_per_worker to 0" in remedy
    with pytest.raises(RuntimeError, match="Remedy: "):
        check_gpus(job)


@pytest.mark.parametrize(
    ("address", "place"), [(None, ""), ("127.0.0.1:1", "at 127.0.0.1:1"), (THIS_CLUSTER, "at 127.0.0.1:2")]
)
def test_a_run_without_its_gpus_ends_before_anything_is_read(make_run, small, monkeypatch, address, place):
    monkeypatch.setattr("trainer.sizing.gpus.installed_gpus", lambda: 0)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")
    run = make_run(uri="/there/are/no/rows.parquet", resources={"gpus_per_worker": 1}, ray_address=address)

    def never(run):
        raise AssertionError("ranks were started")

    assert execute(run, never) == EXIT_RETRYABLE
    (error,) = small.events(run.directory, "error")
    assert error["code"] == "no_resources"
    assert place in error["message"]
    assert not run.data.exists()


class Driver:
    """NVIDIA's library where there are GPUs of these bytes, by number and by name: no driver need be here."""

    def __init__(self, by_name):
        self._by_name, self._devices, self.is_open = by_name, list(by_name), False

    def nvmlInit_v2(self):
        self.is_open = True
        return 0

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self._by_name)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number, device):
        device._obj.value = number.value + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, device):
        device._obj.value = self._devices.index(name.decode()) + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, device, memory):
        memory._obj.total = self._by_name[self._devices[device.value - 1]]
        return 0


@pytest.mark.parametrize(
    ("seen", "smallest"), [(None, 40 * 10**9), ("0,2", 80 * 10**9), ("GPU-b", 40 * 10**9), ("", None)]
)
def test_the_smallest_gpu_that_is_seen_counts(monkeypatch, seen, smallest):
    driver = Driver({"GPU-a": 80 * 10**9, "GPU-b": 40 * 10**9, "GPU-c": 90 * 10**9})
    monkeypatch.setattr("trainer.sizing.gpus.ctypes.CDLL", lambda name: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert installed_gpus() == 3
    assert machine_gpu_bytes() == known_gpu_bytes(job_of(gpus_per_worker=1), None) == smallest
    assert not driver.is_open
    assert known_gpu_bytes(job_of(), None) is None
    assert known_gpu_bytes(job_of(gpus_per_worker=1), "10.0.0.5:6379") is None


def test_a_cluster_that_does_not_answer_is_named():
    with pytest.raises(OSError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: "):
        cluster_gpus("127.0.0.1:1")
    with pytest.raises(OSError, match="'cluster' is not HOST:PORT"):
        cluster_gpus("cluster")
    message, remedy = gpu_problem(job_of(gpus_per_worker=1), "127.0.0.1:1")
    assert "127.0.0.1:1" in message
    assert "EVENKEEL_RAY_ADDRESS" in remedy
