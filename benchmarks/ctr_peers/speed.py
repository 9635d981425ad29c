"""Steps of ours and of TorchRec in one process, on the same batches in turn: whole, by parts, as ratios.

Ours are trainers of jobs: the time is that of their ``train_step``, which the loop calls. TorchRec has rowwise Adagrad,
which is compared first: FBGEMM has no Adam on CPUs. TorchRec's dense part runs layer by layer in plain torch, as its
users write it, and in another contestant as ours does. Batches are made beforehand and given to all once, untimed: so
timed rows were touched before, and AdamAR is past its first steps. A ratio is the median over batches of ours /
TorchRec's time of the same batch, below 1 if ours is faster. If other work shares the machine, use the ratio of
processor times.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torchrec.distributed import DistributedModelParallel

from benchmarks.ctr_peers import torchrec
from benchmarks.ctr_peers.tasks import Task
from benchmarks.ctr_peers.training import MIDDLE, OURS, TORCHREC, Line, Place, prepared
from benchmarks.support.harness import Condition, interleave
from trainer.data.batches.batch import Batch
from trainer.data.batches.prepared import PreparedData
from trainer.distributed.build import build, choose_alpha
from trainer.launch.on_host import single_rank_group
from trainer.launch.worker import quiet, steady_memory, use_threads
from trainer.report_pages.section import table_of
from trainer.spec import JobSpec
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.loop import Trainer

EQUAL = "ours, rowwise Adagrad"
PEER = "TorchRec, rowwise Adagrad"
PEER_WITH_OUR_LAYERS = "TorchRec with our dense layers"
OWN = {EQUAL: ("rowwise_adagrad", ""), "ours, Adam, lazy moments": ("adam", "lazy"),
       "ours, AdamAR, dense moments": ("adam_ar", "dense")}  # fmt: skip
"""Optimizer and moments of our contestants."""
PARTS = ("lookup", "dense forward", "dense backward", "tables", "finite", "dense optimizer", "rest")
"""Parts of a step. ``tables``: the lookup's backward and the update of rows, which TorchRec does together."""
EARLY_STEPS = 256
"""First steps of a job with dense moments, in which each row takes more terms: they are not timed."""
LARGEST_RATIO = 1.0
"""Largest accepted ratio of processor times with the same optimizer."""


class Laps:
    """Seconds of the parts of steps, by wall clock and by processor: a lap is the time since the lap before."""

    def __init__(self) -> None:
        self.steps: list[dict[str, np.ndarray]] = []
        self._last = np.zeros(2)

    def begin(self) -> None:
        self.steps.append({part: np.zeros(2) for part in PARTS})
        self._last = _now()

    def __call__(self, part: str) -> None:
        now = _now()
        self.steps[-1][part] += now - self._last
        self._last = now

    def around(self, owner: Any, method: str, before: str, within: str) -> None:
        """Count the time up to a call of ``owner``'s method for ``before``, and that of the call for ``within``."""
        call = getattr(owner, method)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            self(before)
            found = call(*arguments, **keywords)
            self(within)
            return found

        setattr(owner, method, timed)

    def around_lookup(self, embeddings: torch.nn.Module) -> None:
        def ended(_module: Any, _arguments: Any, pooled: Any) -> None:
            rows = pooled.values()  # waits for TorchRec's
            self("lookup")
            rows.register_hook(lambda _gradient: self("dense backward"))

        embeddings.register_forward_pre_hook(lambda _module, _arguments: self("rest"))
        embeddings.register_forward_hook(ended)


def _now() -> np.ndarray:
    return np.array((time.perf_counter(), time.process_time()))


class Ours:
    """A job's trainer, and the laps between the calls of its ``train_step``."""

    def __init__(self, job: JobSpec, data: PreparedData):
        sharded = build(job, data, alpha=choose_alpha(job, data.steps_per_epoch))
        optimizer = dense_optimizer(job, sharded)
        sharded.train()
        self.trainer = Trainer(job, data, sharded, optimizer)
        self.laps, self.losses = Laps(), list[float]()
        tables: Any = sharded.module.embeddings
        self.rows: dict[str, torch.Tensor] = {p.name: p.tables.weight(p.name) for p in tables.local_pieces()}
        self.laps.around_lookup(tables)
        self.laps.around(self.trainer, "objective", "rest", "dense forward")
        self.laps.around(sharded, "all_reduce_gradients", "tables", "rest")
        self.laps.around(optimizer, "step", "finite", "dense optimizer")
        self.laps.around(sharded, "step_tables", "rest", "tables")

    def step(self, batch: Batch) -> None:
        before = self.trainer.position.loss_sum
        self.laps.begin()
        self.trainer.train_step((batch,))
        self.laps("rest")
        self.losses.append((self.trainer.position.loss_sum - before) / len(batch))


class TorchRec:
    """A plain loop over TorchRec's model (torchrec.py), whose tables start from ``rows``.

    Without ``our_layers`` the dense modules run layer by layer in plain torch.
    """

    def __init__(self, model: DistributedModelParallel, rows: Mapping[str, torch.Tensor], our_layers: bool):
        self.model = model
        self.rows = torchrec.rows(self.model)
        for name, values in rows.items():
            with torch.no_grad():
                self.rows[name].zero_()[:, : values.shape[1]] = values
        self.optimizer = torchrec.dense_optimizer(self.model)
        # Outside of training nothing is fused; the modules of this benchmark are the same otherwise.
        self.model.train(our_layers)
        self.model.module.embeddings.train()
        self.laps, self.losses = Laps(), list[float]()
        self.laps.around_lookup(self.model.module.embeddings)

    def step(self, batch: Batch) -> None:
        self.laps.begin()
        loss = torchrec.step(self.model, self.optimizer, batch, self.laps)
        self.losses.append(float(loss))


def contestants(task: Task, model: str, place: Place, data: PreparedData) -> dict[str, Ours | TorchRec]:
    """Return contestants by name; with the same optimizer they start from the same values."""
    found: dict[str, Ours | TorchRec] = {}
    for name, (optimizer, moments) in OWN.items():
        rate = MIDDLE[TORCHREC if name == EQUAL else OURS]
        found[name] = Ours(task.job(model, 0, rate, place.threads, optimizer, moments), data)
    for name in (PEER, PEER_WITH_OUR_LAYERS):
        peer = torchrec.built(task, model, 0, MIDDLE[TORCHREC], data)
        found[name] = TorchRec(peer, found[EQUAL].rows, our_layers=name != PEER)
    return found


def compare_speed(
    tasks: Sequence[Task], models: Sequence[str], threads: Sequence[int], iterations: int, place: Place
) -> Iterator[Line]:
    """Yield an output line for each contestant on each task with each model and number of threads."""
    quiet()
    for task, model in itertools.product(tasks, models):
        data = PreparedData.open(prepared(task, 0, place))
        for line in _compared(task, model, threads, iterations, place, data):
            place.tell(line)
            yield line
        # The timed methods hold tables in reference cycles.
        gc.collect()


def _compared(
    task: Task, model: str, threads: Sequence[int], iterations: int, place: Place, data: PreparedData
) -> Iterator[Line]:
    with single_rank_group():
        of_all = contestants(task, model, place, data)
        batches = list(itertools.islice(data.train_batches(0), iterations))
        steps: list[Callable[[Any], None]] = [one.step for one in of_all.values()]
        fields = {"case": "speed", "model": model, "dim": task.dim, "iterations": iterations}
        fields["rows"] = max(table.num_rows for table in data.tables.values())
        with steady_memory():
            for name, (_, moments) in OWN.items():
                if moments == "dense":
                    for batch in itertools.islice(itertools.cycle(batches), EARLY_STEPS):
                        of_all[name].step(batch)
            for number in threads:
                use_threads(number)
                each = partial(next, itertools.cycle(batches))
                interleave(each, *steps, iterations=iterations, warm_up=len(batches))
                yield from _lines(fields | {"threads": number}, of_all, iterations)


def _lines(fields: Line, of_all: Mapping[str, Ours | TorchRec], iterations: int) -> Iterator[Line]:
    parts = {
        name: 1e3 * np.array([[step[part] for part in PARTS] for step in one.laps.steps[-iterations:]])
        for name, one in of_all.items()
    }  # [iterations, parts, 2]
    whole = {name: times.sum(1) for name, times in parts.items()}
    for name, one in of_all.items():
        line = fields | {"contestant": name, "loss": round(float(np.mean(one.losses[-iterations:])), 6)}
        for clock, prefix in enumerate(("", "cpu_")):
            ratios = np.percentile((whole[name] / whole[PEER])[:, clock], [50, 25, 75])
            of_parts = np.median(parts[name][:, :, clock], axis=0).round(3).tolist()
            line |= {f"{prefix}ms": round(float(np.median(whole[name][:, clock])), 3),
                     f"{prefix}ratio": ratios.round(3).tolist(),
                     f"{prefix}parts": dict(zip(PARTS, of_parts, strict=True))}  # fmt: skip
        yield line


def speed_verdicts(lines: Sequence[Line]) -> list[Condition]:
    """Compare ours with TorchRec where both have the same optimizer, by processor time."""
    found = []
    for line in lines:
        if line["contestant"] == EQUAL:
            ratio, low, high = line["cpu_ratio"]
            what = f"{_case(line)}: processor time / TorchRec's, rowwise Adagrad in both, at most {LARGEST_RATIO:g}"
            found.append(Condition(what, ratio <= LARGEST_RATIO, f"{ratio:.2f} ({low:.2f} to {high:.2f})"))
    return found


def speed_table(lines: Sequence[Line]) -> str:
    """Return medians of steps in ms, ratios with their quartiles, and the parts in processor ms."""
    rows = []
    for line in lines:
        ratio, low, high = map(_short, line["cpu_ratio"])
        cells = [_short(line["ms"]), _short(line["cpu_ms"]), _short(line["ratio"][0]), f"{ratio} ({low} to {high})"]
        rows.append((_case(line), line["contestant"], *cells, *map(_short, line["cpu_parts"].values())))
    return table_of(("", "", "ms", "processor ms", "ratio", "of processor ms", *PARTS), rows)


def _case(line: Line) -> str:
    return f"{line['model']} {line['dim']}, {line['threads']} thread{'s' * (line['threads'] > 1)}"


def _short(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")
