"""The dashboard over HTTP: pages of hand-written modules, what they show as JSON, and news of runs that go on.

Nothing that a browser sends becomes a path: runs, pages, films and static files are looked up among those that are
there. The policy of every answer (`CONTENT_SECURITY_POLICY`) lets no script run but the dashboard's own files, and no
page ask another host. A query of the SQL box is confined as that of `penstock rollouts --sql`, one at a time, bounded
in time and memory. Without a token only names of this machine are answered; with one, a browser shows it once, in the
address, and gets a cookie in its place, which scripts cannot read and other sites do not send.
"""

import asyncio
import hashlib
import hmac
import importlib.resources
import math
import mimetypes
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode
from weakref import WeakKeyDictionary

import duckdb
import pyarrow as pa
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request, cookie_parser
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.dashboard.compare import compare_page
from penstock.dashboard.observation import LONGEST_REST_S, REST, ObservedRun, ObservedRuns
from penstock.dashboard.pages import RUN_PAGES, film, runs_page, safe
from penstock.dashboard.rollouts import distinct_names, plain
from penstock.inference.access import TOKEN_SHOWN, AccessRules, BoundedPosts, KnownHost
from penstock.inference.http_server import HttpServer
from penstock.rundir.directory import cache_folder
from penstock.rundir.logs import to_json
from penstock.rundir.views import RunViews
from penstock.types import ConfigError, PenstockError
from penstock.types.addresses import is_loopback

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "media-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY, "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer", "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}  # fmt: skip
SQL_S = 20.0
"""A query that takes longer is ended."""
SQL_BYTES = 256 << 20
SQL_ROWS = 1000
"""Of an answer; there may be more."""
LEAST_TOKEN = 8
NEWS_S = 1.0
"""Between two looks for news of a run, for each page that shows it."""
MOST_KEPT = 32
"""Pages whose answers are kept."""
STOP_S = 2.0
WATCH_S = 0.5


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """Where the dashboard listens, and who may look.

    Attributes:
        host: Address to listen on. Anything but loopback requires a token.
        port: 0 takes a free one.
        token: What a browser must show once; None asks for nothing.
        tls_cert: File with the certificate chain (PEM); None speaks plain HTTP.
        tls_key: File with its key, not encrypted.
        trust: Connect to stores in the network that runs name, whoever may have written that.

    Raises:
        ConfigError: others could reach it without a token, or the token is too short.
    """

    host: str = "127.0.0.1"
    port: int = 8800
    token: str | None = field(default=None, repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    trust: bool = False

    def __post_init__(self) -> None:
        if self.token is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines: set a token (PENSTOCK_TOKEN or --token-file), "
                "or use --host 127.0.0.1"
            )
        if self.token is not None and len(self.token) < LEAST_TOKEN:
            raise ConfigError(f"the token has {len(self.token)} characters: it must have {LEAST_TOKEN} at least")


def create_dashboard(runs: ObservedRuns, settings: DashboardSettings) -> Starlette:
    """The application over some runs, whose thread the caller starts and ends.

    Args:
        runs: Those that are shown.
        settings: Says who may look.
    """
    handlers = _Handlers(runs)
    if settings.token is None:
        who = Middleware(KnownHost, host=settings.host)
    else:
        who = Middleware(BrowserToken, token=settings.token, secure=settings.tls_cert is not None)
    rules = AccessRules()
    return Starlette(
        routes=[
            Route("/", handlers.file),
            Route("/health", handlers.health),
            Route("/static/{name}", handlers.file),
            Route("/api/runs", handlers.runs),
            Route("/api/compare", handlers.compare),
            Route("/api/runs/{run}", handlers.page),
            Route("/api/runs/{run}/sql", handlers.sql, methods=["POST"]),
            Route("/api/runs/{run}/stream", handlers.stream),
            Route("/api/runs/{run}/film", handlers.film),
            Route("/api/runs/{run}/{page}", handlers.page),
        ],
        middleware=[
            Middleware(_SafeHeaders),
            who,
            Middleware(BoundedPosts, most_bytes=256 * 1024, most_unanswered=rules.max_waiting),
        ],
        exception_handlers={PenstockError: _refused, duckdb.Error: _failed},
    )


def serve_dashboard(
    path: Path,
    settings: DashboardSettings,
    announce: Callable[[str], None] = print,
    stop: threading.Event | None = None,
) -> None:
    """Serves the dashboard of a run, or of a folder of runs, until Ctrl-C.

    Args:
        path: A run directory, or a folder of such; nothing is written there.
        settings: Where to listen, and the token.
        announce: Called with the line that says where it is.
        stop: Ends it as Ctrl-C would, for callers that are not a terminal.

    Raises:
        RunDirectoryError: there is no run.
        ConfigError: the address cannot be listened on.
        RunFailed: the server died.
    """
    ending = stop or threading.Event()
    _keep_small()
    with ObservedRuns(path, cache_folder(), settings.trust) as runs:
        app = create_dashboard(runs, settings)
        server = HttpServer(app, settings.host, settings.port, STOP_S, settings.tls_cert, settings.tls_key)
        try:
            server.start()
            asked = "" if settings.token is None else "/?token=… (the token, once)"
            announce(f"dashboard of {path} at {server.url}{asked}; Ctrl-C ends it")
            while not ending.wait(WATCH_S):
                server.raise_if_failed()
        except KeyboardInterrupt:
            ending.set()
        finally:
            server.stop()


def _keep_small() -> None:
    """Of a million rollouts Arrow's own pool keeps 100 MB that were freed, and an arena for each of its threads 50."""
    pa.set_memory_pool(pa.system_memory_pool())
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def static_files() -> dict[str, bytes]:
    """The dashboard's own files, by name."""
    folder = importlib.resources.files("penstock.dashboard") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


class BrowserToken:
    """ASGI middleware: everything but ``/health`` needs the token: as a header, a cookie, or once in the address.

    ``GET /?token=…`` is answered by a cookie and by the same address without it, so that the token stays neither in the
    history nor in a link that is handed on.

    Args:
        app: The application that is guarded.
        token: What must be shown; compared in constant time.
        secure: Whether the cookie goes over TLS only.
    """

    def __init__(self, app: ASGIApp, token: str, secure: bool = False) -> None:
        self._app, self._token, self._secure = app, token.encode(), secure
        self._cookie = hmac.new(self._token, b"penstock dashboard", hashlib.sha256).hexdigest()
        self._name = f"penstock-{self._cookie[:8]}"  # cookies know no ports: two dashboards of a machine differ

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, sets the cookie, or answers 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        shown = self._is_shown(headers)
        scope.setdefault("state", {})[TOKEN_SHOWN] = shown
        words = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        if scope["path"] == "/" and scope["method"] == "GET" and "token" in words:
            await self._answer(words)(scope, receive, send)
        elif shown or scope["path"] == "/health":
            await self._app(scope, receive, send)
        else:
            await _NO_TOKEN(scope, receive, send)

    def _is_shown(self, headers: Headers) -> bool:
        cookie = cookie_parser(headers.get("cookie", "")).get(self._name, "")
        given = headers.get("authorization", "").encode("latin-1")
        return hmac.compare_digest(cookie.encode(), self._cookie.encode()) or hmac.compare_digest(
            given, b"Bearer " + self._token
        )

    def _answer(self, words: dict[str, str]) -> Response:
        if not hmac.compare_digest(words.pop("token").encode(), self._token):
            return _NO_TOKEN
        response = RedirectResponse(f"/?{urlencode(words)}" if words else "/", status_code=303)
        response.set_cookie(self._name, self._cookie, httponly=True, samesite="strict", secure=self._secure, path="/")
        return response


_NO_TOKEN = PlainTextResponse(
    "401: missing or wrong token. Open the dashboard once as /?token=TOKEN, with the token that it was started with.\n",
    401,
)


class _SafeHeaders:
    """ASGI middleware: every answer says what a browser may do with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        await self._app(scope, receive, marked if scope["type"] == "http" else send)


class _Handlers:
    def __init__(self, runs: ObservedRuns) -> None:
        self._runs = runs
        self._files = static_files()
        self._queries = Queries()
        self._pages = KeptPages()

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("ok")

    async def file(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        content = self._files.get(name)
        if content is None:
            return JSONResponse({"error": f"there is no file {name!r:.80}"}, 404)
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    async def runs(self, request: Request) -> Response:
        return _json(await run_in_threadpool(lambda: safe(runs_page(self._runs))))

    async def compare(self, request: Request) -> Response:
        words = dict(request.query_params)
        return _json(await run_in_threadpool(lambda: safe(compare_page(self._runs, words))))

    async def page(self, request: Request) -> Response:
        name, words = request.path_params.get("page", ""), dict(request.query_params)
        if name not in RUN_PAGES:
            return JSONResponse({"error": f"there is no page {name!r:.80}"}, 404)
        run = await self._run(request)
        return _json(await run_in_threadpool(self._pages.answer, run, name, words))

    async def film(self, request: Request) -> Response:
        run = await self._run(request)
        return FileResponse(
            await run_in_threadpool(film, run, request.query_params.get("name", "")), media_type="video/mp4"
        )

    async def sql(self, request: Request) -> Response:
        run = await self._run(request)
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the body must be JSON: {error}") from error
        sql = body.get("sql") if isinstance(body, Mapping) else None
        if not isinstance(sql, str) or not sql.strip():
            raise ConfigError("sql must be a query, such as select state, count(*) from rollouts group by 1")
        return _json(await run_in_threadpool(lambda: safe(self._queries.answer(run, sql))))

    async def stream(self, request: Request) -> Response:
        run = await self._run(request)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._news(run), media_type="text/event-stream", headers=headers)

    async def _run(self, request: Request) -> ObservedRun:
        return await run_in_threadpool(self._runs.find, request.path_params["run"])

    async def _news(self, run: ObservedRun) -> AsyncIterator[str]:
        """One event whenever something of the run has changed; a comment now and then, which finds who has left."""
        told, silent = None, 0
        while True:
            try:
                run = await run_in_threadpool(self._runs.find, run.name)  # it is still looked at
            except ConfigError:  # it was deleted
                return
            seen = await run_in_threadpool(_news_of, run) | {"renewals": self._pages.renewals(run)}
            if seen != told:
                told, silent = seen, 0
                yield f"data: {to_json(safe(seen))}\n\n"
            elif (silent := silent + 1) % 10 == 0:
                yield ": still here\n\n"
            await asyncio.sleep(NEWS_S)


class KeptPages:
    """Answers that take long and follow from what was read: they are kept until more is read, or the run ends.

    Of a run that goes on an answer is kept `REST` times as long as it took, whatever the news: asked for by every page
    that is drawn anew, it would take a part of what the run computes with. Whoever was given an old one is told by
    `renewals` when to ask again. Thread-safe.

    Args:
        clock: Of monotonic seconds.
    """

    PAGES = ("reward", "ledger", "findings", "lessons", "timeline", "choices")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[tuple[Any, ...], tuple[tuple[Any, ...], float, dict[str, Any]]] = OrderedDict()
        self._old: WeakKeyDictionary[ObservedRun, float] = WeakKeyDictionary()
        self._renewals: WeakKeyDictionary[ObservedRun, int] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def renewals(self, run: ObservedRun) -> int:
        """How often the time has come since which an old answer that was given would be made anew."""
        with self._lock:
            if self._clock() >= self._old.get(run, math.inf):
                del self._old[run]
                self._renewals[run] = self._renewals.get(run, 0) + 1
            return self._renewals.get(run, 0)

    def answer(self, run: ObservedRun, name: str, words: Mapping[str, str]) -> dict[str, Any]:
        """A page, as `safe` data.

        Raises:
            PenstockError: as of the page.
        """
        if name not in self.PAGES:
            return safe(RUN_PAGES[name](run, words))
        key, progress, now = (run, name, *sorted(words.items())), run.progress, self._clock()
        news = run.version, run.status().state
        with self._lock:
            known, until, answer = self._kept.get(key, ((), 0.0, {}))
            is_old = bool(known) and known != news and news[1] == "running" and now < until
            if is_old:
                self._old[run] = min(until, self._old.get(run, math.inf))
        if known == news or is_old:
            return answer
        begun = time.thread_time()
        answer = safe(RUN_PAGES[name](run, words))
        spent = time.thread_time() - begun
        if not progress:  # else it is of a run that is half read
            with self._lock:
                self._kept[key] = news, now + min(REST * spent, LONGEST_REST_S), answer
                self._kept.move_to_end(key)
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        return answer


class Queries:
    """Queries of the SQL box: one at a time, over views that are kept until the run has changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: RunViews | None = None
        self._key: tuple[ObservedRun, int] | None = None

    def answer(self, run: ObservedRun, sql: str) -> dict[str, Any]:
        """The first `SQL_ROWS` rows.

        Raises:
            ConfigError: it does more than read, cannot be answered, or takes too long.
        """
        if not self._lock.acquire(timeout=SQL_S):
            raise ConfigError("another query is still being answered: try again")
        try:
            views = self._opened(run)
            timer = threading.Timer(SQL_S, views.interrupt)
            timer.start()
            try:
                result = views.select(sql, limit=SQL_ROWS)
            finally:
                timer.cancel()
            rows = [[plain(value) for value in row] for row in result.rows()]
            return {"columns": distinct_names(result), "rows": rows, "more": result.more}
        finally:
            self._lock.release()

    def _opened(self, run: ObservedRun) -> RunViews:
        key = (run, run.version)
        if self._views is None or self._key != key:
            if self._views is not None:
                self._views.close()
                self._views = None
            self._views, self._key = RunViews(run.directory.path, run.trust, memory_bytes=SQL_BYTES), key
        return self._views


def _news_of(run: ObservedRun) -> dict[str, Any]:
    status = run.status()
    return {"version": run.version, "state": status.state, "step": status.content.get("step"), "progress": run.progress}


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json", headers={"cache-control": "no-store"})


async def _failed(request: Request, error: Exception) -> Response:
    """The index could not answer, for want of memory say."""
    return JSONResponse({"error": safe(f"the index could not answer: {' '.join(str(error).split())}")}, 500)


async def _refused(request: Request, error: Exception) -> Response:
    missing = "there is no run" in str(error)
    return JSONResponse({"error": safe(str(error))}, 404 if missing else 400)
