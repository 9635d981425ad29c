"""The page of the commands of ``evenkeel``, made from the functions that implement them."""

from __future__ import annotations

import argparse
from typing import Any

from typer.main import get_command

from deploy.site.reference.text import bullets, page, paragraph, plain
from service.cli import main
from trainer.generalization import command as generalization
from trainer.launch import in_process
from trainer.search import command as search

PARSERS = {
    "evenkeel train": in_process.parser,
    "evenkeel search": search.parser,
    "evenkeel generalization": generalization.parser,
}
"""Argument parsers of the commands that another module implements."""


def commands_page() -> str:
    """Return the page of all commands, their arguments and options."""
    intro = (
        "Exit codes: 0 done, 1 failed, 2 usage, 3 held by the gate (`submit --wait`, `schedules backfill`). The "
        "service's address and key are `EVENKEEL_URL` and `EVENKEEL_API_KEY` ([settings](settings.md)). Each command "
        "explains itself with `--help`."
    )
    parts = [paragraph(intro)]
    for name, command in sorted(get_command(main.app).commands.items()):  # type: ignore[attr-defined]
        if not command.hidden:
            parts += _command(f"evenkeel {name}", command, "##")
    return page("Commands", "`service/cli`", *parts)


def _command(name: str, command: Any, level: str) -> list[str]:
    below = sorted(getattr(command, "commands", {}).items())
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join([name, *("COMMAND" for _ in below[:1]), *map(_metavar, arguments)])
    parts = [f"{level} {name}", f"```\n{usage}\n```", paragraph(plain(" ".join((command.help or "").split())))]
    if name in PARSERS:
        parts.append(bullets(_options_of(PARSERS[name]())))
    else:
        parts.append(bullets(line for parameter in command.params for line in _parameter(parameter)))
    for under, one in below:
        parts += _command(f"{name} {under}", one, level + "#")
    return parts


def _metavar(argument: Any) -> str:
    shown = (argument.metavar or argument.name.upper()).strip("[]")
    return shown if argument.required else f"[{shown}]"


def _parameter(parameter: Any) -> list[str]:
    if getattr(parameter, "hidden", False) or "--help" in parameter.opts:
        return []
    shown = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        if not parameter.help:
            return []
        shown = f"`{_metavar(parameter)}`"
    default = parameter.default
    has_default = default not in (None, False, (), [], "") and not callable(default) and not parameter.required
    said = [plain(parameter.help or ""), f"Default: `{default}`." if has_default else ""]
    return [": ".join(filter(None, [shown, " ".join(filter(None, said))]))]


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    lines = []
    for action in parser._actions:
        shown = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.dest.upper()}`"
        if "--help" not in action.option_strings:
            lines.append(f"{shown}: {plain((action.help or '').replace('%%', '%'))}")
    return lines
