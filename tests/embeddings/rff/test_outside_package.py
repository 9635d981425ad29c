"""A feature map of a package of one's own, as docs/development/add_a_feature_map.md writes it: published and served."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.outside_package import install

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "development" / "add_a_feature_map.md"

SERVE = """
import asyncio, sys
from pathlib import Path

import numpy as np

from embeddings.refresh.publish import RefreshRequest, publish_candidate
from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors
from service.core.settings import Settings
from tests.service.service_kit import client_of, running
from trainer.publishing.publish import settings_of
from trainer.spec import Publish

home = Path(sys.argv[1])
settings = Settings(home=home, data_roots=(home,), role="api")
rows = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
publish = Publish.model_validate({
    "collection": "items", "feature": "item",
    "views": [{"name": "signs", "kind": "signed_projection", "dim": 64, "materialized": True}],
})
store = open_store(settings.store_url)
request = RefreshRequest(ItemVectors(np.arange(40), rows), settings_of(publish))
assert publish_candidate(store, "items", request).status == "published"
unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)


def check(answer, matrix):
    assert answer.status_code == 200, answer.text
    found, missing = answer.json()["items"]
    np.testing.assert_allclose(found["vector"], np.sign(unit[3] @ matrix.T) / np.sqrt(len(matrix)), atol=1e-6)
    assert missing["status"] == "missing" and not any(missing["vector"] or [])


async def serve():
    async with running(settings) as app, client_of(app, settings.admin_key_file.read_text().strip()) as client:
        new = {"name": "few", "collection": "items", "kind": "signed_projection", "seed": 5}
        made = await client.post("/v1/views", json=new)
        assert (made.status_code, made.json()["dim"]) == (201, 8), made.text
        assert (await client.post("/v1/views", json=new)).status_code == 200
        assert (await client.post("/v1/views", json=new | {"seed": 6})).status_code == 409
        body = {"ids": [3, 99]}
        for view, seed, dim in (("signs", 0, 64), ("few", 5, 8)):
            matrix = np.random.default_rng(seed).standard_normal((dim, 8)).astype(np.float32)
            check(await client.post(f"/v1/views/{view}/vectors", json=body), matrix)
        refused = await client.get("/v1/views/few/layer")
        assert (refused.status_code, "rff" in refused.json()["detail"]) == (409, True), refused.text
    files = {file["name"] for file in store.collection("items").manifest()["files"]}
    assert {"view-signs.arrow", "frequencies-signs.arrow"} <= files

asyncio.run(serve())
print("SERVED")
"""

WITHOUT = """
import sys
from embeddings.store import open_store

items = open_store(sys.argv[1] + "/store").collection("items")
try:
    items.view_lookup("few", [3])
except ValueError as error:
    print(error)
"""


def run(code: str, home: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, str(home)], capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))},
    )  # fmt: skip


@pytest.mark.process
def test_it_is_published_and_served_and_missed_where_it_is_not_installed(tmp_path: Path) -> None:
    site, home = tmp_path / "site", tmp_path / "home"
    site.mkdir()
    blocks = re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", GUIDE.read_text("utf-8"), flags=re.DOTALL)
    (module, code), (project, text) = blocks
    assert (module, project) == ("my_maps.py", "pyproject.toml")
    install(site, "my_maps", code, tomllib.loads(text)["project"]["entry-points"])
    done = run(SERVE, home, site)
    assert "SERVED" in done.stdout, done.stdout + done.stderr
    without = run(WITHOUT, home)
    assert "kind 'signed_projection' is not one of rff, identity, exponential: install the package" in without.stdout, (
        without.stderr
    )


@pytest.mark.process
def test_one_that_cannot_be_imported_says_so_to_who_asks_for_it(tmp_path: Path) -> None:
    install(tmp_path, "cut_maps", "import no_such_module\n", {"evenkeel.feature_maps": {"cut": "cut_maps:Cut"}})
    code = (
        "from embeddings.rff.registry import feature_map\n"
        "assert feature_map('identity').__name__ == 'Identity'\n"
        "try:\n    feature_map('cut')\nexcept ValueError as error:\n    print(error)"
    )
    assert "'cut' of package cut_maps cannot be imported" in run(code, tmp_path, tmp_path).stdout
