import json
import os
import threading
import uuid
from pathlib import Path

import pytest

from penstock.overseer.supervisor.scaling import ANSWER_KEPT_S, ScaleRequests, ask_to_scale, parse_sizes
from penstock.types import ConfigError, UnreachableError

LIMIT_S = 280.0
ID = "0123456789abcdef" * 2


def refuse(role: str, count: int) -> None:
    raise ConfigError(f"the role {role!r} cannot be scaled")


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "requests").iterdir())


def asked(desk: ScaleRequests, run_dir: Path, count: int = 8) -> list[object]:
    """What `ask_to_scale` returned or raised, while the desk is open."""
    outcome: list[object] = []

    def ask() -> None:
        try:
            outcome.append(ask_to_scale(run_dir, "rollout", count, LIMIT_S))
        except ConfigError as error:
            outcome.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    for _ in range(10_000):
        desk.serve()
        asker.join(0.005)
        if not asker.is_alive():
            break
    assert not asker.is_alive()
    return outcome


def test_a_request_reaches_the_overseer_and_its_answer_the_asker(tmp_path):
    taken: list[tuple[str, int]] = []
    desk = ScaleRequests(tmp_path, lambda role, count: taken.append((role, count)))
    assert asked(desk, tmp_path) == ["rollout=8: the overseer has begun to make it so"]
    assert taken == [("rollout", 8)] and files(tmp_path) == []


def test_a_refusal_is_the_askers_error(tmp_path):
    (error,) = asked(ScaleRequests(tmp_path, refuse), tmp_path)
    assert isinstance(error, ConfigError) and str(error) == "the role 'rollout' cannot be scaled"
    assert files(tmp_path) == []


def test_a_request_that_nobody_takes_is_withdrawn(tmp_path):
    with pytest.raises(UnreachableError, match=r"did not answer rollout=8 within 0.2 s, and the request is withdrawn"):
        ask_to_scale(tmp_path, "rollout", 8, 0.2)
    assert files(tmp_path) == []


def test_what_was_asked_of_an_earlier_life_is_forgotten(tmp_path):
    (tmp_path / "requests").mkdir()
    (tmp_path / "requests" / f"scale-{ID}.json").write_text('{"role": "rollout", "count": 8}')
    ScaleRequests(tmp_path, refuse).serve()
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"role": "rollout"}', b'{"role": 1, "count": 1}', b'{"role": "rollout", "count": true}',
     b'{"role": "rollout", "count": 1.5}', b"[" * 3000, b'{"role": "rollout", "count": 8}' + b" " * 5000, b"\xff"],
)  # fmt: skip
def test_what_is_no_request_is_answered_so(tmp_path, content):
    taken: list[str] = []
    desk = ScaleRequests(tmp_path, lambda role, count: taken.append(role))
    (tmp_path / "requests" / f"scale-{ID}.json").write_bytes(content)
    desk.serve()
    answer = json.loads((tmp_path / "requests" / f"scale-{ID}.answer.json").read_text())
    assert taken == [] and answer["accepted"] is False and f"scale-{ID}.json" in answer["message"]


def test_links_and_other_files_are_not_read(tmp_path):
    desk = ScaleRequests(tmp_path, refuse)
    (tmp_path / "secret").write_text('{"role": "rollout", "count": 8}')
    os.symlink(tmp_path / "secret", tmp_path / "requests" / f"scale-{ID}.json")
    (tmp_path / "requests" / "notes.txt").write_text("mine")
    desk.serve()
    assert "cannot be read" in (tmp_path / "requests" / f"scale-{ID}.answer.json").read_text()
    assert (tmp_path / "requests" / "notes.txt").exists() and (tmp_path / "secret").exists()


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def unreadable(path: Path) -> None:
    path.write_text('{"role": "rollout", "count": 8}')
    path.chmod(0)


@pytest.mark.parametrize("put", [Path.mkdir, os.mkfifo, dangling, unreadable])
def test_what_cannot_be_read_ends_no_run_and_holds_none_up(tmp_path, monkeypatch, put):
    opened = os.open

    def open_unless_unreadable(path, *arguments, **more):
        """Root, as whom tests may run, reads everything."""
        if Path(path).is_file() and not os.stat(path).st_mode & 0o400:
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **more)

    monkeypatch.setattr(os, "open", open_unless_unreadable)
    taken: list[int] = []
    desk = ScaleRequests(tmp_path, lambda role, count: taken.append(count))
    strange = tmp_path / "requests" / f"scale-{ID}.json"
    put(strange)
    (tmp_path / "requests" / f"scale-{ID[::-1]}.json").write_text('{"role": "rollout", "count": 3}')
    for _ in range(2):
        desk.serve()
    answer = json.loads((tmp_path / "requests" / f"scale-{ID}.answer.json").read_text())
    assert answer["accepted"] is False and f"scale-{ID}.json cannot be read: " in answer["message"]
    assert taken == [3]
    assert strange.is_dir() or not strange.is_symlink() and not strange.exists()
    ScaleRequests(tmp_path, refuse).serve()


def test_a_request_that_cannot_be_taken_away_is_not_done_time_and_again(tmp_path, monkeypatch):
    taken: list[int] = []
    desk = ScaleRequests(tmp_path, lambda role, count: taken.append(count))
    request = tmp_path / "requests" / f"scale-{ID}.json"
    request.write_text('{"role": "rollout", "count": 8}')

    def refuse_to_delete(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse_to_delete)
    for _ in range(3):
        desk.serve()
    assert taken == [] and "cannot be taken away" in (request.parent / f"scale-{ID}.answer.json").read_text()


def test_a_file_in_place_of_the_folder_keeps_no_run_from_beginning(tmp_path):
    (tmp_path / "requests").write_text("mine")
    ScaleRequests(tmp_path, refuse).serve()
    assert (tmp_path / "requests").read_text() == "mine"


def test_folders_that_are_called_answers_are_left_where_they_are(tmp_path):
    now = [0.0]
    answer = tmp_path / "requests" / f"scale-{ID}.answer.json"
    answer.mkdir(parents=True)
    desk = ScaleRequests(tmp_path, refuse, lambda: now[0])
    now[0] = answer.stat().st_mtime + ANSWER_KEPT_S + 1
    desk.serve()
    assert answer.is_dir()


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"{}", b'{"accepted": true}', b'{"accepted": true, "message": 3}',
     b'{"accepted": true, "message": "\\u001b[2J"}'],
)  # fmt: skip
def test_what_is_no_answer_is_refused(tmp_path, monkeypatch, content):
    name = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: name)
    (tmp_path / "requests").mkdir()
    (tmp_path / "requests" / f"scale-{name.hex}.answer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"answer.json is n"):
        ask_to_scale(tmp_path, "rollout", 8, LIMIT_S)


def test_answers_that_nobody_took_are_deleted_in_time(tmp_path):
    now = [0.0]
    desk = ScaleRequests(tmp_path, lambda role, count: None, lambda: now[0])
    (tmp_path / "requests" / f"scale-{ID}.json").write_text('{"role": "rollout", "count": 8}')
    desk.serve()
    (answer,) = files(tmp_path)
    now[0] = os.stat(tmp_path / "requests" / answer).st_mtime + ANSWER_KEPT_S - 1
    desk.serve()
    assert files(tmp_path) == [answer]
    now[0] += 2
    desk.serve()
    assert files(tmp_path) == []


def test_a_folder_that_was_deleted_and_a_full_disk_end_no_run(tmp_path, monkeypatch):
    desk = ScaleRequests(tmp_path, lambda role, count: None)
    (tmp_path / "requests").rmdir()
    desk.serve()
    (tmp_path / "requests").mkdir()
    (tmp_path / "requests" / f"scale-{ID}.json").write_text('{"role": "rollout", "count": 8}')

    def full(*words: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.overseer.supervisor.scaling.write_atomically", full)
    desk.serve()
    assert files(tmp_path) == []


def test_sizes_are_read_from_words():
    assert parse_sizes(["rollout=8", "inference=2"]) == {"rollout": 8, "inference": 2}


@pytest.mark.parametrize("word", ["rollout", "rollout=", "rollout=-1", "rollout=two", "=3", "Rollout=3", "rollout=1e3"])
def test_a_word_that_is_no_size_is_refused(word):
    with pytest.raises(ConfigError, match="is not of the form role=number"):
        parse_sizes([word])


def test_a_role_that_comes_twice_is_refused():
    with pytest.raises(ConfigError, match="rollout is given twice"):
        parse_sizes(["rollout=1", "rollout=2"])
