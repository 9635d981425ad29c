"""Requests that schemathesis makes up from the OpenAPI document in all its phases, and what became of them
(test_schema.py)."""

from __future__ import annotations

import os
from typing import Any

import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema

from tests.service.api import document_checks  # registers its check
from tests.service.api.walkthrough import Reached

EXAMPLES = int(os.environ.get("EVENKEEL_SCHEMA_EXAMPLES", "3"))
SKIPPED = [
    {"include-path": "/v1/jobs/{job_id}/events", "enabled": False},  # a stream
    # These would end the session or the key that is used, or the dataset that others need.
    {"include-path": ["/session", "/v1/keys/{key_id}", "/v1/keys/{key_id}/rotate"], "enabled": False},
    {"include-path": "/v1/datasets/{name}", "include-method": ["DELETE", "PUT"], "enabled": False},
]
SHORT = [{"include-path": sorted(document_checks.SPECS), "phases": {"coverage": {"enabled": False}}}]
"""In the short form without boundary values of whole specs, which are nine tenths of all cases."""


def explore(url: str, document: Any, key: str, reached: Reached) -> None:
    """Examples, boundary values of each schema, random requests, and chains of requests along the document's links; all
    differences from the document are reported at once."""
    config = SchemathesisConfig.from_dict(
        {
            "base-url": url,
            "headers": {"Authorization": f"Bearer {key}"},
            "seed": 1,
            "continue-on-failure": True,
            "suppress-health-check": ["all"],
            "generation": {"max-examples": EXAMPLES, "no-shrink": True},
            "phases": {"stateful": {"generation": {"max-examples": 5 * EXAMPLES}}},
            # document_checks.right_form_is_accepted is in its place.
            "checks": {"positive_data_acceptance": {"enabled": False}},
            "operations": [*SKIPPED, *(SHORT if EXAMPLES == 3 else [])],
        }
    )
    schema = schemathesis.openapi.from_dict(document, config=config)
    wrong: list[str] = []
    phases, followed = set(), set()
    for event in from_schema(schema).execute():
        if isinstance(event, events.NonFatalError | events.FatalError):
            wrong.append(str(event))
        if not isinstance(event, events.ScenarioFinished):
            continue
        phases.add(event.phase.value)
        for identifier, interaction in event.recorder.interactions.items():
            case = event.recorder.cases[identifier].value
            operation = case.method.upper(), case.path
            if interaction.response is not None:
                status = interaction.response.status_code
                reached[operation].add(status)
                if event.recorder.cases[identifier].parent_id is not None and status < 300:
                    followed.add(" ".join(operation))
            for check in event.recorder.checks.get(identifier, []):
                info = check.failure_info
                if info is not None:
                    wrong.append(f"{event.phase.value}: {' '.join(operation)}: {info.failure}\n{info.code_sample}")
    assert not wrong, f"{len(wrong)} differences:\n" + "\n\n".join(text[:1500] for text in wrong[:30])
    assert phases == {"examples", "coverage", "fuzzing", "stateful"}, phases
    assert followed  # links lead to objects that are there
