"""Examples in the OpenAPI document: requests and responses recorded from the service.

``examples.json`` is written by ``EVENKEEL_WRITE_EXAMPLES=1 pytest tests/service/api/test_api_walkthrough.py``. Without
the variable, that test checks that the file and the real responses have the same shape: ``{"POST /v1/jobs": {"body":
..., "answers": {"202": ...}}}``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from service.core.errors import MEDIA_TYPE, example_of

FILE = Path(__file__).with_name("examples.json")
JSON = "application/json"


def add_to(document: dict[str, Any]) -> None:
    """Add an example to every JSON request body and every JSON response."""
    recorded = json.loads(FILE.read_text("utf-8"))
    for path, item in document["paths"].items():
        for method, operation in item.items():
            example = recorded.get(f"{method.upper()} {path}", {})
            content = operation.get("requestBody", {}).get("content", {})
            if JSON in content and "body" in example:
                content[JSON]["example"] = example["body"]
            for status, answer in operation["responses"].items():
                content = answer.get("content", {})
                if JSON in content and status in example.get("answers", {}):
                    content[JSON]["example"] = example["answers"][status]
                if MEDIA_TYPE in content:
                    content[MEDIA_TYPE] = {**content[MEDIA_TYPE], "example": example_of(int(status))}
