"""Pages of the dashboard with 10,000 jobs: the service's response time, and a browser's first paint.

``python -m benchmarks.dashboard`` prints a JSON line for each page, with ``first_paint_ms`` if chromium and playwright
are installed. Nothing trains beside it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import httpx

from benchmarks.control_plane import first_job, many_jobs, publish, quantiles, timed
from benchmarks.support.harness import say
from benchmarks.support.serving import Service, serving

NUM_JOBS = 10_000
NUM_PAINTS = 5
PAGES = (
    "/",
    "/dashboard/jobs",
    "/dashboard/jobs?search=first",
    "/dashboard/jobs?search=nothing-of-this-name",
    "/dashboard/jobs?state=succeeded",
    "/dashboard/datasets/clicks",
    "/dashboard/collections/items",
)


def first_paints(service: Service) -> dict[str, float]:
    """Return the median time until each page's first content is painted, in ms; nothing without a browser."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return {}
    from playwright.sync_api import sync_playwright

    painted = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(service.url)
        page.get_by_label("API key").fill(service.key)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("navigation").wait_for()
        for path in PAGES:
            times = []
            for _ in range(NUM_PAINTS):
                page.goto(service.url + path)
                page.wait_for_timeout(300)
                times.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            painted[path] = sorted(times)[NUM_PAINTS // 2]
        browser.close()
    return painted


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as name:
        folder = Path(name)
        first_job(folder)
        many_jobs(folder / "home", NUM_JOBS)
        publish(folder / "home")
        with serving(folder / "home", "--role", "api") as service:
            http = httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {service.key}"}, timeout=60)
            painted = first_paints(service)
            for path in PAGES:
                taken = [timed(lambda path=path: http.get(path)) for _ in range(50)]  # type: ignore[misc]
                paint = {"first_paint_ms": round(painted[path])} if path in painted else {}
                say({"bench": "dashboard", "page": path, "jobs": NUM_JOBS, **quantiles(taken), **paint})


if __name__ == "__main__":
    main()
