"""Requests that schemathesis makes up from the OpenAPI document, and what became of them (test_schema.py)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck

from tests.service.api.document_checks import CHECKS
from tests.service.api.walkthrough import Reached, parameters

EXAMPLES = int(os.environ.get("EVENKEEL_SCHEMA_EXAMPLES", "3"))
ENOUGH_LINKS = 6


def generate(url: str, document: Any, key: str, values: dict[str, str], reached: Reached) -> None:
    schema = schemathesis.openapi.from_dict(document)
    headers = {"Authorization": f"Bearer {key}"}
    wrong: list[str] = []
    for result in schema.get_all_operations():
        operation = result.ok()
        method, path = operation.method.upper(), operation.path
        if path in ("/session", "/v1/jobs/{job_id}/events") or (method == "DELETE" and "key" in path):
            continue  # ends the session that is used; streams; would revoke the key that is used

        try:
            requests_of(operation, url, headers, values, reached)()
        except Exception as error:  # every operation is tried: one run shows all that is wrong
            wrong.append(f"{method} {path}: {error}"[:1500])
    assert not wrong, "\n\n".join(wrong)


def requests_of(
    operation: Any, url: str, headers: dict[str, str], values: dict[str, str], reached: Reached
) -> Callable[[], None]:
    """Half of the requests name objects that are there, unless they would end what the others need."""
    method, path = operation.method.upper(), operation.path

    @hypothesis.settings(
        max_examples=EXAMPLES, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(), known=hypothesis.strategies.booleans())
    def call(case: Any, known: bool) -> None:
        if known and method != "DELETE" and "rotate" not in path:
            case.path_parameters = parameters(path, values)
        case.headers = {}
        answer = case.call(base_url=url, headers=headers)
        reached[method, path].add(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    return call


def follow(url: str, document: Any, key: str, reached: Reached) -> set[str]:
    """Chains of requests along the document's links: an object is made or listed, then what its answer names is asked
    for. Which links were followed to a success."""
    machine: Any = schemathesis.openapi.from_dict(document).as_state_machine()
    followed: set[str] = set()

    class Chain(machine):  # type: ignore[misc]
        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return {"base_url": url, "headers": {"Authorization": f"Bearer {key}"}}

        def before_call(self, case: Any) -> None:
            # Odd headers and queries are tried above: here they would only end the chain.
            case.headers, case.query = {}, {}
            # The events of a job are a stream; what others need is not ended, and this key's secret stays.
            ending = case.method == "DELETE" or case.path in ("/v1/keys/{key_id}/rotate", "/v1/jobs/{job_id}/events")
            if ending and case.path_parameters:
                case.path_parameters = dict.fromkeys(case.path_parameters, "v000099")

        def validate_response(self, response: Any, case: Any, **options: Any) -> None:
            case.validate_response(response, checks=CHECKS)

        def after_call(self, response: Any, case: Any) -> None:
            reached[case.method.upper(), case.path].add(response.status_code)
            if "{" in case.path and response.status_code < 300:
                followed.add(f"{case.method} {case.path}")

    # What is drawn depends on what was answered, and so on which jobs have ended: rounds until enough was followed.
    for round_of in range(12):
        hypothesis.seed(round_of)(Chain)
        settings = hypothesis.settings(
            max_examples=5 * EXAMPLES, stateful_step_count=6, database=None, deadline=None,
            suppress_health_check=list(HealthCheck), phases=[hypothesis.Phase.generate],
        )  # fmt: skip
        # It says that the same draws led elsewhere, as they do where a job has ended meanwhile, and ends the round. An
        # answer that is wrong raises another error.
        with contextlib.suppress(hypothesis.errors.FlakyStrategyDefinition):
            Chain.run(settings=settings)
        if round_of >= 3 and len(followed) >= ENOUGH_LINKS:
            break
    return followed
