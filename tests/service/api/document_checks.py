"""What schemathesis checks of each answer, and which refusals are of what a value means.

A document says which values have the right form. Whether a file is there, a name can be resolved or an expression ever
fires, it cannot say: a request may have the right form and be refused, by the fields that stand here. All other
refusals of such requests are mistakes in the document.

As a module of hooks: ``SCHEMATHESIS_HOOKS=tests.service.api.document_checks schemathesis run ...``.
"""

from __future__ import annotations

from typing import Any

import schemathesis
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_schema_conformance,
    status_code_conformance,
)

BY_MEANING = {
    "url", "uri", "cron", "timezone", "expires_at",
    "vector", "dim", "sigma", "epsilon", "collection", "state", "ids", "id", "seed",
}  # fmt: skip
"""Fields whose value can be refused although its form is right."""
UNSTORABLE = "holds a character that cannot be stored"
"""Of any text: NUL and halves of surrogate pairs, which JSON can hold and no pattern can be asked to leave out."""
SPECS = {"/v1/jobs", "/v1/datasets", "/v1/schedules", "/v1/schedules/{name}"}
"""Their bodies hold a job or a dataset, whose fields must go together (trainer/spec/checks)."""


@schemathesis.check
def right_form_is_accepted(ctx: Any, response: Any, case: Any) -> bool | None:
    """Let a request of the right form be refused for what it means, and for nothing else."""
    if response.status_code == 422:
        errors = [error for error in response.json()["errors"] if UNSTORABLE not in error["message"]]
        fields = {error["field"].partition(".")[0] for error in errors} - {""}
        # Of no field: a name that no collection or version can have, ids of another type than the collection's.
        if fields <= BY_MEANING or (case.path in SPECS and case.method != "GET"):
            return None
    return positive_data_acceptance(ctx, response, case)  # type: ignore[no-any-return]


CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    right_form_is_accepted,
    allow_header_conformance,
]
