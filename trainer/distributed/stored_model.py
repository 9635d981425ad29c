"""A model as of a checkpoint, in one process: its tables as they are read, and its dense part."""

from __future__ import annotations

import torch

from trainer.checkpoint.format import Checkpoint, CheckpointError
from trainer.data.batches.prepared import PreparedData
from trainer.distributed.build import model_of
from trainer.distributed.materialize import ReadTables
from trainer.models.base import RankingModel
from trainer.spec import JobSpec


def stored_model(job: JobSpec, data: PreparedData, checkpoint: Checkpoint) -> RankingModel:
    """Return the job's model as of a checkpoint, in evaluation. Memory: float32 rows of all tables.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    read = ReadTables(job, checkpoint, data.keys)
    model = model_of(
        job, data.keys, read, num_dense=data.num_dense, num_item_numbers=data.num_item_numbers, vectors=data.vectors,
        tasks=data.tasks,
    )  # fmt: skip
    load_dense(model, checkpoint)
    return model.eval()


def load_dense(model: RankingModel, checkpoint: Checkpoint) -> None:
    """Load everything of a model outside its tables from a checkpoint.

    Raises:
        CheckpointError: they do not fit.
    """
    parameters = {
        name: value
        for name, value in [*model.named_parameters(), *model.named_buffers()]
        if not name.startswith("embeddings.")
    }
    prefix = "model/"
    saved = {
        name.removeprefix(prefix): value for name, value in checkpoint.read_dense().items() if name.startswith(prefix)
    }
    differ = sorted(parameters.keys() ^ saved.keys())
    differ += sorted(name for name in parameters.keys() & saved.keys() if parameters[name].shape != saved[name].shape)
    if differ:
        raise CheckpointError(
            f"{checkpoint.path}: the dense parts differ from the model's in {', '.join(differ)}: another version of "
            "evenkeel wrote it; use that one"
        )
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(saved[name])
