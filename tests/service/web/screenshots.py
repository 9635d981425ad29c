"""Take pictures of every page, phone and wide, light and dark: ``python -m tests.service.web.screenshots [FOLDER]``.

They are of a service of its own with what tests/service/web/seeded.py fills it with, and go to build/screenshots unless
another folder is named. They are not committed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.service import serving
from tests.service.web import seeded

WIDTHS = {"phone": 390, "wide": 1280}


def pages_of(ids: dict[str, str]) -> dict[str, str]:
    """The address of each page by what its picture is called."""
    return {
        "home": "/",
        "jobs": "/dashboard/jobs",
        "job": f"/dashboard/jobs/{ids['adam-ar']}",
        "starved-job": f"/dashboard/jobs/{ids['nightly']}",
        "held-job": f"/dashboard/jobs/{ids['drifted']}",
        "compare": f"/dashboard/compare?job={ids['adam']}&job={ids['adam-ar']}&job={ids['nightly']}",
        "submit": f"/dashboard/submit?from={ids['adam']}",
        "collections": "/dashboard/collections",
        "collection": f"/dashboard/collections/{seeded.COLLECTION}",
        "schedules": "/dashboard/schedules",
        "schedule": "/dashboard/schedules/every-night",
        "datasets": "/dashboard/datasets",
        "dataset": "/dashboard/datasets/clicks",
        "access": "/dashboard/access",
        "problem": "/dashboard/jobs/job_0",
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with (
        tempfile.TemporaryDirectory() as home,
        serving.serving(Path(home), log=Path(home, "log")) as served,
        sync_playwright() as playwright,
    ):
        ids = seeded.fill(served)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context()
        page = context.new_page()
        page.goto(served.url)
        page.get_by_label("API key").fill(served.key)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("navigation").wait_for()
        for name, address in pages_of(ids).items():
            for size, width in WIDTHS.items():
                page.set_viewport_size({"width": width, "height": 900})
                page.goto(served.url + address)
                page.locator("[aria-busy]").wait_for(state="detached")
                page.wait_for_load_state("networkidle")
                for scheme in ("light", "dark"):
                    page.emulate_media(color_scheme=scheme)
                    page.screenshot(path=folder / f"{name}-{size}-{scheme}.png", full_page=True)
        browser.close()
    print(f"{len(list(folder.glob('*.png')))} pictures in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build/screenshots"))
