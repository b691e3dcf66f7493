"""Who visits the dashboard in a real browser: its server, Chromium, and a page that notes what leaves."""

import os
import re
import shutil
import threading

import pytest

from penstock.dashboard import DashboardSettings, serve_dashboard

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'penstock[dashboard-test]'")
CHROMIUM = os.environ.get("PENSTOCK_CHROMIUM") or shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("no chromium: apt install chromium, or name one in PENSTOCK_CHROMIUM", allow_module_level=True)

expect = playwright.expect
expect.set_options(timeout=15_000)


class Served:
    def __init__(self, path, cache, token=None):
        self._stop, self._ready, self.told = threading.Event(), threading.Event(), ""
        os.environ["XDG_CACHE_HOME"] = str(cache)
        self._thread = threading.Thread(
            target=serve_dashboard, args=(path, DashboardSettings(port=0, token=token), self._tell, self._stop)
        )
        self._thread.start()
        assert self._ready.wait(30)
        self.url = re.findall(r"http://[0-9.:]+", self.told)[0]

    def _tell(self, line):
        self.told = line
        self._ready.set()

    def end(self):
        self._stop.set()
        self._thread.join(30)


class Visitor:
    """A page that notes errors, and every request that goes to another host."""

    def __init__(self, browser, url, **options):
        self.url = url
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.page = self.context.new_page()
        self.errors, self.abroad, self.refused = [], [], []
        self.pardoned = None  # a part of what the browser itself notes where an answer is to have that status
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._note)
        self.page.on(
            "request",
            lambda request: (
                None if request.url.startswith((url, "data:", "blob:", "file:")) else self.abroad.append(request.url)
            ),
        )

    def _note(self, message):
        if message.type == "error" and (self.pardoned is None or self.pardoned not in message.text):
            self.errors.append(message.text)

    def open(self, address="#/", heading=None):
        self.page.goto(f"{self.url}/{address}")
        self.settled()
        if heading is not None:
            expect(self.page.locator("h1").first).to_have_text(heading)
        return self.page

    def settled(self):
        expect(self.page.locator("main:not([aria-busy]):not(.turning) h1").first).to_be_visible(timeout=20_000)

    def read(self, run):
        """Waits until all of a run is in the index."""
        words = self.page.request
        for _ in range(400):
            if words.get(f"{self.url}/api/runs/{run}").json()["progress"] == "":
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"{run} was not read in time")
