import json

import pytest

from penstock.dashboard import bundle as module
from penstock.dashboard import write_bundle
from penstock.dashboard.bundle import joined
from penstock.types import ConfigError, RunDirectoryError
from tests.dashboard.sample_run import write_run


def test_a_folder_opens_without_a_server(tmp_path):
    write_run(tmp_path / "runs" / "mine")
    out = tmp_path / "out"
    assert write_bundle(tmp_path / "runs", out).startswith(f"wrote {out}/index.html: 1 run, 7 groups in full")
    page = (out / "index.html").read_text()
    assert "static/" not in page and "module" not in page and "content-security-policy" in page
    data = (out / "data.js").read_text()
    found = json.loads(data.removeprefix("globalThis.PENSTOCK_BUNDLE = ").removesuffix(";\n"))
    run = found["runs"]["mine"]
    assert run["groups"]["cats-0-1"]["members"][1]["reward"] == 1.0 and len(run["list"]) == 7
    assert found["list"]["runs"][0]["name"] == "mine" and data.isascii()
    with pytest.raises(ConfigError, match="exists already"):
        write_bundle(tmp_path / "runs", out)
    with pytest.raises(ConfigError, match=r"--bundle .*/a cannot be written: Not a directory: choose another place"):
        write_bundle(tmp_path / "runs", out / "data.js" / "a")


def test_groups_beyond_the_limit_are_left_out_and_counted(tmp_path, monkeypatch):
    write_run(tmp_path / "mine")
    monkeypatch.setattr(module, "MOST_BYTES", 2000)
    assert "more in lists alone" in write_bundle(tmp_path / "mine", tmp_path / "out")


def test_what_cannot_be_read_is_told(tmp_path):
    directory = write_run(tmp_path / "mine")
    directory.metrics_path.write_text("garbage\n")
    told = write_bundle(tmp_path / "mine", tmp_path / "out")
    assert "metrics.jsonl, line 1 is not JSON" in told and "take that line out" in told


def test_broken_groups_are_not_said_to_have_had_no_room(tmp_path, monkeypatch):
    write_run(tmp_path / "mine")

    def broken(run, group_id):
        raise RunDirectoryError(group_id)

    monkeypatch.setattr(module, "group_page", broken)
    told = write_bundle(tmp_path / "mine", tmp_path / "out")
    assert "1 run, 0 groups in full (7 more cannot be read)" in told and "limit" not in told


def test_modules_are_joined_in_functions_of_their_own():
    script = joined({
        "a.js": 'const hidden = 1;\nexport function one() { return hidden; }\nexport const two = 2;\n',
        "b.js": 'import { one, two } from "./a.js";\nconst hidden = 5;\nexport class Three {}\n',
    })  # fmt: skip
    assert 'const { one, two } = modules["a.js"];' in script and "return { one, two };" in script
    assert "export" not in script and "import " not in script
    with pytest.raises(ConfigError, match=r"b\.js imports c\.js, which does not stand before it"):
        joined({"b.js": 'import { one } from "./c.js";\n'})
