"""Stochastic Shared Embeddings outside of a lookup: before ids are distributed, or before any module that takes ids."""

from __future__ import annotations

import torch

from embeddings.kernels.cpu import swap_feature
from embeddings.sse.config import SSEConfig
from embeddings.sse.swap import check_sse, swap_draws
from embeddings.tables.config import TableConfig


def swap(
    ids: torch.Tensor,
    offsets: torch.Tensor,
    *,
    table: TableConfig,
    feature: str,
    config: SSEConfig,
    seed: int,
    step: int,
    sample_offset: int = 0,
) -> torch.Tensor:
    """Return the ids of one feature after SSE, a new tensor; ids are rows of the whole table, not of a shard.

    Args:
        ids: int64 [n].
        offsets: int64 [B + 1], the start of each sample's list in ``ids``, plus any constant.
        table: the unsharded table; ``ids`` are numbers of its rows.
        feature: name that is mixed into the draws, so that features of one table draw differently.
        config: swap probability and graph.
        seed: seed of the draws.
        step: the step being computed, 1, 2, ...
        sample_offset: index in the global batch of the first sample of ``ids``.
    """
    return swap_feature(ids, offsets - offsets[0], swap_draws([(table, feature, config)], seed), step, sample_offset)


def swap_any(
    ids: torch.Tensor,
    num_rows: int,
    config: SSEConfig,
    *,
    seed: int,
    step: int,
    name: str = "embedding",
    sample_offset: int = 0,
    first_live_row: int = 0,
) -> torch.Tensor:
    """Apply SSE to the input of any module that takes ids: return a new tensor of the same shape, type and device.

    Call it only in training, with another ``step`` each time. The first dimension of ``ids`` counts samples, the
    others positions within them.

    Args:
        ids: integers [...]; ids outside [0, num_rows) do not change.
        num_rows: number of rows from which replacements are drawn.
        config: swap probability and graph.
        seed: seed of the draws.
        step: the step being computed, 1, 2, ...
        name: name that is mixed into the draws, so that two inputs with one seed draw differently.
        sample_offset: index in the global batch of the first sample, if ranks hold slices of one batch.
        first_live_row: rows below it are neither swapped nor drawn.

    Raises:
        ValueError: the graph does not have ``num_rows`` rows.
    """
    table = TableConfig(name, num_rows, 1, (name,), first_live_row=first_live_row)
    check_sse(table, name, config)
    if config.probability == 0.0 or not ids.numel():
        return ids.clone()
    num_samples = ids.shape[0] if ids.dim() else 1
    offsets = torch.arange(num_samples + 1) * (ids.numel() // num_samples)
    flat = ids.detach().reshape(-1).to("cpu", torch.int64)
    swapped = swap(
        flat, offsets, table=table, feature=name, config=config, seed=seed, step=step, sample_offset=sample_offset
    )
    return swapped.view(ids.shape).to(ids.device, ids.dtype)


def swap_classes(
    labels: torch.Tensor,
    probability: float,
    *,
    seed: int,
    step: int,
    num_classes: int = 2,
    sample_offset: int = 0,
    name: str = "label",
) -> torch.Tensor:
    """Apply SSE-SE to class labels [b]: return a new tensor of the same type.

    Labels are rows of the fixed one-hot table of equation 1 of Stochastic Shared Embeddings (Wu et al., NeurIPS 2019),
    whose label side has the probability p_y. Each label becomes each other class with probability p_y / (num_classes -
    1), which in expectation is label smoothing: with two classes E[y'] = (1 - 2 p_y) y + p_y. Use this function in
    training only.
    """
    config = SSEConfig(probability)
    return swap_any(labels, num_classes, config, seed=seed, step=step, name=name, sample_offset=sample_offset)
