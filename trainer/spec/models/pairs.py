"""BPR and MF: products of a user's and an item's row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trainer.spec.base import later
from trainer.spec.losses import RetrievalSettings
from trainer.spec.models.base import OF_PRODUCTS, DrawingSpec, Init, LossName, ModelSpec, pair_fit_problems
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec


class PairSpec(ModelSpec):
    """A model that reads one user and one item of each row, and nothing else."""

    reads_pairs = True
    has_dense_parameters = False
    multiplies_rows = "always"
    determines_vectors = True
    ranks_all_items = True
    has_context = True
    counts_columns = None

    @property
    def default_init(self) -> Init:
        return OF_PRODUCTS

    def fit_problems(self, job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
        yield from pair_fit_problems(self.kind, dataset)
        for name in ("user", "item"):
            if name in dataset.features and dataset.features[name].type != "id":
                yield FieldProblem(
                    f"features.{name}.type",
                    f"{self.kind} takes one {name} for each row, not {dataset.features[name].type}",
                    "use id",
                )
        yield from super().fit_problems(job, dataset)


class PartnerSpec(PairSpec, DrawingSpec, RetrievalSettings):
    """Base of models trained on pairs of an item that the user had and a drawn item (Rendle et al., UAI 2009).

    With ``share_negatives``, and with losses other than bpr, each example is compared with the drawn items of all
    ``batch_size`` examples of the batch.
    """

    draws_partner = True

    losses = ("bpr", "sampled_softmax", "gbce", "cosine_contrastive")
    # Chosen on validation rows: docs/reports/published_tables.md.
    job_defaults: ClassVar[Mapping[str, Any]] = {
        "model": {
            "embedding_dim": 64,
            # Directions turn fast while rows are short, and more slowly as they grow.
            "init": {"kind": "hash", "std": 0.001},
            "loss": "sampled_softmax",
            "share_negatives": True,
            "normalize": True,
            "temperature": 0.1,
        },
        "optimizer": {"kind": "adam", "learning_rate": 0.001, "moments": "dense"},
        "regularizers": {"early_stopping": {"patience": 3}},
        "epochs": 30,
        "batch_size": 2048,
        "evaluation": {"metrics": ("recall_20_full", "ndcg_20_full")},
    }

    @property
    def has_item_bias(self) -> bool:
        """True if scores have a bias of the item."""
        return False

    @property
    def shares(self) -> bool:
        """True if examples of a batch share their drawn items."""
        return self.share_negatives or self.loss in self.losses[1:]

    @property
    def is_softmax_of_batch(self) -> bool:
        return self.shares

    @property
    def wider_vectors_problem(self) -> str | None:
        return "normalize scales vectors by all their columns" if self.normalize else self.counts_columns

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        if self.loss == "gbce" and self.sampling != "uniform":
            why = f"gbce assumes uniform draws, not {self.sampling}"
            yield FieldProblem("model.negative_distribution", why, "use uniform, or loss sampled_softmax")
        if self.loss == "cosine_contrastive" and not self.normalize:
            yield FieldProblem("model.normalize", "cosine_contrastive compares cosines", "set normalize: true")


class BPRSpec(PartnerSpec):
    """BPR: the score is the product of the user's and the item's row, plus a bias of the item."""

    kind: Literal["bpr"]

    has_user_vectors = True

    @property
    def has_item_bias(self) -> bool:
        # The other loss compares cosines alone.
        return self.loss != "cosine_contrastive"

    @property
    def item_bias_weight(self) -> float | None:
        return 1.0 / self.temperature if self.has_item_bias else None

    def table_columns(self, table: str) -> int:
        return self.embedding_dim + 1 if table == "item" else self.embedding_dim


class LightGCNSpec(PartnerSpec):
    """Rows of users and items, smoothed over the graph of training pairs (He et al., LightGCN, SIGIR 2020).

    ``layers``: number of propagations over the graph. The model has the losses of bpr. A step propagates the rows of
    all users and items, on one rank.
    """

    kind: Literal["lightgcn"]
    layers: int = later(3, ge=1, le=16)

    job_defaults: ClassVar[Mapping[str, Any]] = {
        **PartnerSpec.job_defaults,
        "model": {**PartnerSpec.job_defaults["model"], "init": {"kind": "hash", "std": 0.01}},
        "batch_size": 4096,
    }

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        if job.resources.num_workers > 1:
            why = "lightgcn propagates over whole tables, which several ranks would split"
            yield FieldProblem("resources.num_workers", why, "use 1")
        if job.publish is not None:
            why = "vectors of lightgcn come from propagation, and no table has them"
            yield FieldProblem("publish", why, "leave it out, or use bpr")
        if job.sse:
            yield FieldProblem("sse", "lightgcn looks up every row in each step, not those of a batch", "leave it out")

    @property
    def has_item_bias(self) -> bool:
        # The length of a smoothed row tells its popularity; a direction does not.
        return self.normalize and self.loss != "cosine_contrastive"

    def table_columns(self, table: str) -> int:
        return self.embedding_dim + (table == "item" and self.has_item_bias)


class MFSpec(PairSpec):
    """Matrix factorization (Koren, Bell and Volinsky, 2009), with biases or only as the product.

    ``biases``: True to add biases of users and items and the mean label to the product.
    """

    kind: Literal["mf"]

    has_user_vectors = True
    has_distances = True
    loss: LossName = "bce"  # not for a warm start: the model's constant depends on the loss
    biases: bool = later(True)

    losses = ("bce", "mse")

    @property
    def item_bias_weight(self) -> float | None:
        return 1.0 if self.biases else None

    def table_columns(self, table: str) -> int:
        return self.embedding_dim + 1

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        if self.loss == "mse" and "label" in job.sse and job.sse["label"].probability:
            yield FieldProblem(
                "sse.label.probability",
                "mse learns numbers, not classes that can flip",
                "use loss bce, or leave it out",
            )
