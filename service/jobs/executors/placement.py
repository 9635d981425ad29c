"""Where the runs of an executor are, as far as the service plans with it."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.runs.directory import THIS_CLUSTER
from trainer.sizing.gpus import gpu_problem, known_gpu_bytes
from trainer.sizing.memory import machine_memory_bytes
from trainer.spec import JobSpec


@dataclass(frozen=True)
class Placement:
    """Where runs are, and so what is known of the machines that they use.

    Attributes:
        uses_this_host: Whether runs take this host's cores, memory and GPUs, which the queue then hands out.
        ray_address: The Ray cluster that the ranks join: HOST:PORT, or ``THIS_CLUSTER`` for the one that starts the
            run; None if ranks are processes of the run's host.
    """

    uses_this_host: bool
    ray_address: str | None = None

    @property
    def gpus_are_visible(self) -> bool:
        """Whether GPUs can be counted from here: those of this host, or of a Ray cluster with an address."""
        return self.uses_this_host or self.ray_address not in (None, THIS_CLUSTER)

    def memory_bytes(self) -> int | None:
        """Return the memory of the machine that runs use, None if it is not this one."""
        return machine_memory_bytes() if self.uses_this_host else None

    def gpu_bytes(self, job: JobSpec) -> int | None:
        """Return the memory of the GPU of each rank, None if it cannot be seen from here or the job has no GPUs."""
        return known_gpu_bytes(job, None) if self.uses_this_host else None

    def gpu_problem(self, job: JobSpec) -> tuple[str, str] | None:
        """Return the job's missing GPUs and the remedy; None if none are missing, or only the run can tell."""
        return gpu_problem(job, self.ray_address) if self.gpus_are_visible else None


THIS_HOST = Placement(uses_this_host=True)
