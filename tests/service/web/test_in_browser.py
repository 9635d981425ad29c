"""The dashboard in a real browser: each page in both themes, each thing that it can change, and nothing in the console.

One service and one browser for all of them; what a test changes, none after it relies on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.service.serving import Served
from tests.service.web import axe, seeded
from tests.service.web.accessibility import FAULTS
from tests.service.web.screenshots import pages_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync",
    "--disable-component-update",
]  # fmt: skip
PATIENCE_MS = 60_000
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ids(served: Served) -> dict[str, str]:
    """Ids of jobs by name."""
    return seeded.fill(served)


@pytest.fixture(scope="module")
def signed_in(served: Served, ids: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A page of a browser with a session, and what its console complained of (``page.complaints``)."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), executable_path=CHROMIUM, headless=True, args=FLAGS,
            viewport={"width": 1280, "height": 900},
        )  # fmt: skip
        page = context.pages[0]
        page.set_default_timeout(PATIENCE_MS)
        page.complaints = []
        page.on("console", lambda said: page.complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.goto(served.url)
        assert page.evaluate(FAULTS) == []
        page.get_by_label("API key").fill("ek_wrong_key")
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("alert").get_by_text("unknown, revoked or expired").wait_for()
        assert any("401" in complaint for complaint in page.complaints)
        page.complaints.clear()
        page.get_by_label("API key").fill(served.key)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("heading", name="Running and waiting").wait_for()
        yield page
        context.close()


@pytest.fixture
def page(signed_in: Any) -> Iterator[Any]:
    signed_in.complaints.clear()
    signed_in.set_viewport_size({"width": 1280, "height": 900})
    yield signed_in
    assert signed_in.complaints == []


@pytest.fixture
def api(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {served.key}"}, timeout=60) as client:
        yield client


def show(page: Any, served: Served, address: str) -> None:
    page.goto(served.url + address)
    page.locator("[aria-busy]").wait_for(state="detached")


def confirm(page: Any, button: str, **fields: str) -> None:
    """Presses a button, fills the dialog that it opens by labels, and confirms."""
    page.get_by_role("button", name=button, exact=True).first.click()
    dialog = page.get_by_role("dialog")
    for label, value in fields.items():
        dialog.get_by_label(label.replace("_", " ")).fill(value)
    dialog.get_by_role("button", name=button, exact=True).click()


def test_every_page_in_both_themes_on_a_phone_and_wide(page: Any, served: Served, ids: dict[str, str]):
    for name, address in pages_of(ids).items():
        show(page, served, address)
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 900})
            for theme in ("light", "dark"):
                page.emulate_media(color_scheme=theme)
                assert page.evaluate(FAULTS) == [], (name, width, theme)
        if name == "problem":
            assert page.complaints == ["Failed to load resource: the server responded with a status of 404 (Not Found)"]
            page.complaints.clear()
        assert page.complaints == [], name
    assert not page.evaluate("document.cookie")


def test_axe_finds_no_violation_on_any_page_in_either_theme(page: Any, served: Served, ids: dict[str, str]):
    found = {}
    for name, address in pages_of(ids).items():
        show(page, served, address)
        found[name] = axe.violations(page)
    cookies = page.context.cookies()
    page.context.clear_cookies()
    page.goto(served.url)
    page.get_by_label("API key").wait_for()
    found["login"] = axe.violations(page)
    page.context.add_cookies(cookies)
    assert {name: faults for name, faults in found.items() if faults} == {}
    put = """() => {
      const part = document.createElement("div");
      part.innerHTML = "<button></button><p>pale</p>";
      document.getElementById("content").append(part);
      Object.assign(part.lastElementChild.style, {color: "#777777", background: "#888888"});
    }"""
    show(page, served, "/dashboard/schedules")
    page.evaluate(put)
    rules = {(theme, fault.partition(":")[0]) for theme, fault in axe.violations(page)}
    assert rules == {("light", "button-name"), ("light", "color-contrast"), ("dark", "color-contrast")}
    page.complaints.clear()  # the browser notes the 404 of a page without its job, and a 401 of one without a session


def test_the_check_of_pages_finds_what_is_wrong(page: Any, served: Served):
    """Each fault put into a page on purpose."""
    show(page, served, "/dashboard/schedules")
    page.set_viewport_size({"width": 390, "height": 900})
    page.emulate_media(color_scheme="light")
    put = f"""([html, css]) => {{
      const part = document.createElement("div");
      part.innerHTML = html;
      document.getElementById("content").append(part);
      Object.assign(part.firstElementChild.style, css);
      const faults = ({FAULTS.strip()})();
      part.remove();
      return faults;
    }}"""
    for fault, html, style in (
        ("contrast", "<p>pale</p>", {"color": "#999999"}),
        ("no label", "<input>", {}),
        ("no name", "<button></button>", {}),
        ("skips a level", "<h4>deep</h4>", {}),
        ("not one h1", "<h1>again</h1>", {}),
        ("no scope", "<table><tr><th>x</th></tr></table>", {}),
        ("an empty heading", '<table><tr><th scope="col"></th></tr></table>', {}),
        ("two elements of id", '<p id="content"></p>', {}),
        ("which is not there", '<p aria-describedby="nobody"></p>', {}),
        ("px wide", "<p>wide</p>", {"width": "900px"}),
    ):
        found = page.evaluate(put, [html, style])
        assert any(fault in one for one in found), (fault, found)
    assert page.evaluate(FAULTS) == []


def test_what_changes_is_shown_without_a_reload(page: Any, served: Served, ids: dict[str, str]):
    """What a visitor opened, chose and typed stays."""
    show(page, served, "/dashboard/jobs")
    page.get_by_text("Figures", exact=True).click()
    page.get_by_label(f"Compare adam {ids['adam']}").check()
    page.get_by_label("Name or id").fill("half a na")
    served.set_job(ids["waiting"], reason="4 cores are free now")
    page.get_by_text("4 cores are free now").wait_for()
    assert page.get_by_role("columnheader", name="4", exact=True).is_visible()
    assert page.get_by_label(f"Compare adam {ids['adam']}").is_checked()
    assert page.get_by_label("Name or id").input_value() == "half a na"
    assert page.evaluate("document.activeElement.id") == "f-search"


def test_the_table_of_jobs_is_sorted_and_shared_by_its_address(page: Any, served: Served, ids: dict[str, str]):
    def names() -> list[str]:
        return list(page.locator("table.jobs a.name").all_inner_texts())

    show(page, served, "/dashboard/jobs?search=a")
    assert names()[-2:] == ["adam-ar", "adam"]
    page.get_by_role("link", name="AUC, test").click()
    page.get_by_role("columnheader", name="AUC, test").and_(page.locator("[aria-sort=descending]")).wait_for()
    assert names()[:2] == ["adam-ar", "adam"]
    page.get_by_text("Columns: 2 of 2 fields that differ").click()
    page.get_by_label("optimizer.decay").uncheck()
    page.get_by_label("optimizer.kind").check()
    served.set_job(ids["waiting"], reason="3 cores are free now")
    page.get_by_text("3 cores are free now").wait_for()
    assert not page.get_by_label("optimizer.decay").is_checked()  # a choice stays while the page is refreshed
    page.get_by_role("button", name="Show these columns").click()
    page.get_by_text("Columns: 1 of 2 fields that differ").wait_for()
    assert page.url.endswith("?search=a&sort=-test&parameter=optimizer.kind")
    assert page.get_by_role("columnheader", name="optimizer.decay").count() == 0
    page.get_by_label("Metric").select_option("logloss")
    page.get_by_label("Sort by").select_option("validation")
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_role("heading", name="log loss per epoch, of the jobs above").wait_for()
    assert page.get_by_role("columnheader", name="log loss, validation").get_attribute("aria-sort") == "ascending"
    assert page.get_by_role("columnheader", name="optimizer.kind").is_visible()
    assert page.evaluate(FAULTS) == []


def test_a_job_says_that_it_is_starved_and_what_it_uses(page: Any, served: Served, ids: dict[str, str]):
    show(page, served, f"/dashboard/jobs/{ids['nightly']}")
    assert page.get_by_text("starved: the threads of a rank got 45% of the processor time").is_visible()
    for title in ("Resident memory of all ranks", "Processors that all ranks ran on", "Share of the wanted processor"):
        assert page.get_by_role("img", name=title).is_visible(), title


def test_jobs_are_filtered_and_compared(page: Any, served: Served, ids: dict[str, str]):
    show(page, served, "/dashboard/jobs")
    page.get_by_role("link", name="team=ranking").first.click()
    assert page.get_by_label("Label").input_value() == "team=ranking"
    boxes = page.get_by_role("checkbox")
    assert boxes.count() == 2
    for number in range(2):
        boxes.nth(number).check()
    page.get_by_role("button", name="Compare selected jobs").click()
    page.get_by_role("heading", name="Where the specs differ").wait_for()
    assert page.get_by_role("row", name="optimizer.kind adam_ar adam").is_visible()
    page.get_by_label("Metric").select_option("logloss")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("heading", name="log loss per epoch").wait_for()
    assert page.locator("polyline").count() == 4


def test_a_job_is_cancelled_retried_and_cloned(page: Any, served: Served, api: httpx.Client, ids: dict[str, str]):
    job = api.post("/v1/jobs", json=seeded.job_spec("by-hand", labels={"team": "ads"})).json()["id"]
    show(page, served, f"/dashboard/jobs/{job}")
    page.get_by_role("button", name="Cancel").click()
    page.keyboard.press("Escape")
    assert page.get_by_role("button", name="Cancel").evaluate("one => one === document.activeElement")
    assert api.get(f"/v1/jobs/{job}").json()["state"] == "queued"
    confirm(page, "Cancel")
    page.get_by_text("by-hand is being cancelled").wait_for()
    confirm(page, "Retry")
    page.get_by_text("by-hand is queued again").wait_for()
    assert api.get(f"/v1/jobs/{job}").json()["state"] == "queued"
    page.get_by_role("link", name="Clone").click()
    page.get_by_text("Valid. Predicted").wait_for()
    spec = json.loads(page.get_by_label("Spec, as JSON").input_value())
    assert spec["labels"] == {"team": "ads"}
    assert "seed" not in spec
    page.get_by_label("seed", exact=True).fill("0")
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("heading", name="by-hand queued").wait_for()
    cloned = page.url.rpartition("/")[2]
    assert cloned != job
    assert api.get(f"/v1/jobs/{cloned}").json()["spec"] == api.get(f"/v1/jobs/{job}").json()["spec"]


def test_a_spec_is_validated_while_it_is_typed(page: Any, served: Served):
    show(page, served, "/dashboard/submit")
    editor = page.get_by_label("Spec, as JSON")
    editor.fill("{")
    page.get_by_text("Not JSON yet").wait_for()
    editor.fill('{"name": "x", "dataset": {"name": "clicks"}, "model": {"kind": "dnn"}, "epochs": 0}')
    page.get_by_text("epochs").and_(page.locator("#verdict code")).wait_for()
    assert editor.get_attribute("aria-invalid") == "true"
    epochs = page.get_by_label("epochs", exact=True)
    assert (epochs.input_value(), epochs.get_attribute("aria-invalid")) == ("0", "true")
    assert page.evaluate(FAULTS) == []
    page.complaints.clear()  # the browser notes each 422 of a dry run


def test_a_spec_is_written_as_yaml(page: Any, served: Served, api: httpx.Client):
    """It fills the form, and a change of a field makes JSON of it."""
    show(page, served, "/dashboard/submit")
    editor = page.get_by_label("Spec, as JSON")
    editor.fill("name: by-yaml\nmodel: {kind: dnn\n")
    page.get_by_text("is not YAML in line 3, column 1: expected ',' or '}', but got '<stream end>'").wait_for()
    assert editor.get_attribute("aria-invalid") == "true"
    page.complaints.clear()  # the browser notes the 422
    editor.fill("# a comment\nname: by-yaml\ndataset: {name: clicks}\nmodel:\n  kind: dnn\nepochs: 3\n")
    page.get_by_text("Valid. Predicted").wait_for()
    epochs = page.get_by_label("epochs", exact=True)
    assert epochs.input_value() == "3"
    assert editor.input_value().startswith("# a comment")
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("heading", name="by-yaml queued").wait_for()
    assert api.get(f"/v1/jobs/{page.url.rpartition('/')[2]}").json()["spec"]["epochs"] == 3
    show(page, served, "/dashboard/submit")
    editor.fill("name: at-once\ndataset: {name: clicks}\nmodel: {kind: dnn}\n")
    epochs.fill("5")  # before the text is read
    page.get_by_text("Valid. Predicted").wait_for()
    spec = json.loads(editor.input_value())
    assert (spec["name"], spec["epochs"], epochs.input_value()) == ("at-once", 5, "5")


def test_the_form_of_the_schema_writes_the_spec(page: Any, served: Served, api: httpx.Client):
    def field(name: str) -> Any:
        return page.get_by_label(name, exact=True)

    show(page, served, "/dashboard/submit")
    field("name required").fill("by-form")
    field("dataset.name required").select_option("clicks")
    field("model.kind required").select_option("bpr")
    field("model.embedding_dim").fill("8")
    field("model.kind required").select_option("two_tower")  # what both have stays
    field("model.hidden").fill("32, 16")
    field("model.normalize").select_option("true")
    page.get_by_text("optimizer adam_ar").click()
    field("optimizer.alpha").fill("1e-5")
    page.get_by_text("optimizer adam_ar").click()
    field("epochs").fill("2")
    page.get_by_text("sse default").click()
    field("Add to sse").fill("item")
    field("Add to sse").press("Tab")
    field("sse.item.probability").fill("0.1")
    field("labels JSON").fill('{"team": ')
    assert field("labels JSON").get_attribute("aria-invalid") == "true"
    field("labels JSON").fill('{"team": "ads"}')
    page.get_by_label("Add publish").click()
    collection = field("publish.collection required")
    page.get_by_text("publish.collection").and_(page.locator("#verdict code")).wait_for()
    assert collection.get_attribute("aria-invalid") == "true"
    assert page.locator(f"#{collection.get_attribute('aria-describedby')}").inner_text()
    page.complaints.clear()  # the browser notes each 422 of a dry run
    collection.fill("by_form")
    field("publish.feature required").fill("item")
    page.get_by_text("Valid. Predicted").wait_for()
    assert page.locator("#fields [aria-invalid]").count() == 0
    assert page.evaluate(FAULTS) == []
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("heading", name="by-form queued").wait_for()
    spec = api.get(f"/v1/jobs/{page.url.rpartition('/')[2]}").json()["spec"]
    assert (spec["epochs"], spec["optimizer"]["alpha"], spec["labels"]) == (2, 1e-5, {"team": "ads"})
    model = spec["model"]
    assert (model["kind"], model["embedding_dim"], model["hidden"], model["normalize"]) == (
        "two_tower",
        8,
        [32, 16],
        True,
    )
    assert spec["sse"]["item"]["probability"] == 0.1
    assert (spec["publish"]["collection"], spec["publish"]["feature"]) == ("by_form", "item")


def test_a_form_takes_things_away_again_and_follows_the_text(page: Any, served: Served, ids: dict[str, str]):
    show(page, served, f"/dashboard/submit?from={ids['adam']}")
    editor = page.get_by_label("Spec, as JSON")
    page.get_by_text("publish collection, feature").click()
    page.get_by_role("button", name="Remove publish").click()
    assert "publish" not in json.loads(editor.input_value())
    page.get_by_label("epochs", exact=True).fill("")
    assert "epochs" not in json.loads(editor.input_value())
    editor.fill(json.dumps(json.loads(editor.input_value()) | {"batch_size": 77}))
    assert page.get_by_label("batch_size", exact=True).input_value() == "77"
    editor.fill("[]")
    page.get_by_text("A spec is one mapping of fields, that of the job").wait_for()
    editor.fill('{"dataset": "clicks", "model": {"kind": "dnn"}}')
    page.get_by_label("dataset.name required", exact=True).select_option("clicks")
    assert json.loads(editor.input_value())["dataset"] == {"name": "clicks"}
    page.locator("#verdict code").first.wait_for()
    page.complaints.clear()  # the browser notes its 422


def test_a_dialog_says_why_it_was_refused(page: Any, served: Served, api: httpx.Client):
    job = api.post("/v1/jobs", json=seeded.job_spec("overtaken")).json()["id"]
    show(page, served, f"/dashboard/jobs/{job}")
    page.get_by_role("button", name="Cancel").click()
    served.set_job(job, state="succeeded")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_role("alert").get_by_text("has succeeded: there is nothing to cancel").wait_for()
    page.complaints.clear()  # the browser notes the 409
    page.get_by_role("button", name="Back").click()


def test_a_log_is_followed_and_searched(page: Any, served: Served, ids: dict[str, str]):
    show(page, served, f"/dashboard/jobs/{ids['adam-ar']}")
    log = page.get_by_label("Lines of the log")
    log.get_by_text("step 499: loss 0.450").wait_for()
    page.get_by_label("Find").fill("step 12:")
    page.get_by_text("1 of 501 lines").wait_for()
    assert log.inner_text().strip() == "step 12: loss 0.694"
    with open(served.settings.run_dir(ids["adam-ar"]) / "log.txt", "a") as file:
        file.write("another step 12: it goes on\n")
    log.get_by_text("it goes on").wait_for()


def test_a_version_is_rolled_back_and_a_held_one_promoted(page: Any, served: Served, api: httpx.Client):
    def history() -> dict[str, Any]:
        return dict(api.get(f"/v1/collections/{seeded.COLLECTION}").json()["history"][0])

    show(page, served, f"/dashboard/collections/{seeded.COLLECTION}")
    page.get_by_role("row", name="v000006").get_by_role("button", name="Roll back").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Roll back").click()
    assert dialog.is_visible()  # a reason is asked for
    dialog.get_by_label("Reason").fill("worse clicks since noon")
    dialog.get_by_role("button", name="Roll back").click()
    page.get_by_role("heading", name="items serves v000006").wait_for()
    assert history() | {"version": "v000006", "reason": "worse clicks since noon", "override_gate": False} == history()
    page.get_by_role("row", name="v000008").get_by_role("button", name="Promote").click()
    dialog.get_by_label("Reason").fill("the world moved")
    dialog.get_by_role("button", name="Promote").click()
    assert dialog.is_visible()  # the gate is not overridden by the way
    dialog.get_by_label("The gate held this version").check()
    dialog.get_by_role("button", name="Promote").click()
    page.get_by_role("heading", name="items serves v000008").wait_for()
    assert history() | {"version": "v000008", "reason": "the world moved", "override_gate": True} == history()
    assert page.get_by_text("despite the gate: the world moved").is_visible()


def test_versions_are_compared_and_neighbours_asked_for(page: Any, served: Served, api: httpx.Client):
    show(page, served, f"/dashboard/collections/{seeded.COLLECTION}")
    page.get_by_label("Before", exact=True).select_option("v000001")
    page.get_by_label("After", exact=True).select_option("v000005")
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("Drift from v000001 to v000005").wait_for()
    assert page.locator("svg.map").count() == 2
    page.get_by_label("Colour").select_option("genre")
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("(coloured by genre)").wait_for()
    assert {page.locator(f"svg.map .series-{number}").count() > 0 for number in range(1, 7)} == {True}
    assert page.get_by_text("Drawn are 400 of the 480 items").is_visible()
    assert page.evaluate(FAULTS) == []
    page.get_by_label("in", exact=True).select_option("v000005")
    page.get_by_label("compared with").select_option("v000001")
    page.get_by_label("Item", exact=True).fill("100")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("heading", name="v000001", exact=True).wait_for()
    body = {"id": 100, "version": "v000005"}
    items = api.post(f"/v1/collections/{seeded.COLLECTION}/neighbors", json=body).json()["items"]
    found = page.locator(".neighbors").first.get_by_role("button")
    assert found.all_inner_texts() == [str(item["id"]) for item in items]
    assert page.locator(".neighbors .sub").first.inner_text().startswith("The ")
    found.first.click()
    page.locator(".neighbors").first.get_by_role("button", name="100", exact=True).wait_for()
    assert page.get_by_label("Item", exact=True).input_value() == str(items[0]["id"])


def test_items_are_recommended_to_a_user_that_is_typed(page: Any, served: Served, api: httpx.Client):
    show(page, served, f"/dashboard/collections/{seeded.COLLECTION}")
    user, button = page.get_by_label("Recommend for user ID"), page.get_by_role("button", name="Recommend")
    assert "v000001" not in page.get_by_label("by", exact=True).inner_text()  # it has items alone
    page.get_by_label("by", exact=True).select_option("v000005")
    user.fill("7")
    button.click()
    page.get_by_role("heading", name="v000005: user 7, by score").wait_for()
    body = {"users": [7], "k": 20, "exclude_seen": True, "version": "v000005"}
    items = api.post(f"/v1/collections/{seeded.COLLECTION}/recommend", json=body).json()["users"][0]["items"]
    shown = page.locator("#recommend-found li")
    expected = [f"{item['id']}\n{item['score']:.4f}\nThe " for item in items]
    assert [text[: text.index("The ") + 4] for text in shown.all_inner_texts()] == expected
    page.get_by_label("without items of the user's training rows").uncheck()
    button.click()
    shown.first.get_by_role("button", name="70", exact=True).click()  # had in training
    page.locator("#neighbors-found li").first.wait_for()
    assert page.get_by_label("Item", exact=True).input_value() == "70"
    assert page.evaluate(FAULTS) == []
    for wanted, text in (
        ("999", "v000005 has no user 999. It has the users of its job's training rows: check the id"),
        ("bob", "id 'bob' is not an integer"),
    ):
        user.fill(wanted)
        button.click()
        page.locator("#recommend-found .problem").get_by_text(text).wait_for()
    page.complaints.clear()  # the browser notes the 422


def test_a_schedule_is_triggered_paused_and_resumed(page: Any, served: Served, api: httpx.Client):
    show(page, served, "/dashboard/schedules/every-night")
    page.get_by_role("button", name="Trigger").click()
    page.get_by_label("Firing date").fill("2026-01-02")
    page.get_by_role("dialog").get_by_role("button", name="Trigger").click()
    page.get_by_role("rowheader", name="2026-01-02").wait_for()
    confirm(page, "Pause")
    page.get_by_role("button", name="Resume").wait_for()
    assert api.get("/v1/schedules/every-night").json()["paused"]
    confirm(page, "Resume")
    page.get_by_role("button", name="Pause").wait_for()
    assert not api.get("/v1/schedules/every-night").json()["paused"]


def test_a_data_set_is_measured(page: Any, served: Served):
    show(page, served, "/dashboard/datasets/clicks")
    page.get_by_role("button", name="Measure").click()
    page.get_by_role("rowheader", name="item", exact=True).wait_for()
    assert page.get_by_text("label rate", exact=True).is_visible()
    assert page.get_by_text(seeded.DRIFT[0]["message"]).is_visible()


def test_a_key_is_made_rotated_and_revoked(page: Any, served: Served, api: httpx.Client):
    show(page, served, "/dashboard/access")
    page.get_by_role("button", name="Create").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("by-hand")
    dialog.get_by_label("jobs:read").check()
    dialog.get_by_role("button", name="Create").click()
    secret = dialog.get_by_label("Shown only this once")
    secret.wait_for()
    first = secret.input_value()
    assert httpx.get(f"{served.url}/v1/jobs", headers={"Authorization": f"Bearer {first}"}).status_code == 200
    dialog.get_by_role("button", name="Close").click()
    row = page.get_by_role("row", name="by-hand")
    row.get_by_role("button", name="Rotate").click()
    dialog.get_by_role("button", name="Rotate").click()
    secret.wait_for()
    second = secret.input_value()
    assert second.startswith("ek_")
    assert second != first
    dialog.get_by_role("button", name="Close").click()
    row.get_by_role("button", name="Revoke").click()
    dialog.get_by_role("button", name="Revoke").click()
    page.get_by_text("by-hand is revoked").wait_for()
    assert httpx.get(f"{served.url}/v1/jobs", headers={"Authorization": f"Bearer {second}"}).status_code == 401


def test_another_site_can_change_nothing(page: Any, served: Served, ids: dict[str, str]):
    """With the session's cookie, and an Origin of its own."""
    (cookie,) = page.context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    for origin in ({}, {"Origin": "http://evil.example"}):
        answer = httpx.post(
            f"{served.url}/v1/jobs/{ids['nightly']}/cancel", headers=origin, cookies={cookie["name"]: cookie["value"]}
        )
        assert answer.status_code == 403
        assert answer.json()["type"] == "urn:evenkeel:cross-site-request"


def test_by_keyboard(page: Any, served: Served):
    show(page, served, "/")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    assert (
        page.evaluate(
            """() => [...document.querySelectorAll("a, button, input, select, textarea, summary")]
        .filter((one) => one.checkVisibility() && one.tabIndex < 0).map((one) => one.outerHTML)"""
        )
        == []
    )


def test_signing_out(page: Any, served: Served):
    show(page, served, "/dashboard/jobs")
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").wait_for()
