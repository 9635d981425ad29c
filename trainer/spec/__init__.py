"""The two documents that users write: DatasetSpec (what rows mean) and JobSpec (one training run). Torch-free.

The entry points are ``parse_job``, ``parse_dataset`` and ``load_documents``.
"""

from typing import TYPE_CHECKING

from embeddings.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from trainer.spec.base import NAME_PATTERN, Column, Name, Positive, Probability, Spec
    from trainer.spec.dataset import (
        DatasetSpec,
        Feature,
        Graph,
        ItemTable,
        Join,
        Label,
        Negatives,
        OneOfSeveral,
        PreviousItems,
        parse_rule,
    )
    from trainer.spec.evaluation import DEFAULT_METRICS, Evaluation, Intervals, Metric, Split
    from trainer.spec.job import (
        FIRING_DATE,
        SSE,
        Checkpoint,
        DatasetRef,
        Follow,
        InitFrom,
        JobSpec,
        LabelText,
        Resources,
        ShardingKind,
        Table,
        Walk,
        Window,
    )
    from trainer.spec.models.base import Init
    from trainer.spec.models.registry import Model
    from trainer.spec.optimizer import DenseOptimizer, LearningRateSchedule, Optimizer
    from trainer.spec.problems import SpecError
    from trainer.spec.publish import Anchor, Expire, FrozenContext, Gate, MovingAverage, Publish, View
    from trainer.spec.reading import load_documents, parse_dataset, parse_job, problems_of
    from trainer.spec.regularizers import Regularizers

__all__ = [
    "DEFAULT_METRICS",
    "FIRING_DATE",
    "NAME_PATTERN",
    "SSE",
    "Anchor",
    "Checkpoint",
    "Column",
    "DatasetRef",
    "DatasetSpec",
    "DenseOptimizer",
    "Evaluation",
    "Expire",
    "Feature",
    "Follow",
    "FrozenContext",
    "Gate",
    "Graph",
    "Init",
    "InitFrom",
    "Intervals",
    "ItemTable",
    "JobSpec",
    "Join",
    "Label",
    "LabelText",
    "LearningRateSchedule",
    "Metric",
    "Model",
    "MovingAverage",
    "Name",
    "Negatives",
    "OneOfSeveral",
    "Optimizer",
    "Positive",
    "PreviousItems",
    "Probability",
    "Publish",
    "Regularizers",
    "Resources",
    "ShardingKind",
    "Spec",
    "SpecError",
    "Split",
    "Table",
    "View",
    "Walk",
    "Window",
    "load_documents",
    "parse_dataset",
    "parse_job",
    "parse_rule",
    "problems_of",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "trainer.spec.base": ["Column", "NAME_PATTERN", "Name", "Positive", "Probability", "Spec"],
        "trainer.spec.dataset": [
            "DatasetSpec",
            "Feature",
            "Graph",
            "ItemTable",
            "Join",
            "Label",
            "Negatives",
            "OneOfSeveral",
            "PreviousItems",
            "parse_rule",
        ],
        "trainer.spec.evaluation": ["DEFAULT_METRICS", "Evaluation", "Intervals", "Metric", "Split"],
        "trainer.spec.job": [
            "Checkpoint",
            "DatasetRef",
            "FIRING_DATE",
            "Follow",
            "InitFrom",
            "JobSpec",
            "LabelText",
            "Resources",
            "SSE",
            "ShardingKind",
            "Table",
            "Walk",
            "Window",
        ],
        "trainer.spec.models.base": ["Init"],
        "trainer.spec.models.registry": ["Model"],
        "trainer.spec.optimizer": ["DenseOptimizer", "LearningRateSchedule", "Optimizer"],
        "trainer.spec.problems": ["SpecError"],
        "trainer.spec.publish": [
            "Anchor",
            "Expire",
            "FrozenContext",
            "Gate",
            "MovingAverage",
            "Publish",
            "View",
        ],
        "trainer.spec.reading": ["load_documents", "parse_dataset", "parse_job", "problems_of"],
        "trainer.spec.regularizers": ["Regularizers"],
    },
)
