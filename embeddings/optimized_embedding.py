"""An embedding, for use in any torch module, whose rows are trained by a row optimizer such as AdamAR."""

from __future__ import annotations

from typing import Any

import torch

from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import RowOptimizer
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import InitConfig, TableConfig

TABLE = "embedding"


class OptimizedEmbedding(torch.nn.Module):
    """A replacement for ``torch.nn.Embedding`` whose rows are trained by a row optimizer of its own.

    ``forward`` takes ids of any shape and gives a row for each. ``backward`` records the gradient, and :meth:`step`
    applies it; call it next to the step of the optimizer of all other parameters. Rows outside the batch decay and
    move by momentum too, but a step costs time only for rows in the batch. The rows are not parameters, and
    cannot be tied to an output layer. ``state_dict`` holds rows, optimizer state and step counts, so resumed training
    continues bit for bit.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Columns of a row.
        padding_idx: 0 if id 0 is padding, whose row is zeros and does not learn; None if no id is padding.
        optimizer: Row optimizer that :meth:`step` applies, such as ``AdamAR(learning_rate=0.001, alpha=1e-5)``.
        init: Distribution of initial values; None: normal with standard deviation 1, as in ``torch.nn.Embedding``.
        sse: Settings by which Stochastic Shared Embeddings swap ids in training; None: no id is swapped.
        seed: Seed of initial values and swaps.

    Raises:
        ValueError: ``padding_idx`` is neither 0 nor None.

    Example:
        >>> import torch
        >>> from embeddings import OptimizedEmbedding
        >>> from embeddings.optim import AdamAR
        >>> words = OptimizedEmbedding(1000, 8, optimizer=AdamAR(learning_rate=0.001, alpha=1e-5))
        >>> lstm = torch.nn.LSTM(8, 16, batch_first=True)
        >>> others = torch.optim.Adam(lstm.parameters())
        >>> states, _ = lstm(words(torch.tensor([[17, 42, 5], [5, 17, 42]])))
        >>> states.square().mean().backward()
        >>> others.step(); words.step()
        >>> words.weight.shape  # the rows as they are read now
        torch.Size([1000, 8])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        optimizer: RowOptimizer,
        init: InitConfig | None = None,
        sse: SSEConfig | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if padding_idx not in (None, 0):
            raise ValueError(f"padding_idx is {padding_idx}: use 0 and number the ids from 1, or None")
        config = TableConfig(
            TABLE, num_embeddings, embedding_dim, (TABLE,), pooling="none", init=init or InitConfig("normal", 1.0),
            first_live_row=0 if padding_idx is None else 1,
        )  # fmt: skip
        self.tables = EmbeddingTables([config], optimizer, sse={} if sse is None else {TABLE: sse}, seed=seed)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows [..., embedding_dim] of ids ``input`` [...], whose first dimension counts samples."""
        num_samples = input.shape[0] if input.dim() else 1
        offsets = torch.arange(num_samples + 1) * (input.numel() // max(num_samples, 1))
        rows: torch.Tensor = self.tables(input.reshape(-1), offsets)
        return rows.view(*input.shape, self.embedding_dim)

    def step(self, scale: float = 1.0) -> None:
        """Apply the recorded gradients, each multiplied by ``scale`` (for clipping to a norm).

        Raises:
            ValueError: A recorded gradient is not finite. Rows are unchanged, and the recorded gradients are dropped.
        """
        if not self.tables.gradient_is_finite():
            self.tables.discard()
            raise ValueError("a gradient of the embedding is not finite: lower the learning rate, or clip gradients")
        self.tables.step(self.tables.completed_steps + 1, scale)

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the rows as a lookup now reads them, [num_embeddings, embedding_dim]."""
        return self.tables.read(TABLE)

    def get_extra_state(self) -> dict[str, Any]:
        """Return rows and optimizer state as stored, with their step count, for ``state_dict``."""
        state = {name: part.clone() for name, part in self.tables.state(TABLE).items()}
        steps = {"completed_steps": self.tables.completed_steps, "birth_step": self.tables.birth_step}
        return {"weight": self.tables.weight(TABLE).clone(), "state": state, **steps}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`get_extra_state` returned, and drop gradients recorded before this call."""
        self.tables.load(TABLE, state["weight"], state["state"])
        self.tables.discard()
        self.tables.birth_step = state["birth_step"]
        self.tables.completed_steps = state["completed_steps"]

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.tables.optimizer}"
