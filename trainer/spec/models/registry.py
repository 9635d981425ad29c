"""Kinds of models, keyed by name: those of this package, and those that others register as ``evenkeel.model_specs``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Union, get_args

from pydantic import Field, TypeAdapter

from embeddings.outside_packages import load_all
from trainer.spec.base import STORED
from trainer.spec.models.autoint import AutoIntSpec
from trainer.spec.models.base import ModelSpec
from trainer.spec.models.din import DINSpec
from trainer.spec.models.dnn import DeepFMSpec, DNNSpec, FMSpec, WideDeepSpec
from trainer.spec.models.finalmlp import FinalMLPSpec
from trainer.spec.models.pairs import BPRSpec, LightGCNSpec, MFSpec
from trainer.spec.models.products import DCNv2Spec, DLRMSpec, PNNSpec, XDeepFMSpec
from trainer.spec.models.sequences import GRU4RecSpec, HSTUSpec, Item2VecSpec, SASRecSpec
from trainer.spec.models.several_labels import ESMMSpec, MMoESpec, PLESpec, SharedBottomSpec
from trainer.spec.models.two_tower import TwoTowerSpec
from trainer.spec.models.wukong import WukongSpec

_OUTSIDE, BROKEN_MODELS = load_all("evenkeel.model_specs")
"""Specs that other packages register, and error messages for specs that cannot be imported, each by kind."""

MODEL_SPECS: tuple[type[ModelSpec], ...] = (
    FMSpec,
    DNNSpec,
    WideDeepSpec,
    DeepFMSpec,
    XDeepFMSpec,
    DCNv2Spec,
    DLRMSpec,
    PNNSpec,
    WukongSpec,
    AutoIntSpec,
    FinalMLPSpec,
    DINSpec,
    TwoTowerSpec,
    BPRSpec,
    LightGCNSpec,
    MFSpec,
    Item2VecSpec,
    SASRecSpec,
    GRU4RecSpec,
    HSTUSpec,
    SharedBottomSpec,
    MMoESpec,
    PLESpec,
    ESMMSpec,
    *_OUTSIDE.values(),
)


MODELS: dict[str, type[ModelSpec]] = {get_args(spec.model_fields["kind"].annotation)[0]: spec for spec in MODEL_SPECS}
ModelSpec.registry = MODELS

if TYPE_CHECKING:
    Model = ModelSpec
else:
    Model = Annotated[Union[MODEL_SPECS], Field(discriminator="kind")]  # noqa: UP007


def parse_model(document: Any, *, stored: bool = False) -> ModelSpec:
    """Return the model that a document names by its ``kind``.

    ``stored``: True for the model of a trained job, which is only read: removed settings are dropped, not refused.

    Raises:
        pydantic.ValidationError: The document is not a valid model.
    """
    spec: ModelSpec = _ADAPTER.validate_python(document, context={STORED: stored})
    return spec


_ADAPTER: TypeAdapter[Any] = TypeAdapter(Model)
