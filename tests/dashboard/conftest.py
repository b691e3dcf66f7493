import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from penstock.rundir import RunViews
from tests.dashboard.sample_run import write_run


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory) -> Path:
    """The sample run; nobody writes to it."""
    return write_run(tmp_path_factory.mktemp("runs") / "mine").path


@pytest.fixture(scope="session")
def views(run_dir):
    with RunViews(run_dir) as opened:
        yield opened


@pytest.fixture
def printed() -> Callable[..., str]:
    """What a console of some width would show, without or with colours."""

    def show(*printable, width: int = 100, colors: bool = False) -> str:
        out = io.StringIO()
        console = Console(file=out, width=width, force_terminal=colors, color_system="truecolor" if colors else None)
        for item in printable:
            item(console) if callable(item) else console.print(item)
        return out.getvalue()

    return show


@pytest.fixture(scope="session")
def browser():
    """A Chromium; tests that ask for one import `tests.dashboard.visitors`, and are skipped where there is none."""
    from tests.dashboard.visitors import CHROMIUM, playwright

    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()
