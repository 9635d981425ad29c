"""Settings from the environment: numbers, their bounds and their types."""

from __future__ import annotations

import dataclasses

import pytest

from service.core.settings import LEAST, RetentionDays, Settings

KEPT = dataclasses.fields(RetentionDays)


def test_numbers_come_from_the_environment_whole_where_they_count_things() -> None:
    settings = Settings.from_environment({f"EVENKEEL_{name.upper()}": " 2.5 " for name in LEAST})
    numbers = {name: getattr(settings, name) for name in LEAST}
    whole = {"disk_warn_bytes", "disk_reserve_bytes", "max_runs", "tenant_max_jobs", "host_memory_bytes"}
    assert numbers == {name: 2 if name in whole else 2.5 for name in LEAST}
    assert {name for name, value in numbers.items() if isinstance(value, int)} == whole


@pytest.mark.parametrize("given", ["", "  "])
def test_an_empty_variable_means_the_default(given: str) -> None:
    environment = {f"EVENKEEL_{name.upper()}": given for name in (*LEAST, "home", "keep_logs_days")}
    assert Settings.from_environment(environment) == Settings.from_environment({})


def test_days_that_are_not_named_stay() -> None:
    settings = Settings.from_environment({"EVENKEEL_KEEP_LOGS_DAYS": "7"})
    assert settings.retention == RetentionDays(logs=7)


@pytest.mark.parametrize(
    ("name", "given", "least"),
    [
        ("EVENKEEL_MAX_RUNS", "0", 1),
        ("EVENKEEL_HOST_CORES", "-1", 0),
        ("EVENKEEL_SILENCE_SECONDS", "nan", 1),
        ("EVENKEEL_RETRY_BACKOFF_SECONDS", "-1", 0),
        ("EVENKEEL_DISK_WARN_BYTES", "inf", 0),
        ("EVENKEEL_KEEP_JOBS_DAYS", "a year", "0 and at most 36500"),
        *((f"EVENKEEL_KEEP_{field.name.upper()}_DAYS", "36501", "0 and at most 36500") for field in KEPT),
    ],
)
def test_what_is_no_such_number_is_refused_with_the_remedy(name: str, given: str, least: int | str) -> None:
    says = f"{name} is '{given}': set it to a number of at least {least}, or leave it out"
    with pytest.raises(ValueError, match=says):
        Settings.from_environment({name: given})


def test_servers_of_trackers_are_listed() -> None:
    found = Settings.from_environment({"EVENKEEL_TRACKING_URIS": "http://mlflow:5000/, https://other"}).tracking_uris
    assert found == ("http://mlflow:5000", "https://other")
