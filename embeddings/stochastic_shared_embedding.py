"""A drop-in replacement for ``torch.nn.Embedding`` with Stochastic Shared Embeddings (Wu et al., NeurIPS 2019)."""

from __future__ import annotations

from typing import Any

import torch

from embeddings.kernels.swap import swap_any
from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph


class StochasticSharedEmbedding(torch.nn.Embedding):
    """``torch.nn.Embedding`` that in training replaces each id, with ``probability``, by another (SSE-SE, SSE-Graph).

    The first dimension of the input counts samples, the others positions. Each forward pass in training makes new
    draws; ``num_draws`` counts these passes. The number is saved with the module, so that a resumed run makes the draws
    that an uninterrupted run would have made.

    The module takes the arguments of ``torch.nn.Embedding``, and the settings of SSE by keyword.

    Args:
        probability, graph, rho, restart: as in :class:`embeddings.sse.config.SSEConfig`; the graph
            is over ids, and the padding row has no edges (``Graph.from_edges(..., first_live_row=0)`` or 1).
        seed: seed of the draws.
        name: name that is mixed into the seed, so that two embeddings with one seed draw differently.
        padding_idx: id that is never swapped, and that no other id is swapped for.
        others: as in ``torch.nn.Embedding``.

    Attributes:
        sample_offset: index in the global batch of the next input's first sample; set it if ranks hold slices of one
            batch.

    Example:
        >>> import torch
        >>> from embeddings.sse import StochasticSharedEmbedding
        >>> embedding = StochasticSharedEmbedding(1000, 8, padding_idx=0, probability=0.1)
        >>> histories = torch.tensor([[17, 42, 0], [5, 17, 42]])  # [samples, positions]
        >>> embedding(histories).shape  # in training one id in ten is swapped
        torch.Size([2, 3, 8])
        >>> embedding = embedding.eval()  # now it is torch.nn.Embedding
        >>> bool((embedding(histories) == embedding.weight[histories]).all())
        True
    """

    num_draws: torch.Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *others: Any,
        probability: float = 0.01,
        graph: Graph | None = None,
        rho: float = 1.0,
        restart: float | None = None,
        seed: int = 0,
        name: str = "embedding",
        **settings: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, *others, **settings)
        self.seed, self.name, self.sample_offset = seed, name, 0
        # Draws can reserve rows at the start only, so ids are renumbered cyclically to make padding row 0.
        self._turn = self.padding_idx or 0
        self._first_live_row = 0 if self.padding_idx is None else 1
        if graph is not None:
            if self._turn:
                graph = graph.turned(self._turn)
            graph.check_fits(name, num_embeddings, self._first_live_row)
        self.config = SSEConfig(probability, graph, rho, restart)
        self.register_buffer("num_draws", torch.zeros((), dtype=torch.int64))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows [..., embedding_dim] of ids ``input`` [...], in training with some ids swapped."""
        if not self.training or self.config.probability == 0.0 or not input.numel():
            return super().forward(input)
        self.num_draws += 1
        turn, num_rows = self._turn, self.num_embeddings
        if turn:
            # An id outside the table stays outside, so that the lookup refuses it.
            inside = (input >= 0) & (input < num_rows)
            input = torch.where(inside, (input - turn) % num_rows, torch.where(input < 0, input, input + num_rows))
        swapped = swap_any(
            input, num_rows, self.config, seed=self.seed, step=int(self.num_draws), name=self.name,
            sample_offset=self.sample_offset, first_live_row=self._first_live_row,
        )  # fmt: skip
        if turn:
            swapped = torch.where((swapped >= 0) & (swapped < num_rows), (swapped + turn) % num_rows, swapped)
        return super().forward(swapped)

    def extra_repr(self) -> str:
        config = self.config
        graph = "" if config.graph is None else f", rho={config.rho:g}"
        walk = "" if config.restart is None else f", restart={config.restart:g}"
        return f"{super().extra_repr()}, probability={config.probability:g}{graph}{walk}"
