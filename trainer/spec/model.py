"""Model: what is trained, and what its rows start with. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.spec.base import Spec, later


class Init(Spec):
    """Initial rows. ``hash``: normal from hash(id, seed), so an id starts alike in every run; ``normal``: by row."""

    kind: Literal["zero", "normal", "hash"] = "zero"
    std: float = Field(default=0.01, ge=0.0, allow_inf_nan=False)


Size = Annotated[int, Field(ge=1, le=65536)]


class Model(Spec):
    """What is trained; trainer/models has a file for each kind. A field that the kind does not read is refused.

    ``hidden`` layers of the tower, with a shortcut around each (``residual``) and batch normalisation over the global
    batch in each (``batch_norm``: moments of a micro-batch where a step has several).

    item2vec: ``window``: targets are the items at most so many places away; ``negatives`` for each, 3 left out. sasrec:
    reads so many items at most (``length``), by ``blocks`` of self-attention with ``heads`` heads, and draws
    ``negatives``, 1 left out. gru4rec: alike, by ``gru_layers``. mf: with ``biases`` of users and items and the mean
    label, or the product alone.

    ``loss``: that of CTR models is bce, mse or focal (with ``focal_gamma`` and ``focal_alpha``; null: classes weigh
    alike), of mf bce or mse, of two_tower these or sampled_softmax over the items of the batch, of sasrec bce or
    sampled_softmax over its ``negatives``, of gru4rec these, bpr or top1; bpr has its own.

    ``negative_distribution`` of what bpr, sasrec, gru4rec (left out: ``uniform``) and item2vec (``popularity``) draw
    anew in an epoch: items of training alike, by their number of examples to the ``negative_power``, or those of other
    examples of the global batch (``in_batch``). All but item2vec take none that the user had in training.

    dcnv2: ``cross_layers`` before (``stacked``) or beside (``parallel``) the tower, their matrices of rank ``low_rank``
    (left out: whole). xdeepfm: ``cin_layers``, feature maps of each layer of the CIN. wukong: ``interaction_layers``,
    each of which gives ``fm_vectors`` by an MLP ``fm_hidden`` of pair products compressed to ``fm_rank``, and
    ``linear_vectors``. din: ``attention_hidden`` layers of the attention unit and their activation. autoint:
    ``attention_layers`` of ``attention_heads`` heads of so many units each; ``hidden: []`` leaves the deep part out.

    finalmlp: a stream of ``hidden`` and one of ``second_hidden`` layers (left out: alike), each gated by an MLP of
    ``gate_hidden`` layers of the features ``first_gate`` or ``second_gate`` (none: of a learned vector), fused by
    products of ``fusion_heads`` heads.
    """

    kind: Literal[
        "dnn", "two_tower", "bpr",
        "fm", "wide_deep", "xdeepfm", "wukong", "dlrm", "dcnv2", "deepfm", "autoint", "finalmlp", "din",
        "mf", "item2vec", "sasrec", "gru4rec",
    ]  # fmt: skip
    embedding_dim: int = Field(default=16, ge=1, le=4096)
    hidden: tuple[Size, ...] = (128, 64)
    init: Init | None = None
    residual: bool = later(False)
    batch_norm: bool = later(False)
    window: int = Field(default=3, ge=1, le=100)
    negatives: int | None = Field(default=None, ge=1, le=100)
    negative_distribution: Literal["uniform", "popularity", "in_batch"] | None = later(None)
    negative_power: float = later(0.75, ge=0.0, le=4.0, allow_inf_nan=False)
    length: int = Field(default=50, ge=1, le=1000)
    blocks: int = Field(default=2, ge=1, le=64)
    heads: int = Field(default=1, ge=1, le=64)
    loss: Literal["bce", "mse", "bpr", "sampled_softmax", "focal", "top1"] = "bce"
    gru_layers: int = later(1, ge=1, le=16)
    focal_gamma: float = later(2.0, ge=0.0, le=100.0, allow_inf_nan=False)
    focal_alpha: float | None = later(0.25, gt=0.0, lt=1.0)
    biases: bool = later(True)
    structure: Literal["stacked", "parallel"] = later("stacked")
    cross_layers: int = later(2, ge=1, le=64)
    low_rank: int | None = later(None, ge=1, le=4096)
    cin_layers: tuple[Size, ...] = later((100, 100), min_length=1, max_length=16)
    interaction_layers: int = later(2, ge=1, le=64)
    fm_vectors: int = later(16, ge=1, le=4096)
    linear_vectors: int = later(16, ge=1, le=4096)
    fm_rank: int = later(24, ge=1, le=4096)
    fm_hidden: tuple[Size, ...] = later((128,), max_length=16)
    attention_hidden: tuple[Size, ...] = later((36,), max_length=16)
    attention_activation: Literal["dice", "prelu", "relu"] = later("dice")
    attention_layers: int = later(3, ge=1, le=16)
    attention_heads: int = later(2, ge=1, le=64)
    attention_units: int = later(32, ge=1, le=4096)
    second_hidden: tuple[Size, ...] | None = later(None, min_length=1)
    gate_hidden: tuple[Size, ...] = later((64,), max_length=16)
    first_gate: tuple[str, ...] = later(())
    second_gate: tuple[str, ...] = later(())
    fusion_heads: int = later(1, ge=1, le=4096)

    @property
    def effective_init(self) -> Init:
        """The init asked for, else zero for CTR towers (AdamAR paper) and hash where a dot product needs a start."""
        if self.init is not None:
            return self.init
        if self.kind == "sasrec":
            return Init(kind="hash", std=0.02)
        products = self.kind in ("two_tower", "bpr", "mf", "item2vec", "gru4rec", "dlrm", "fm")
        if products or (self.kind == "autoint" and not self.hidden):
            return Init(kind="hash", std=0.1)
        return Init()

    @property
    def sampling(self) -> str:
        """The distribution of drawn negatives that is asked for, else that of the model's paper."""
        return self.negative_distribution or ("popularity" if self.kind == "item2vec" else "uniform")

    @property
    def num_negatives(self) -> int:
        """Draws for each target of a model of sequences."""
        return self.negatives or (3 if self.kind == "item2vec" else 1)
