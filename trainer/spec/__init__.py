"""The two documents that users write: DatasetSpec (what rows mean) and JobSpec (one training run). Torch-free.

The entry points are ``parse_job``, ``parse_dataset`` and ``load_documents``.
"""

from typing import TYPE_CHECKING

from embeddings.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from trainer.spec.base import NAME_PATTERN as NAME_PATTERN
    from trainer.spec.base import Column as Column
    from trainer.spec.base import Name as Name
    from trainer.spec.base import Positive as Positive
    from trainer.spec.base import Probability as Probability
    from trainer.spec.base import Spec as Spec
    from trainer.spec.dataset import DatasetSpec as DatasetSpec
    from trainer.spec.dataset import Feature as Feature
    from trainer.spec.dataset import Graph as Graph
    from trainer.spec.dataset import ItemTable as ItemTable
    from trainer.spec.dataset import Join as Join
    from trainer.spec.dataset import Label as Label
    from trainer.spec.dataset import Negatives as Negatives
    from trainer.spec.dataset import OneOfSeveral as OneOfSeveral
    from trainer.spec.dataset import PreviousItems as PreviousItems
    from trainer.spec.dataset import parse_rule as parse_rule
    from trainer.spec.evaluation import DEFAULT_METRICS as DEFAULT_METRICS
    from trainer.spec.evaluation import Evaluation as Evaluation
    from trainer.spec.evaluation import Intervals as Intervals
    from trainer.spec.evaluation import Metric as Metric
    from trainer.spec.evaluation import Split as Split
    from trainer.spec.job import FIRING_DATE as FIRING_DATE
    from trainer.spec.job import SSE as SSE
    from trainer.spec.job import Checkpoint as Checkpoint
    from trainer.spec.job import DatasetRef as DatasetRef
    from trainer.spec.job import Follow as Follow
    from trainer.spec.job import InitFrom as InitFrom
    from trainer.spec.job import JobSpec as JobSpec
    from trainer.spec.job import LabelText as LabelText
    from trainer.spec.job import Resources as Resources
    from trainer.spec.job import ShardingKind as ShardingKind
    from trainer.spec.job import Table as Table
    from trainer.spec.job import Walk as Walk
    from trainer.spec.job import Window as Window
    from trainer.spec.models.base import Init as Init
    from trainer.spec.models.registry import Model as Model
    from trainer.spec.optimizer import DenseOptimizer as DenseOptimizer
    from trainer.spec.optimizer import LearningRateSchedule as LearningRateSchedule
    from trainer.spec.optimizer import Optimizer as Optimizer
    from trainer.spec.problems import SpecError as SpecError
    from trainer.spec.publish import Anchor as Anchor
    from trainer.spec.publish import Expire as Expire
    from trainer.spec.publish import FrozenContext as FrozenContext
    from trainer.spec.publish import Gate as Gate
    from trainer.spec.publish import MovingAverage as MovingAverage
    from trainer.spec.publish import Publish as Publish
    from trainer.spec.publish import Users as Users
    from trainer.spec.publish import View as View
    from trainer.spec.reading import load_documents as load_documents
    from trainer.spec.reading import parse_dataset as parse_dataset
    from trainer.spec.reading import parse_job as parse_job
    from trainer.spec.reading import problems_of as problems_of
    from trainer.spec.regularizers import Regularizers as Regularizers

__getattr__ = lazy_exports(__name__)
