"""Grafana's files: each query asks for what the service shows, and the dashboard is one that Grafana takes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.service.ops.promql import Series, grouped_by, unfounded

pytestmark = pytest.mark.anyio

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
PROVISIONING = DEPLOY / "grafana" / "provisioning"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "evenkeel.json").read_text("utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
GRAFANA_OWN = {"$__rate_interval": "5m", "$collection": ".*", "$job": ".*", "$metric": ".*"}
NUM_COLUMNS = 24


def queries() -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """Each panel, its target and the expression, variables replaced as Grafana does."""
    for panel in PANELS:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in GRAFANA_OWN.items():
                expression = expression.replace(name, value)
            yield panel, target, expression


async def test_every_series_that_a_panel_asks_for_is_shown(shown: Series) -> None:
    missing = {panel["title"]: lacks for panel, _, asked in queries() if (lacks := unfounded(asked, shown))}
    assert missing == {}
    assert len(list(queries())) >= 30


async def test_every_series_of_the_service_has_a_place_on_the_dashboard(shown: Series) -> None:
    """A series that nobody sees is one that nobody keeps: the few that are left out are named here."""
    everything = " ".join(expression for _, _, expression in queries())
    ours = {re.sub("_(bucket|count|sum|created)$", "", name) for name in shown if name.startswith("evenkeel_")}
    assert {name for name in ours if name not in everything} == {"evenkeel_run_epoch"}


async def test_labels_of_groups_and_legends_are_labels_of_the_series(shown: Series) -> None:
    for panel, target, expression in queries():
        named = re.findall(r"evenkeel_\w+", expression)
        there = {label for name in named for labels in shown[name] for label in labels}
        legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert grouped_by(expression) <= there, panel["title"]
        assert legend <= grouped_by(expression), panel["title"]


async def test_variables_take_their_values_from_labels_that_are_there(shown: Series) -> None:
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert {f"${name}" for name in variables} - {"$datasource"} == set(GRAFANA_OWN) - {"$__rate_interval"}
    for name, variable in variables.items():
        if name == "datasource":
            continue
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
        assert found is not None, name
        assert any(found[2] in labels for labels in shown[found[1]]), name


def test_the_dashboard_is_one_that_can_be_provisioned() -> None:
    assert DASHBOARD["id"] is None, "the database gives it"
    assert re.fullmatch(r"[a-zA-Z0-9_-]{8,40}", DASHBOARD["uid"])
    assert isinstance(DASHBOARD["schemaVersion"], int)
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        if panel["type"] in ("row", "alertlist"):
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0, panel["title"]
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"]), panel["title"]


def test_panels_do_not_overlap_and_fit_the_grid() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["w"] > 0, panel["title"]
        assert place["h"] > 0, panel["title"]
        assert 0 <= place["x"] <= NUM_COLUMNS - place["w"], panel["title"]
        cells = itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
        for cell in cells:
            assert cell not in taken, f"{panel['title']} lies on {taken.get(cell)}"
            taken[cell] = panel["title"]


def test_what_is_provisioned_fits_together() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "evenkeel.yml").read_text())["providers"]
    (picked,) = (one for one in DASHBOARD["templating"]["list"] if one["name"] == "datasource")
    (alerts,) = (panel for panel in PANELS if panel["type"] == "alertlist")
    assert (picked["query"], picked["current"]["value"]) == (source["type"], source["uid"])
    assert alerts["options"]["datasource"] == source["name"]
    assert source["jsonData"]["manageAlerts"] is True
    assert provider["type"] == "file"
