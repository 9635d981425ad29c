"""The lines of benchmarks.stability as tables, put into a document between its two marks.

    python -m benchmarks.stability_tables LINES.jsonl ... --into docs/reports/gate.md [--source "date, machine"]

Files of any number of runs: a model family has the lines of the last file that has it.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN = "<!-- tables of benchmarks.stability -->"
END = "<!-- end of tables -->"
SHOWN_METRICS = (
    "cosine_mean", "cosine_low", "norm_change_p95", "unreplaced", "canary_drop[genre]",
)  # fmt: skip
HONEST = {
    "unseen": "refreshes with other seeds",
    "shifted": "refreshes on other nine tenths of the rows",
    "growing": "refreshes that bring a tenth of new items",
    "retrained": "retrained from scratch (to be held, unless a family is that stable)",
}

Line = dict[str, Any]


def tables(lines: Sequence[Line], source: str) -> str:
    """Return tables of honest refreshes, limits and faults, per model family."""
    models = list(dict.fromkeys(line["model"] for line in lines))
    parts = [f"({source})", "", "### Honest refreshes", "", *_honest(lines, models)]
    parts += ["", "### What is usual, and the limits that follow", "", *_limits(lines, models)]
    parts += ["", "### Faults", "", *_faults(lines, models)]
    return "\n".join(parts)


def _honest(lines: Sequence[Line], models: Sequence[str]) -> list[str]:
    """Return a list, as its lines would be too long for a table."""
    rows = []
    for case, words in HONEST.items():
        rows.append(f"- **{words}**")
        for model in models:
            line = next((one for one in lines if one["model"] == model and one["case"] == case), None)
            if line is None:
                rows.append(f"    - {model}: not run")
                continue
            low, high = line["cosine_mean"]
            why = ""
            if line["held"]:
                metrics = sorted({metric for failed in line["held_by"] for metric in failed})
                why = " by " + ", ".join(f"`{metric}`" for metric in metrics[:3])
                why += f" and {len(metrics) - 3} more" if len(metrics) > 3 else ""
            held = f"{line['held']} of {line['refreshes']} held{why}"
            rows.append(f"    - {model}: {held}; mean cosine {low:.3f} to {high:.3f}")
    return rows


def _limits(lines: Sequence[Line], models: Sequence[str]) -> list[str]:
    rows = ["| median ± spread (limit) | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
    found = {line["model"]: line["metrics"] for line in lines if line["case"] == "usual"}
    for metric in SHOWN_METRICS:
        cells = []
        for model in models:
            null = found[model].get(metric)
            limit = None if null is None else null["limit"]
            shown = "" if limit is None else f" ({limit:.4g})"
            cells.append("" if null is None else f"{null['median']:.4g} ± {null['spread']:.2g}{shown}")
        if any(cells):
            rows.append(f"| `{metric}` | " + " | ".join(cells) + " |")
    return rows


def _faults(lines: Sequence[Line], models: Sequence[str]) -> list[str]:
    """Return the list of faults, each with the smallest severity that was caught, by model family."""
    faults = [line for line in lines if line["case"] == "fault"]
    names = list(dict.fromkeys(line["fault"] for line in faults))
    rows = []
    for name in names:
        unit = next(line["unit"] for line in faults if line["fault"] == name)
        rows.append(f"- **{name} ({unit})**")
        for model in models:
            tried = [line for line in faults if line["fault"] == name and line["model"] == model]
            caught = [line for line in tried if line["caught_by"]]
            if not caught:
                worst = tried[-1]
                rows.append(f"    - {model}: **none** up to {_severity(worst)}")
                continue
            smallest = caught[0]
            starting = [line for line in tried if line["caught_by_starting_limits"]]
            without = f"; by starting limits {_severity(starting[0])}" if starting else "; by starting limits none"
            missed = [line for line in tried if not line["caught_by"]]
            let_through = f"; **let through** {', '.join(_severity(line) for line in missed)}" if missed else ""
            metrics = ", ".join(f"`{metric}`" for metric in smallest["caught_by"][:2])
            more = f" +{len(smallest['caught_by']) - 2}" if len(smallest["caught_by"]) > 2 else ""
            rows.append(f"    - {model}: {_severity(smallest)} by {metrics}{more}{let_through}{without}")
    return rows


def _severity(line: Line) -> str:
    value = float(line["severity"])
    if line["unit"] == "axes":
        return f"{value:.0f}"
    return f"{value:g} x" if line["unit"] == "times" else f"{100 * value:.3g} %"


def put_into(document: Path, text: str) -> None:
    """Put ``text`` between the document's marks."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{document} lacks the marks '{BEGIN}' and '{END}': put them where the tables belong")
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, required=True, metavar="FILE")
    parser.add_argument("--source", default=f"{datetime.date.today()}, `python -m benchmarks.stability`")
    options = parser.parse_args(arguments)
    families: dict[str, list[Line]] = {}
    for file in options.lines:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        models = dict.fromkeys(line["model"] for line in lines)
        families |= {model: [line for line in lines if line["model"] == model] for model in models}
    put_into(options.into, tables([line for lines in families.values() for line in lines], options.source))


if __name__ == "__main__":
    main()
