"""item2vec: skip-gram with negative sampling over users' items.

Barkan and Koenigstein, Item2Vec, MLSP 2016; Mikolov et al., NIPS 2013, equation 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import softplus

from trainer.models.next_item import ITEM, NEGATIVE, TARGET, NextItemModel, owners

if TYPE_CHECKING:
    from trainer.data.batches.batch import Batch


class Item2Vec(NextItemModel):
    """loss = sum over the targets o of centre i of [-log sigmoid(<v_i, u_o>) - sum_k log sigmoid(-<v_i, u_k>)].

    Targets are the items at most ``window`` places from i in its user's sequence; the k are drawn for each of them by
    unigram^0.75 (trainer.data.batches.sequence_batches). An item's row is [v | u], 2 dim wide: v, the input embedding,
    is published, u is the output embedding. There are no other parameters.

    In ranking, a user is the mean v of the last ``window`` items, and is scored against u: the log odds, up to item
    frequency, that the candidate is near them.
    """

    def loss(self, batch: Batch) -> Tensor:
        """Return for each centre item [b] its loss, summed over its targets and negatives; 0 without neighbours."""
        rows = self.embeddings(batch.features)
        centres = rows[ITEM].values()[:, : self.dim]
        total = centres.new_zeros(len(centres))
        for key, sign in ((TARGET, -1.0), (NEGATIVE, 1.0)):
            owner = owners(rows[key].lengths())
            scores = (centres[owner] * self.candidates(rows[key].values())).sum(1)
            # Draws that hit their target were replaced by padding, and do not count.
            terms = softplus(sign * scores) * (batch.features[key].values() != 0)
            total = total.index_add(0, owner, terms)
        return total

    def encode(self, items: Tensor, lengths: Tensor) -> Tensor:
        return items[:, :, : self.dim].sum(1) / lengths.clamp(min=1)[:, None]

    def candidates(self, rows: Tensor) -> Tensor:
        return rows[:, self.dim :]
