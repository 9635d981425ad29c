"""The alert rules, from the file that Prometheus reads."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from deploy.site.reference.text import page, paragraph, plain

RULES = Path(__file__).resolve().parents[2] / "prometheus" / "alerts.yml"
_PAGE = re.compile(r"docs/(guides/\w+)\.md")


def alerts_page() -> str:
    """Return the page of all alerts with their remedies; alerts that page somebody come first."""
    rules = [rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]]
    intro = (
        "Severity `page`: consumers are affected or will be by the morning; `ticket` can wait. How the rules are "
        "loaded and tested: [on call](../guides/on_call.md#alerts)."
    )
    parts = [paragraph(intro)]
    for rule in sorted(rules, key=lambda rule: rule["labels"]["severity"] != "page"):
        expression = " ".join(rule["expr"].split())
        lasting = f", for {rule['for']}" if "for" in rule else ""
        told = re.sub(
            r"{{\s*\$(?:labels\.)?(\w+)[^}]*}}", lambda match: match[1].upper(), rule["annotations"]["summary"]
        )
        remedy = _PAGE.sub(r"[\1](../\1.md)", plain(rule["annotations"]["description"]))
        parts += [
            f"## {rule['alert']}",
            paragraph(f"{rule['labels']['severity']}: {plain(told)}. Fires where `{expression}`{lasting}."),
            paragraph(remedy),
        ]
    return page("Alerts", "`deploy/prometheus/alerts.yml`", *parts)
