"""The alert rules: every expression is PromQL, and every series it asks for is one that the service shows."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import typer
import yaml

from service.cli import main as cli_main
from service.core.settings import Settings
from tests.service.ops.promql import Series, unfounded
from tests.service.service_kit import client_of, running

pytestmark = pytest.mark.anyio

DIRECTORY = Path(__file__).resolve().parents[3] / "deploy" / "prometheus"


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DIRECTORY / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.process
@pytest.mark.parametrize(
    "check",
    [
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
        ("check", "config", "--syntax-only", "compose.yml"),
    ],
)
def test_prometheus_itself_takes_the_rules_and_they_fire_when_they_should(check: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on this machine")
    done = subprocess.run([promtool, *check], cwd=DIRECTORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_every_series_that_is_asked_for_is_shown(shown: Series) -> None:
    asked = [rule["expr"] for rule in rules()]
    assert len(asked) >= 15
    assert {expression: missing for expression in asked if (missing := unfounded(expression, shown))} == {}


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    assert "NoPublication" in names
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]
        assert len(rule["annotations"]["description"]) > 30, rule["alert"]


def test_commands_that_alerts_name_are_there() -> None:
    there = {" ".join(words) for words in _commands(typer.main.get_command(cli_main.app))}
    named = set()
    for rule in rules():
        said = rule["annotations"]["description"]
        for found in re.findall(r"evenkeel ((?:schedules |webhooks |sinks )?[a-z]+)", said):
            assert found in there, f"{rule['alert']}: evenkeel {found}"
            named.add(found)
    assert {"retry", "delete", "schedules firings", "webhooks deliveries"} <= named


def _commands(command: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, inner in command.commands.items():
        yield from _commands(inner, (*before, name)) if hasattr(inner, "commands") else [(*before, name)]


def test_a_silent_run_is_told_of_before_it_is_given_up() -> None:
    (rule,) = (rule for rule in rules() if rule["alert"] == "RunSilent")
    limit = promql_parser.parse(rule["expr"]).rhs.val
    assert limit + 60 * int(rule["for"].removesuffix("m")) < Settings().silence_seconds


async def test_what_is_counted_is_shown_before_it_happens(settings: Settings) -> None:
    """Prometheus sees no increase in a series that begins with a 1."""
    settings = dataclasses.replace(settings, role="all")
    async with running(settings) as app, client_of(app, settings.admin_key_file.read_text().strip()) as client:
        text = (await client.get("/metrics")).text
    for outcome in ("delivered", "failed", "given_up"):
        assert f'evenkeel_webhook_deliveries_total{{outcome="{outcome}"}} 0.0' in text
    for task in ("runner", "scheduler", "webhooks", "retention", "executor"):
        assert f'evenkeel_background_errors_total{{task="{task}"}}' in text


def test_a_day_and_two_hours_without_a_publication() -> None:
    (rule,) = (rule for rule in rules() if rule["alert"] == "NoPublication")
    assert rule["expr"] == "evenkeel_collection_age_seconds > 26 * 3600"


def test_the_scrape_reads_these_rules() -> None:
    config = yaml.safe_load((DIRECTORY / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    assert yaml.safe_load((DIRECTORY / "alerts_test.yml").read_text())["rule_files"] == ["alerts.yml"]
