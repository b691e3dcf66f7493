"""The signed pointer, files under it, and reads that hang."""

import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.weights.publications import INCARNATION, JOB, arrays_of, manifest_of, publications

from penstock.types import Stopped, SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.weights import WeightsConfig, files
from penstock.weights.broadcaster import Publication
from penstock.weights.client import FetchingClient, LatestVersion
from penstock.weights.files import (
    MAX_HUNG_CALLS,
    CurrentVersion,
    FileTransport,
    OfferedVersion,
    TimeLimitedCalls,
    free_name,
)
from penstock.weights.manifest import Manifest


def test_a_call_returns_or_raises_what_it_did():
    calls = TimeLimitedCalls()
    assert calls("reading", lambda: 7, 30.0) == 7
    with pytest.raises(WeightsError, match="torn"):
        calls("reading", _torn, 30.0)


def test_a_call_that_hangs_is_left_behind_at_its_limit_and_named():
    calls, released = TimeLimitedCalls(), threading.Event()
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=r"^reading step 3 was not over within 0.1 s$"):
        calls("reading step 3", released.wait, 0.1)
    assert 0.1 <= time.monotonic() - began < 10.0
    assert calls("reading step 4", lambda: 7, 30.0) == 7
    released.set()


def test_only_a_few_calls_hang_at_once():
    calls, released = TimeLimitedCalls(), threading.Event()
    for _ in range(MAX_HUNG_CALLS):
        with pytest.raises(UnreachableError, match="not over"):
            calls("reading", released.wait, 0.01)
    threads = threading.active_count()
    with pytest.raises(UnreachableError, match=r"looking did not begin: 4 before it hang, reading first"):
        calls("looking", lambda: 7, 30.0)
    assert threading.active_count() == threads
    released.set()
    while threading.active_count() == threads:
        time.sleep(0.01)
    assert calls("looking", lambda: 7, 30.0) == 7


def test_closing_ends_a_wait():
    calls, released, raised = TimeLimitedCalls(), threading.Event(), []

    def read():
        try:
            calls("reading", released.wait, 30.0)
        except UnreachableError as error:
            raised.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.05)
    calls.close()
    calls.close()
    reader.join(10.0)
    released.set()
    assert raised == ["reading was given up: the reader was closed"]


def _torn():
    raise WeightsError("torn")


LARGE = 1 << 40
TOKEN = "token"


def pointer() -> CurrentVersion:
    chains = {manifest_of(4).content: ("delta-0.bin", "delta-1.bin"), manifest_of(6).content: ()}
    return CurrentVersion(
        JOB, (OfferedVersion(manifest_of(6), "file-1", chains), OfferedVersion(manifest_of(5), "file-0", {}))
    )


def signed(values: Any) -> bytes:
    text = json.dumps(values).encode()
    return files._signature(text, TOKEN) + text


def test_a_pointer_survives_its_file():
    assert CurrentVersion.from_bytes(pointer().to_bytes(TOKEN), JOB, TOKEN, LARGE) == pointer()


@pytest.mark.parametrize("token", ["token", "other", None])
def test_the_signature_is_hmac_sha_256(token: str | None):
    content = pointer().to_bytes(token)
    expected = hmac.new((token or "").encode(), content[64:], hashlib.sha256).hexdigest()
    assert content[:64] == expected.encode()


def test_it_announces_the_newest_and_names_every_file():
    assert pointer().latest == LatestVersion(INCARNATION, WeightVersion(0, 6))
    assert pointer().files == {"file-0", "file-1", "delta-0.bin", "delta-1.bin"}


def test_a_version_that_is_not_offered_is_superseded():
    assert pointer().offer(WeightVersion(0, 5)).file == "file-0"
    with pytest.raises(SupersededVersionError, match="newest of 2 kept") as refusal:
        pointer().offer(WeightVersion(0, 4))
    assert refusal.value.newest == (0, 6)


@pytest.mark.parametrize("token", ["other", None, ""])
def test_another_token_is_refused(token: str | None):
    with pytest.raises(WeightsError, match="another token"):
        CurrentVersion.from_bytes(pointer().to_bytes(TOKEN), JOB, token, LARGE)


def test_another_job_is_refused_although_the_token_fits():
    with pytest.raises(WeightsError, match="of job 'job', not 'other'"):
        CurrentVersion.from_bytes(pointer().to_bytes(TOKEN), "other", TOKEN, LARGE)


def test_an_offer_of_another_job_is_refused():
    values = json.loads(pointer().to_bytes(TOKEN)[64:])
    with pytest.raises(WeightsError, match="not of job 'other'"):
        CurrentVersion.from_bytes(signed(values | {"job": "other"}), "other", TOKEN, LARGE)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "", ".hidden", "x" * 200, 7, None])
def test_only_plain_file_names_are_taken(name: Any):
    values = json.loads(pointer().to_bytes(TOKEN)[64:])
    values["offers"][0]["file"] = name
    with pytest.raises(WeightsError, match="plain file name"):
        CurrentVersion.from_bytes(signed(values), JOB, TOKEN, LARGE)


@pytest.mark.parametrize(
    "values",
    [None, [], {}, {"format": 1, "job": JOB, "offers": []}, {"format": 1, "job": JOB, "offers": [{}]},
     {"format": 2, "job": JOB, "offers": []}, {"format": 1, "job": JOB, "offers": [[]] * 1001}],
)  # fmt: skip
def test_a_malformed_pointer_is_refused_even_when_signed(values: Any):
    with pytest.raises(WeightsError):
        CurrentVersion.from_bytes(signed(values), JOB, TOKEN, LARGE)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_is_noticed(data: st.DataObject):
    content = bytearray(pointer().to_bytes(TOKEN))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WeightsError):
        CurrentVersion.from_bytes(bytes(content), JOB, TOKEN, LARGE)


def test_a_larger_publication_than_allowed_is_refused():
    with pytest.raises(WeightsError, match="max_bytes allows 100"):
        CurrentVersion.from_bytes(pointer().to_bytes(TOKEN), JOB, TOKEN, 100)


def test_free_names_are_the_first_that_are_free():
    assert free_name("delta", ".bin", set()) == "delta-0.bin"
    assert free_name("delta", ".bin", {"delta-0.bin", "delta-2.bin"}) == "delta-1.bin"


class RecordedFiles:
    """Keeps files in a dict, and writes down what happens in which order."""

    may_hang, poll_s = False, 0.001

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}
        self.content = b""
        self.log: list[str] = []
        self.full = False

    def begin_arrays(self, arrays: Mapping[str, np.ndarray], taken: set[str]) -> str:
        return free_name("weights", "", taken)

    def write_arrays(self, name: str, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
        self.files[name] = manifest
        self.log.append(name)

    def write_delta(self, name: str, buffers: Iterable[bytes]) -> None:
        self.files[name] = b"".join(buffers)
        self.log.append(name)

    def write_pointer(self, content: bytes) -> None:
        if self.full:
            raise WeightsError("no room")
        self.content = content
        self.log.append("pointer")

    def discard(self, names: set[str]) -> None:
        for name in names:
            del self.files[name]
        self.log += [f"-{name}" for name in sorted(names)]

    def endpoint(self) -> dict[str, Any]:
        return {"place": "here"}

    def prepare(self) -> None:
        self.log.append("prepared")

    def close(self) -> None:
        self.log.append("closed")

    def read_pointer(self) -> bytes | None:
        return self.content or None

    def current(self) -> CurrentVersion:
        return CurrentVersion.from_bytes(self.content, JOB, "t", LARGE)


def resumed(place: RecordedFiles, keep: int) -> FileTransport:
    """As a broadcaster that is started anew finds the place."""
    return FileTransport(place, JOB, "t", LARGE, keep).prepare()


def offer(transport: FileTransport, publication: Publication) -> None:
    transport.begin(publication.arrays)
    transport.put(publication)


def test_the_pointer_comes_after_the_files_and_what_is_superseded_goes_last():
    place = RecordedFiles()
    transport = FileTransport(place, JOB, "t", LARGE, keep=1)
    for publication in publications(3):
        offer(transport, publication)
    assert place.log == [
        "weights-0",
        "pointer",
        "weights-1",
        "pointer",
        "-weights-0",
        "weights-0",
        "pointer",
        "-weights-1",
    ]
    assert place.current().latest.version == WeightVersion(0, 2)


def test_as_many_versions_are_kept_as_asked():
    place = RecordedFiles()
    transport = FileTransport(place, JOB, "t", LARGE, keep=3)
    for publication in publications(5):
        offer(transport, publication)
    assert [offer.manifest.version.step for offer in place.current().offers] == [4, 3, 2]
    assert len(place.files) == 3


def test_where_the_pointer_cannot_be_written_the_version_before_stays():
    place = RecordedFiles()
    transport = FileTransport(place, JOB, "t", LARGE, keep=1)
    first, second, third = publications(3, deltas=True)
    offer(transport, first)
    place.full = True
    with pytest.raises(WeightsError, match="no room"):
        offer(transport, second)
    offered = place.current().offer(WeightVersion(0, 0))
    assert place.files[offered.file] == first.manifest
    place.full = False
    offer(transport, third)
    newest = place.current().offers[0]
    assert place.files[newest.file] == third.manifest
    assert place.files.keys() >= newest.files


def test_no_file_that_is_offered_is_written_over():
    place = RecordedFiles()
    transport = FileTransport(place, JOB, "t", LARGE, keep=2)
    for publication in publications(9, deltas=True):
        before = dict(place.files)
        offered = place.current().files if place.content else set()
        place.full = True
        with pytest.raises(WeightsError, match="no room"):
            offer(transport, publication)
        assert {name: place.files[name] for name in offered} == {name: before[name] for name in offered}
        place.full = False
        offer(transport, publication)


def test_each_delta_is_written_once_and_goes_when_no_way_needs_it():
    place = RecordedFiles()
    transport = FileTransport(place, JOB, "t", LARGE, keep=1)
    for publication in publications(8, deltas=True):
        offer(transport, publication)
        assert place.files.keys() == place.current().files
    written = [name for name in place.log if name.startswith("delta")]
    assert len(written) == 7
    newest = place.current().offers[0]
    assert sorted(version.step for version, _ in newest.chains) == [3, 4, 5, 6, 7]
    assert len(newest.chains[manifest_of(4).content]) == 3


def test_what_a_broadcaster_before_offers_is_kept_and_its_files_are_not_written_over():
    place = RecordedFiles()
    offer(FileTransport(place, JOB, "t", LARGE, keep=2), publications(1)[0])
    again = resumed(place, keep=2)
    offer(again, publications(2)[1])
    assert [(offer.manifest.version.step, offer.file) for offer in place.current().offers] == [
        (1, "weights-1"),
        (0, "weights-0"),
    ]


def test_the_same_version_of_a_broadcaster_before_is_replaced_and_an_older_one_refused():
    place = RecordedFiles()
    old = FileTransport(place, JOB, "t", LARGE, keep=2)
    for publication in publications(4):
        offer(old, publication)
    again = resumed(place, keep=2)
    with pytest.raises(WeightsError, match="older than"):
        offer(again, publications(3)[2])
    same = publications(4)[3]
    offer(again, type(same)(manifest_of(3, "b" * 32), arrays_of(3), {}))
    assert [(offer.manifest.version.step, offer.manifest.incarnation[0]) for offer in place.current().offers] == [
        (3, "b"),
        (2, "a"),
    ]


def test_bytes_written_are_counted():
    transport = FileTransport(RecordedFiles(), JOB, "t", LARGE, keep=1)
    first, second = publications(2, deltas=True)
    offer(transport, first)
    assert transport.metrics() == {"weights/bytes_written": 20_004.0}
    offer(transport, second)
    delta = second.chains[first.manifest.content][0]
    assert transport.metrics() == {"weights/bytes_written": 20_004.0 + delta.nbytes}


def pointer_of(step: int, incarnation: str = INCARNATION, deltas: bool = False) -> bytes:
    chains = {manifest_of(step - 1).content: ("delta-0.bin",)} if deltas else {}
    return CurrentVersion(JOB, (OfferedVersion(manifest_of(step, incarnation), f"file-{step}", chains),)).to_bytes("t")


class PublishedFiles:
    poll_s = 0.001
    may_hang = False

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.while_reading: Callable[[], object] = lambda: None
        self.missing = False

    def read_pointer(self) -> bytes | None:
        return self.content

    def read_arrays(self, name: str, manifest: Manifest) -> Mapping[str, np.ndarray]:
        self.while_reading()
        if self.missing:
            raise WeightsError(f"{name} is gone")
        return arrays_of(manifest.version.step)

    def read_delta(self, name: str, max_bytes: int) -> Any:
        delta = publications(2, deltas=True)[1].chains[manifest_of(0).content][0].to_bytes()
        assert name == "delta-0.bin" and max_bytes == manifest_of(1).nbytes
        return delta

    def put(self, content: bytes) -> None:
        self.content = content

    def close(self) -> None:
        pass


def reader_of(place: PublishedFiles) -> FileTransport:
    return FileTransport(place, JOB, "t", LARGE)


def test_an_empty_place_has_nothing():
    reader = reader_of(PublishedFiles(None))
    assert reader.wait(None, 0.0) is None
    with pytest.raises(SupersededVersionError, match="nothing is published"):
        reader.read(WeightVersion(0, 0), None, 1.0)


def test_a_version_is_read_whole():
    received = reader_of(PublishedFiles(pointer_of(3))).read(WeightVersion(0, 3), None, 1.0)
    assert received.manifest == manifest_of(3)
    assert received.arrays is not None and received.arrays["step"][0] == 3
    assert received.moved_bytes == manifest_of(3).nbytes


def test_a_delta_is_read_where_one_leads_from_the_base():
    reader = reader_of(PublishedFiles(pointer_of(1, deltas=True)))
    received = reader.read(WeightVersion(0, 1), manifest_of(0).content, 1.0)
    assert received.arrays is None and len(received.deltas) == 1
    assert received.moved_bytes == len(received.deltas[0])
    assert reader.read(WeightVersion(0, 1), manifest_of(7).content, 1.0).arrays is not None


def test_a_version_that_goes_while_it_is_read_is_superseded_not_damaged():
    place = PublishedFiles(pointer_of(3))
    place.while_reading = lambda: place.put(pointer_of(4))
    with pytest.raises(SupersededVersionError) as refusal:
        reader_of(place).read(WeightVersion(0, 3), None, 1.0)
    assert refusal.value.newest == (0, 4)
    place.put(pointer_of(3))
    place.missing = True
    with pytest.raises(SupersededVersionError):
        reader_of(place).read(WeightVersion(0, 3), None, 1.0)


def test_a_file_that_is_gone_although_it_is_offered_is_damage():
    place = PublishedFiles(pointer_of(3))
    place.missing = True
    with pytest.raises(WeightsError, match="file-3 is gone") as refusal:
        reader_of(place).read(WeightVersion(0, 3), None, 1.0)
    assert not isinstance(refusal.value, SupersededVersionError)


def test_a_version_that_is_published_anew_while_it_is_read_is_read_again():
    place = PublishedFiles(pointer_of(3))
    place.while_reading = lambda: place.put(pointer_of(3, "b" * 32))
    with pytest.raises(WeightsError, match="published anew"):
        reader_of(place).read(WeightVersion(0, 3), None, 1.0)


def test_a_wait_ends_when_something_else_is_there():
    place, seen = PublishedFiles(pointer_of(3)), []
    reader = reader_of(place)
    known = reader.wait(None, 0.0)
    assert reader.wait(known, 0.0) == known
    waiter = threading.Thread(target=lambda: seen.append(reader.wait(known, 30.0)))
    waiter.start()
    place.put(pointer_of(4))
    waiter.join(30.0)
    assert seen == [LatestVersion(INCARNATION, WeightVersion(0, 4))]


def test_closing_ends_a_wait_and_every_read():
    reader, seen = reader_of(PublishedFiles(pointer_of(3))), []
    known = reader.wait(None, 0.0)
    waiter = threading.Thread(target=lambda: seen.append(reader.wait(known, 30.0)))
    waiter.start()
    reader.close()
    waiter.join(10.0)
    assert seen == [known]
    with pytest.raises(Stopped):
        reader.read(WeightVersion(0, 3), None, 1.0)


def hanging_place(released: threading.Event) -> PublishedFiles:
    place = PublishedFiles(pointer_of(3))
    place.may_hang = True
    place.while_reading = lambda: released.wait(30.0)
    return place


def test_a_read_that_hangs_ends_at_the_fetchs_limit():
    released = threading.Event()
    reader = reader_of(hanging_place(released))
    with pytest.raises(UnreachableError, match=r"reading WeightVersion\(lineage=0, step=3\) was not over within 0.1 s"):
        reader.read(WeightVersion(0, 3), None, 0.1)
    released.set()
    assert reader.read(WeightVersion(0, 3), None, 30.0).manifest == manifest_of(3)


def test_a_pointer_that_hangs_is_a_failure_of_the_client(monkeypatch: pytest.MonkeyPatch):
    released = threading.Event()
    place = hanging_place(released)
    monkeypatch.setattr(place, "read_pointer", lambda: released.wait(30.0) and None)
    monkeypatch.setattr("penstock.weights.files.POINTER_S", 0.05)
    endpoint = {"transport": "checkpoint", "job": JOB, "incarnation": INCARNATION}
    client = FetchingClient(endpoint, WeightsConfig(transport="checkpoint"), lambda _: reader_of(place))
    assert client.wait_for(None, 0.0) is None
    assert client.failure == "reading the marker of weights was not over within 0.05 s"
    monkeypatch.undo()
    assert client.wait_for(None, 30.0) == WeightVersion(0, 3)
    assert client.failure is None
    released.set()


def test_what_cannot_hang_is_read_in_the_callers_thread():
    place, threads = PublishedFiles(pointer_of(3)), []
    place.while_reading = lambda: threads.append(threading.current_thread())
    reader_of(place).read(WeightVersion(0, 3), None, 1.0)
    assert threads == [threading.current_thread()]
