"""The pages of the dashboard: one enters here, and its routes and its place in the navigation follow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from fastapi import FastAPI

from service.identity.keys import Principal
from service.web import dashboard

Gather = Callable[[FastAPI, Principal], Awaitable[dict[str, Any]]]
"""From the app and who asks to what a template shows."""


class Page(NamedTuple):
    """A page of the dashboard.

    Attributes:
        address: ``/``, or below ``/dashboard/``, where a session is recognized.
        title: Its name in the navigation and in the browser's title.
        template: What is in the frame, of ``templates/``.
        gather: What the template shows; ``page``, ``pages`` and ``principal`` are the frame's names.
    """

    address: str
    title: str
    template: str
    gather: Gather

    @property
    def source(self) -> str:
        """The address of what is in the frame, which the page's script asks again and again."""
        return f"/dashboard{self.address.removeprefix('/dashboard').rstrip('/')}/content"


PAGES: tuple[Page, ...] = (Page("/", "Overview", "content.html", dashboard.gather),)
