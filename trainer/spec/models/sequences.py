"""item2vec, SASRec, HSTU and GRU4Rec: users' items in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from trainer.spec.base import May, later
from trainer.spec.losses import RetrievalSettings
from trainer.spec.models.base import OF_PRODUCTS, DrawingSpec, Init, pair_fit_problems
from trainer.spec.models.size import ModelSize
from trainer.spec.problems import FieldProblem

Negatives = Literal["own", "shared", "all"]
"""Items that a target is compared with: drawn only for it, drawn once for all targets of the batch, or all items."""

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec


MOST_OF_EACH, MOST_SHARED = 100, 4096
"""Largest number of items drawn for each target, and of items drawn once for all targets of a batch."""
NEGATIVES_OF_LOSSES: dict[str, Negatives] = {"softmax": "all", "gbce": "shared", "cosine_contrastive": "shared"}
"""Items that a target is compared with, by loss, for the losses that allow only one such choice."""


class SequenceSpec(DrawingSpec):
    """A model of each user's items in their order.

    ``negatives``: number of items drawn for each target (at most MOST_OF_EACH), or, if they are shared, for all targets
    of a batch. Default: the number in the model's paper.
    """

    negatives: Annotated[int | None, May.DIFFER_ON_WARM_START] = Field(default=None, ge=1, le=MOST_SHARED)

    default_negatives: ClassVar[int] = 1
    reads_sequences = True
    multiplies_rows = "always"
    pools = False
    determines_vectors = True

    @property
    def num_negatives(self) -> int:
        """Number of negatives drawn for each target."""
        return self.negatives or self.default_negatives

    @property
    def compared_with(self) -> Negatives:
        """Items that each target is compared with."""
        return "own"

    @property
    def ids_in_example(self) -> tuple[int, int]:
        """(Most items that the model reads in an example, most items that are targets of an example)."""
        raise NotImplementedError

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        if self.compared_with == "own" and self.num_negatives > MOST_OF_EACH:
            why = f"at most {MOST_OF_EACH} for each target; {MOST_SHARED} that all targets of a batch share"
            remedy = "use fewer" if self.kind == "item2vec" else "set model.share_negatives: true"
            yield FieldProblem("model.negatives", why, remedy)

    @property
    def default_init(self) -> Init:
        return OF_PRODUCTS

    def fit_problems(self, job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
        yield from pair_fit_problems(self.kind, dataset)
        if dataset.ordering is None:
            yield FieldProblem("model.kind", f"{self.kind} needs order or timestamp in dataset '{dataset.name}'")
        yield from super().fit_problems(job, dataset)


class Item2VecSpec(SequenceSpec):
    """Skip-gram over users' items (Barkan and Koenigstein, 2016).

    Targets are the items at most ``window`` places away.
    """

    kind: Literal["item2vec"]

    has_dense_parameters = False

    has_both_sides_in_rows = True
    window: Annotated[int, May.DIFFER_ON_WARM_START] = Field(default=3, ge=1, le=100)

    losses = ()
    default_sampling = "popularity"
    default_negatives = 3
    has_context = True
    counts_columns = None

    @property
    def history_length(self) -> int:
        return self.window

    @property
    def ids_in_example(self) -> tuple[int, int]:
        return 1, 2 * self.window

    def table_columns(self, table: str) -> int:
        return 2 * self.embedding_dim


class PieceSpec(SequenceSpec, RetrievalSettings):
    """A model that reads pieces of at most ``length`` items, and at each item predicts the next.

    Loss ``softmax`` compares a target with all items. Losses ``gbce`` and ``cosine_contrastive`` compare it with drawn
    items that all targets of a batch share.
    """

    length: int = Field(default=50, ge=1, le=1000)

    has_user_vectors = True

    @property
    def history_length(self) -> int:
        return self.length

    @property
    def ids_in_example(self) -> tuple[int, int]:
        return self.length, self.length

    @property
    def compared_with(self) -> Negatives:
        return NEGATIVES_OF_LOSSES.get(self.loss, "shared" if self.share_negatives else "own")

    @property
    def wider_vectors_problem(self) -> str | None:
        return "normalize scales vectors by all their columns" if self.normalize else self.counts_columns

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        yield from self._loss_problems()

    def _loss_problems(self) -> Iterator[FieldProblem]:
        """Yield a problem for each setting of negatives that the loss does not use."""
        if self.loss == "softmax":
            for name in ("negatives", "negative_distribution"):
                if getattr(self, name) is not None:
                    yield FieldProblem(f"model.{name}", "softmax scores all items for each target", "leave it out")
        if self.loss == "top1" and self.share_negatives:
            yield FieldProblem(
                "model.share_negatives", "top1 draws for each target", "leave it out, or use another loss"
            )
        if self.loss == "gbce" and self.sampling != "uniform":
            why = f"gbce assumes uniform draws, not {self.sampling}"
            yield FieldProblem("model.negative_distribution", why, "use uniform, or loss sampled_softmax")
        if self.loss == "cosine_contrastive" and not self.normalize:
            yield FieldProblem("model.normalize", "cosine_contrastive compares cosines", "set normalize: true")
        if self.loss == "sampled_softmax" and self.compared_with == "own" and self.sampling != "uniform":
            yield FieldProblem(
                "model.negative_distribution",
                f"sampled_softmax of {self.kind} assumes uniform draws, not {self.sampling}",
                "use share_negatives: true, which corrects for it, or uniform, or loss bce",
            )


class AttentionSpec(PieceSpec):
    """A model that attends to the items of a piece, in ``blocks`` blocks of ``heads`` heads.

    A job that names no loss takes ``job_defaults``. Short histories cost no more with their larger ``length``: lists of
    a batch are computed in groups of similar length.
    """

    blocks: int = Field(default=2, ge=1, le=64)
    heads: int = Field(default=1, ge=1, le=64)

    # Chosen on validation rows: docs/reports/published_tables.md.
    job_defaults: ClassVar[Mapping[str, Any]] = {
        "model": {
            "embedding_dim": 64,
            "length": 200,
            "loss": "sampled_softmax",
            "share_negatives": True,
            "negatives": MOST_SHARED,
            "normalize": True,
            "temperature": 0.07,
        },
        "optimizer": {"kind": "adam", "learning_rate": 0.001, "moments": "dense"},
        "dense_optimizer": {"kind": "adam", "learning_rate": 0.001},
        "regularizers": {"dropout": 0.3, "early_stopping": {"patience": 10}},
        "epochs": 60,
        "batch_size": 128,
        "evaluation": {"split": {"kind": "per_user_last"}},
    }
    # With the default of other kinds, adam_ar, sasrec's NDCG on amazon_beauty is half as high.
    defaults_of_any_loss = ("optimizer", "dense_optimizer")

    losses = ("bce", "sampled_softmax", "bpr", "softmax", "gbce", "cosine_contrastive")
    counts_columns = "it normalises each vector over its columns"

    @property
    def default_init(self) -> Init:
        return Init(kind="hash", std=0.02)

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        if self.embedding_dim % self.heads:
            yield FieldProblem(
                "model.heads", f"{self.heads} heads do not divide embedding_dim {self.embedding_dim}", "use a divisor"
            )


class SASRecSpec(AttentionSpec):
    """Self-attention over a user's last items (Kang and McAuley, ICDM 2018): ``blocks`` blocks with ``heads`` heads."""

    kind: Literal["sasrec"]

    job_defaults = {
        **AttentionSpec.job_defaults,
        "optimizer": {"kind": "adam", "learning_rate": 0.002, "moments": "dense"},
        "dense_optimizer": {"kind": "adam", "learning_rate": 0.002},
        "regularizers": {"dropout": 0.4, "early_stopping": {"patience": 10}},
    }

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        dim = self.embedding_dim
        block = 3 * dim * dim + 2 * (dim * dim + dim) + 4 * dim
        return ModelSize(
            self.length * dim + self.blocks * block + 2 * dim, self._kept(num_features), 0, 0,
            self.length * self.blocks * block,
        )  # fmt: skip

    def _kept(self, num_features: int) -> int:
        """Return a rough estimate of the values per sample that its layers keep for the backward pass."""
        return num_features * self.embedding_dim + 128 + 64 + 1


class HSTUSpec(AttentionSpec):
    """Gated attention without a softmax over a user's last items (Zhai et al., ICML 2024): ``blocks`` layers."""

    kind: Literal["hstu"]

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        dim, length = self.embedding_dim, self.length
        matrices = 5 * dim * dim
        scores = self.heads * length * length
        return ModelSize(
            length * dim + self.blocks * (matrices + 5 * dim + length) + 2 * dim,
            0,
            # Kept for each layer: the normalised input, the four projections before and after silu, the gated mean and
            # its factors, the scores before and after silu, and the mask.
            self.blocks * (14 * length * dim + 3 * scores),
            3 * scores,
            length * self.blocks * (matrices + 2 * length * dim),
        )


class GRU4RecSpec(PieceSpec):
    """A recurrent network of ``gru_layers`` layers over a user's items (Hidasi et al., ICLR 2016)."""

    kind: Literal["gru4rec"]
    gru_layers: int = later(1, ge=1, le=16)

    counts_columns = None

    def learns_from_padding(self, has_numbers: bool) -> bool:
        return True  # the columns are multiplied with states

    losses = ("bce", "sampled_softmax", "bpr", "top1", "softmax", "gbce", "cosine_contrastive")

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        dim, layers = self.embedding_dim, self.gru_layers
        # Kept for each position: its row, and for each layer the gates, their inputs and the state.
        held = self.length * dim * (2 + 9 * layers)
        return ModelSize(
            layers * (6 * dim * dim + 6 * dim), 0, held, 3 * self.length * dim, self.length * layers * 6 * dim * dim
        )
