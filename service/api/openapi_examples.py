"""Examples in the OpenAPI document: requests and their answers as the service gave them.

``examples.json`` is written by ``EVENKEEL_WRITE_EXAMPLES=1 pytest tests/service/api/test_api_walkthrough.py``, which
otherwise holds the two equal in shape: ``{"POST /v1/jobs": {"body": ..., "answers": {"202": ...}}}``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from service.core.errors import MEDIA_TYPE, example_of

FILE = Path(__file__).with_name("examples.json")
JSON = "application/json"


def add_to(document: dict[str, Any]) -> None:
    """Puts an example beside every body and every answer that is JSON."""
    recorded = json.loads(FILE.read_text("utf-8"))
    for path, item in document["paths"].items():
        for method, operation in item.items():
            found = recorded.get(f"{method.upper()} {path}", {})
            content = operation.get("requestBody", {}).get("content", {})
            if JSON in content and "body" in found:
                content[JSON]["example"] = found["body"]
            for status, answer in operation["responses"].items():
                content = answer.get("content", {})
                if JSON in content and status in found.get("answers", {}):
                    content[JSON]["example"] = found["answers"][status]
                if MEDIA_TYPE in content:
                    content[MEDIA_TYPE] = {**content[MEDIA_TYPE], "example": example_of(int(status))}
