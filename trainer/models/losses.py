"""Losses that several models use: of a score against its label, or against the scores of other items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from embeddings.sharding.exchange.collectives import all_gather, all_to_all, sum_in_rank_order
from trainer.data.batches.order import rank_slice
from trainer.models.retrieval_losses import Shared, Softmax, shared_loss


def pointwise_loss(kind: str, scores: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    """Return the loss of [b] scores against [b] labels, [b].

    ``bce``: binary cross-entropy with the score as logit, log(1 + e^z) - y z, labels in [0, 1]; ``mse``: (z - y)^2, any
    labels; ``focal``: :func:`focal_loss`, which takes the ``settings``; ``poisson``: e^z - y z, the negative log
    likelihood of a count y with mean e^z, without the constant log y!; ``exponential``: z + y e^-z, the negative log
    likelihood of an exponentially distributed y with mean e^z.
    """
    return POINTWISE[kind](scores, labels.to(scores.dtype), **settings)


def focal_loss(scores: Tensor, labels: Tensor, *, gamma: float, alpha: float | None) -> Tensor:
    """Return -alpha_t (1 - p_t)^gamma log p_t, [b].

    For label 1, p_t = sigmoid(z) and alpha_t = ``alpha``; for label 0, p_t = 1 - sigmoid(z) and alpha_t = 1 -
    ``alpha``; for a label between, the loss is the mean of both, weighted by the label (Lin et al., Focal Loss for
    Dense Object Detection, ICCV 2017, equation 5). ``alpha`` None: alpha_t = 1, equation 4.
    """
    weight = (1.0, 1.0) if alpha is None else (alpha, 1.0 - alpha)
    # log p = -softplus(-z) and log(1 - p) = -softplus(z): nothing overflows, and nothing is the log of 0.
    not_one, not_zero = softplus(-scores), softplus(scores)
    positive = weight[0] * torch.exp(-gamma * not_zero) * not_one
    negative = weight[1] * torch.exp(-gamma * not_one) * not_zero
    return labels * positive + (1.0 - labels) * negative


def sampled_loss(kind: str, positive: Tensor, negative: Tensor) -> Tensor:
    """Return the loss [n] of each target's score z against the scores z_1 .. z_k of its drawn items.

    ``positive``: scores of the targets [n]. ``negative``: scores of the drawn items [n, k].

    ``bce``: -log s(z) - sum_j log(1 - s(z_j)), s the sigmoid (Kang and McAuley, ICDM 2018, equation 7);
    ``sampled_softmax``: -z + log(e^z + sum_j e^z_j); ``bpr``: the mean over j of -log s(z - z_j); ``top1``: the mean of
    s(z_j - z) + s(z_j^2) (both Hidasi et al., ICLR 2016, section 3.2.2).
    """
    return SAMPLED[kind](positive, negative)


def _bce(scores: Tensor, labels: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(scores, labels, reduction="none")


def _mse(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores - labels).square()


def _poisson(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.exp() - labels * scores


def _exponential(scores: Tensor, labels: Tensor) -> Tensor:
    return scores + labels * (-scores).exp()


def _sampled_bce(positive: Tensor, negative: Tensor) -> Tensor:
    return softplus(-positive) + softplus(negative).sum(1)


def _sampled_softmax(positive: Tensor, negative: Tensor) -> Tensor:
    return torch.cat([positive[:, None], negative], dim=1).logsumexp(1) - positive


def _bpr(positive: Tensor, negative: Tensor) -> Tensor:
    return softplus(negative - positive[:, None]).mean(1)


def _top1(positive: Tensor, negative: Tensor) -> Tensor:
    return (torch.sigmoid(negative - positive[:, None]) + torch.sigmoid(negative.square())).mean(1)


POINTWISE: dict[str, Callable[..., Tensor]] = {
    "bce": _bce,
    "mse": _mse,
    "focal": focal_loss,
    "poisson": _poisson,
    "exponential": _exponential,
}
"""Losses of a score and its label, by the name in trainer.spec.losses."""
SAMPLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bce": _sampled_bce,
    "sampled_softmax": _sampled_softmax,
    "bpr": _bpr,
    "top1": _top1,
}
"""Losses of a target's score against the scores of its drawn items, by the name in trainer.spec.losses."""


def in_batch_softmax(
    queries: Tensor,
    candidates: Tensor,
    labels: Tensor,
    log_probabilities: Tensor,
    global_size: int,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the softmax loss [b] over the items of the global batch, corrected for the items' frequencies.

        -y_i log( exp(s_ii - log Q_i) / sum_j exp(s_ij - log Q_j) ),  s_ij = <query_i, candidate_j>,

    j runs over the samples of all ranks, Q_j is the probability that a sample has item j, and y_i is the label (the
    paper's reward r_i). A sample with label 0 has no loss, but its item is a negative of the others. Samples with the
    same item as i are terms of the sum like others: its expectation is the batch size times the sum over the whole
    catalogue (Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations, RecSys 2019,
    equations 3 to 5).

    With several ranks, forward and backward are collective; gradients equal those of one rank with the whole batch.

    Args:
        queries: query vectors of this rank's samples [b, d]; b may be 0.
        candidates: item vectors of this rank's samples [b, d].
        labels: [b].
        log_probabilities: log Q of each sample's item [b].
        global_size: number of samples of the global batch.
        group: the ranks that share the batch; None: all ranks.
    """
    everyone, all_log = (of_all_ranks(part, global_size, group) for part in (candidates, log_probabilities))
    target = (queries * candidates).sum(1) - log_probabilities
    return labels.to(target.dtype) * shared_loss(Softmax(), queries, target, Shared(everyone, offsets=-all_log))


def of_all_ranks(local: Tensor, global_size: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return all ranks' parts of a batch's tensor, [b, d] or [b], concatenated: [global_size, ...]. Collective.

    Backward is collective too, and sums the gradients of all ranks; a tensor [b] is a constant without gradient.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return local
    group = group if group is not None else dist.distributed_c10d._get_default_group()
    world_size = dist.get_world_size(group)
    slices = (rank_slice(global_size, rank, world_size) for rank in range(world_size))
    sizes = [end - begin for begin, end in slices]
    if local.dim() == 1:
        return torch.cat(all_gather("a column of the batch", local, [(size,) for size in sizes], group))
    everyone: Tensor = _OfAllRanks.apply(local, sizes, group)
    return everyone


class _OfAllRanks(torch.autograd.Function):
    """[b, d] of all ranks, concatenated in rank order; backward sums each rank's part over all ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = list(sizes), group
        return torch.cat(all_gather("candidates", local, [(size, local.shape[1]) for size in sizes], group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        sizes, group = ctx.sizes, ctx.group
        shape = (sizes[dist.get_rank(group)], gradient.shape[1])
        parts = all_to_all("gradients of candidates", gradient.split(sizes), [shape] * len(sizes), group)
        return sum_in_rank_order(parts), None, None
