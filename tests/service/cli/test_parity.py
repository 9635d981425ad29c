"""Every operation has a command, or a reason for having none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from service.app import create_app
from service.cli.main import app as cli
from service.core.settings import Settings
from tests.service.api.walkthrough import documented

COLLECTION = "/v1/collections/{collection}"
COMMANDS = {
    "POST /v1/jobs": "submit",
    "GET /v1/jobs": "jobs",
    "GET /v1/jobs/{job_id}": "job",
    "POST /v1/jobs/{job_id}/cancel": "cancel",
    "POST /v1/jobs/{job_id}/retry": "retry",
    "DELETE /v1/jobs/{job_id}": "delete",
    "GET /v1/jobs/{job_id}/logs": "logs",
    "GET /v1/jobs/{job_id}/events": "logs",
    "POST /v1/datasets": "datasets add",
    "GET /v1/datasets": "datasets list",
    "POST /v1/datasets/infer": "datasets infer",
    "GET /v1/datasets/{name}/profile": "datasets profile",
    "PUT /v1/datasets/{name}": "datasets update",
    "DELETE /v1/datasets/{name}": "datasets delete",
    "POST /v1/schedules": "schedules add",
    "GET /v1/schedules": "schedules list",
    "GET /v1/schedules/{name}": "schedules show",
    "PATCH /v1/schedules/{name}": "schedules pause",
    "DELETE /v1/schedules/{name}": "schedules delete",
    "POST /v1/schedules/{name}/trigger": "schedules trigger",
    "GET /v1/schedules/{name}/firings": "schedules firings",
    "GET /v1/collections": "collections",
    f"POST {COLLECTION}/neighbors": "neighbors",
    f"GET {COLLECTION}/versions": "versions",
    f"POST {COLLECTION}/versions/{{version}}/promote": "promote",
    f"POST {COLLECTION}/vectors": "fetch",
    "POST /v1/views/{name}/vectors": "fetch",
    f"POST {COLLECTION}/recommend": "recommend",
    f"GET {COLLECTION}/versions/{{version}}/tower": "tower",
    f"POST {COLLECTION}/canaries": "canaries add",
    f"GET {COLLECTION}/canaries": "canaries list",
    f"DELETE {COLLECTION}/canaries/{{name}}": "canaries delete",
    f"POST {COLLECTION}/erase": "erase",
    f"POST {COLLECTION}/readmit": "readmit",
    "POST /v1/views": "advise",
    "POST /v1/keys": "keys create",
    "GET /v1/keys": "keys list",
    "POST /v1/keys/{key_id}/rotate": "keys rotate",
    "DELETE /v1/keys/{key_id}": "keys revoke",
    "GET /v1/tenants": "keys tenants",
    "GET /v1/audit": "keys audit",
    "POST /v1/webhooks": "webhooks create",
    "GET /v1/webhooks": "webhooks list",
    "PATCH /v1/webhooks/{webhook_id}": "webhooks pause",
    "DELETE /v1/webhooks/{webhook_id}": "webhooks delete",
    "POST /v1/webhooks/{webhook_id}/ping": "webhooks ping",
    "GET /v1/webhooks/{webhook_id}/deliveries": "webhooks deliveries",
    "POST /v1/webhooks/{webhook_id}/deliveries/{delivery_id}/retry": "webhooks retry",
    "GET /readyz": "doctor",
}
NONE = {
    "GET /healthz": "for load balancers",
    "GET /metrics": "for Prometheus",
    "POST /session": "for browsers",
    "DELETE /session": "for browsers",
    "GET /v1/datasets/{name}": "`datasets list --json` has every field",
    "GET /v1/jobs/{job_id}/report": "a page to be read in a browser; `job` has its figures",
    "GET /v1/webhooks/{webhook_id}": "`webhooks list --json` has every field",
    f"GET {COLLECTION}": "`versions COLLECTION` shows it",
    f"GET {COLLECTION}/versions/{{version}}": "`versions --json` has every manifest",
    f"GET {COLLECTION}/versions/{{version}}/snapshot": "a file for programs: the client writes it",
    f"GET {COLLECTION}/erasures": "a record for programs",
    "GET /v1/views": "`versions --json` names the views of a version",
    "GET /v1/views/{name}": "`advise` measures it",
    "DELETE /v1/views/{name}": "for programs: the client deletes",
    "GET /v1/views/{name}/layer": "a file for programs: the client writes it",
}


def commands(command: Any, prefix: str = "") -> Iterator[str]:
    for name, inner in command.commands.items():
        if hasattr(inner, "commands"):
            yield from commands(inner, f"{prefix}{name} ")
        else:
            yield prefix + name


def test_every_operation_has_a_command_or_a_reason(tmp_path: Path) -> None:
    there = set(commands(typer.main.get_command(cli)))
    app = create_app(Settings(home=tmp_path / "home"))
    operations = {f"{method} {path}" for method, path, _ in documented(app)}
    assert operations - COMMANDS.keys() - NONE.keys() == set(), "give it a command, or a reason"
    assert (COMMANDS.keys() | NONE.keys()) - operations == set(), "there is no such operation any more"
    assert not COMMANDS.keys() & NONE.keys()
    assert set(COMMANDS.values()) <= there
