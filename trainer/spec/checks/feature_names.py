"""Checks for names of features that a job's modules and batches already use for something else. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec, Feature
    from trainer.spec.job import JobSpec

# TorchRec keeps tables under their names in a torch.nn.ModuleDict, whose class has members of these names.
NAMES_OF_MODULES = frozenset("""
    T_destination _apply _backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl _forward_hooks
    _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks _forward_pre_hooks_with_kwargs
    _get_backward_hooks _get_backward_pre_hooks _get_name _is_full_backward_hook _load_from_state_dict
    _load_state_dict_post_hooks _load_state_dict_pre_hooks _maybe_warn_non_full_backward_hook _modules
    _named_members _non_persistent_buffers_set _parameters _register_load_state_dict_pre_hook
    _register_state_dict_hook _replicate_for_data_parallel _save_to_state_dict _slow_forward _state_dict_hooks
    _state_dict_pre_hooks _version _wrapped_call_impl add_module apply bfloat16 buffers call_super_init children
    clear compile cpu cuda double dump_patches eval extra_repr float forward get_buffer get_extra_state
    get_parameter get_submodule half ipu items keys load_state_dict modules mtia named_buffers named_children
    named_modules named_parameters parameters pop register_backward_hook register_buffer register_forward_hook
    register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
    register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module register_parameter
    register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule
    share_memory state_dict to to_empty train training type update values xpu zero_grad
""".split())  # noqa: SIM905  # fmt: skip
# Suffix of the name of a feature's drawn negatives; the same as NEGATIVE_SUFFIX of trainer.data.prepare.plan.
NEGATIVE = "__negative"


def name_fit_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield features of the dataset that the job cannot have under their names.

    The dataset itself is valid: other jobs may not give the feature a table, or draw no items.
    """
    features = dataset.joined_features
    readers = ["item"] if job.model.reads_sequences else [name for name, feature in features.items() if feature.has_ids]
    tables = {features[name].shares or name for name in readers if name in features}
    for name, feature in features.items():
        if name in tables & NAMES_OF_MODULES:
            yield _problem(
                name, feature, f"a table cannot have the name '{name}', which a member of torch's modules has"
            )
        of, suffix, rest = name.rpartition(NEGATIVE)
        if name in readers and suffix and not rest and of in _with_negatives(job):
            yield _problem(name, feature, f"the job uses this name for negatives of '{of}'")


def _with_negatives(job: JobSpec) -> set[str]:
    """Return the names of features for whose drawn negatives the job may use the name with suffix NEGATIVE."""
    return set(job.sse) | ({"item"} if job.model.draws_partner else set())


def _problem(name: str, feature: Feature, what: str) -> FieldProblem:
    own = feature.column is None and feature.join is None and feature.derive is None
    remedy = "give the feature another name" + (f" and column: {name}" if own else "")
    return FieldProblem("dataset.name", f"feature '{name}': {what}", remedy)
