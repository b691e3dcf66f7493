"""A run directory is data: whose it may be, where looking at it connects, and what writing to it follows."""

import os
import socket
import threading

import pytest
from tests.dashboard.sample_run import write_run
from tests.object_stores import s3_server, s3_url  # noqa: F401  (fixtures)

from penstock.rundir import JsonLinesLog, RunDirectory, RunViews
from penstock.rundir import live_files as store_reading
from penstock.rundir.store_urls import url_problem
from penstock.types import ConfigError, RunDirectoryError

NOBODY = 65534
pytestmark = pytest.mark.attack


def make_foreign(directory: RunDirectory) -> str:
    """Lets somebody else write there, as far as this user can; returns how that is told."""
    if os.geteuid() == 0:
        os.chown(directory.config_path, NOBODY, NOBODY)
        return "config.yaml belongs to "
    directory.path.chmod(0o777)
    return "everybody can write "


class Listener:
    """A server on loopback that says what an FTP server says, and counts who came."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.heard: list[bytes] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            self.heard.append(b"")
            with peer:
                peer.settimeout(5)
                for line in (b"220 hello\r\n", b"331 password\r\n", b"230 welcome\r\n"):
                    peer.sendall(line)
                    self.heard.append(peer.recv(1000))

    def close(self) -> None:
        if self._thread.is_alive():
            self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join(10)
        self._socket.close()


@pytest.fixture
def listener():
    opened = Listener()
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "url",
    [
        "ftp://user:secret@127.0.0.1:{port}/x", "http://127.0.0.1:{port}/x", "https://127.0.0.1:{port}/x",
        "sftp://127.0.0.1:{port}/x", "webhdfs://127.0.0.1:{port}/x", "github://o:r@127.0.0.1:{port}/",
        "simplecache::http://127.0.0.1:{port}/x", "s3://bucket/x::http://127.0.0.1:{port}/x",
        "reference::http://127.0.0.1:{port}/x", "s3://key:secret@127.0.0.1:{port}/x",
        "abfss://box@127.0.0.1:{port}/x", "s3://bucket/x?endpoint=127.0.0.1:{port}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("trust", [False, True])
def test_a_url_in_a_config_makes_nobody_connect_there(tmp_path, listener, url, trust):
    told = url.format(port=listener.port)
    directory = RunDirectory.create(tmp_path / "run", {"replay": {"store": {"url": told}}})
    with pytest.raises(ConfigError, match=r"config.yaml: replay.store.url is '") as caught:
        RunViews(directory.path, trust=trust)
    assert "secret" not in str(caught.value)
    listener.close()
    assert listener.heard == []


@pytest.mark.parametrize("url", ["/a/b", "a::b", "file:///a", "s3://b/r", "gs://b/r", "az://b/r", "memory://x"])
def test_paths_and_object_stores_are_fine(url):
    assert url_problem(url) is None


@pytest.mark.parametrize("url", [["s3://b/r"], {"a": 1}, 7, True])
def test_a_url_that_is_no_text_is_refused(tmp_path, url):
    directory = RunDirectory.create(tmp_path / "run", {"replay": {"store": {"url": url}}})
    with pytest.raises(ConfigError, match=f"replay.store.url is a {type(url).__name__}: it must be a path or a URL"):
        RunViews(directory.path)


def test_the_store_of_a_foreign_run_is_asked_with_trust_only(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {"replay": {"store": {"url": "memory://foreign"}}})
    RunViews(directory.path).close()
    reason = make_foreign(directory)
    with pytest.raises(ConfigError, match=f"replay.store.url is 'memory://foreign', and .*{reason}.*give --trust"):
        RunViews(directory.path)
    RunViews(directory.path, trust=True).close()


def test_a_foreign_run_without_a_store_in_the_network_is_looked_at(tmp_path):
    directory = write_run(tmp_path / "run")
    make_foreign(directory)
    with RunViews(directory.path) as views:
        assert views.select("select count(*) as n from rollouts").to_dicts() == [{"n": 14}]


@pytest.mark.parametrize("name", ["", "config.yaml"])
@pytest.mark.parametrize(("mode", "reason"), [(0o720, None), (0o702, "everybody can write"), (0o755, None)])
def test_who_can_write_a_run_is_seen(tmp_path, name, mode, reason):
    directory = RunDirectory.create(tmp_path / "run", {})
    (directory.path / name).chmod(mode)
    found = directory.why_foreign()
    if mode & 0o020 and os.geteuid() == 0:  # the group root has the user root alone
        os.chown(directory.path / name, 0, NOBODY)
        assert "the group 65534 can write" in str(directory.why_foreign())
    assert (found is None) if reason is None else (reason in str(found) and "chmod o-w" in str(found))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("name", ["", "config.yaml"])
def test_whose_a_run_is_is_seen(tmp_path, name):
    directory = RunDirectory.create(tmp_path / "run", {})
    os.chown(directory.path / name, 4242, 4242)
    assert directory.why_foreign() == f"{directory.path / name} belongs to the user 4242"


def test_a_silent_store_is_given_up(tmp_path, s3_url, monkeypatch):  # noqa: F811
    silent = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
    monkeypatch.setattr(store_reading, "FIRST_ANSWER_S", 0.5)
    directory = RunDirectory.create(tmp_path / "run", {"replay": {"store": {"url": s3_url}}})
    with pytest.raises(ConfigError, match=rf"^replay.store.url is '{s3_url}': nothing there answered within 0.5 s$"):
        RunViews(directory.path)
    silent.close()


def test_a_store_that_cannot_be_read_is_one_clear_error(tmp_path, s3_url, monkeypatch):  # noqa: F811
    directory = RunDirectory.create(tmp_path / "run", {"replay": {"store": {"url": s3_url}}})
    RunViews(directory.path).close()
    with monkeypatch.context() as patch:
        patch.setattr(store_reading.RemoteStorage, "files", _reset)
        with pytest.raises(ConfigError, match=f"replay.store.url is '{s3_url}', which cannot be read: ConnectionReset"):
            RunViews(directory.path)
    with RunViews(directory.path) as views, pytest.raises(ConfigError, match="cannot be read: ConnectionResetError"):
        with views.files.reading():
            _reset()


def _reset(*arguments):
    raise ConnectionResetError("connection reset by peer")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_log_is_not_written_through_a_link(tmp_path, kind):
    victim, path = tmp_path / "victim", tmp_path / "metrics.jsonl"
    victim.write_text("mine, without an end")
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(RunDirectoryError, match=f"^{path} is (a link|no plain file)"):
        JsonLinesLog(path)
    assert victim.read_text() == "mine, without an end"


@pytest.mark.parametrize(
    "name", [".lock", "metrics.jsonl", "events.jsonl", "tickets.jsonl", "fates.jsonl", "lineages.jsonl", "stacks.txt"]
)
def test_a_run_with_a_link_for_a_log_is_not_written(tmp_path, name):
    directory = RunDirectory.create(tmp_path / "run", {})
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (directory.path / name).unlink(missing_ok=True)
    (directory.path / name).symlink_to(victim)
    with pytest.raises(RunDirectoryError, match=f"{name} is a link, and a run does not write through links: put"):
        with directory.locked():
            pass
    assert victim.read_text() == "mine" and list(tmp_path.iterdir()).count(victim) == 1


def test_a_link_where_a_file_is_replaced_is_replaced_itself(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {})
    victim = tmp_path / "victim"
    victim.write_text("mine")
    directory.status_path.symlink_to(victim)
    directory.write_status({"step": 1})
    assert victim.read_text() == "mine" and not directory.status_path.is_symlink()
