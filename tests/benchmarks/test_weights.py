"""The weights benchmark at tiny sizes: what it checks can fail, and what it prints are the marks. Nothing is timed."""

import re
import socket
import threading
import time

import numpy as np
import pytest
from benchmarks.weights import __main__ as benchmark
from benchmarks.weights import deltas, distribution, handover, training
from benchmarks.weights.handover import Measured, make_arrays
from benchmarks.weights.raw_flight import RawClient, RawServer
from benchmarks.weights.slow_link import SlowLink

MEASURED = ("memory copy", "local", "shared_memory: in all", "shared_memory: digests ready", "raw Flight, kept")
MORE = ("arrow_flight: fetch without digests", "raw Flight, thrown away", "raw Flight, into arrays")


def test_arrays_have_the_size_that_was_asked_for_and_do_not_repeat():
    for nbytes in (100_000, 70_000_000):
        arrays = make_arrays(nbytes)
        assert sum(array.nbytes for array in arrays.values()) == pytest.approx(nbytes, rel=1e-4)
        assert len({array.tobytes() for array in arrays.values()}) == len(arrays)


def test_raw_flight_moves_every_byte_once_over_any_number_of_streams():
    arrays = {"a": np.arange(1000, dtype=np.int32), "b": np.ones(7, np.uint8)}
    with RawServer(arrays) as server:
        for streams in (1, 3, 4):
            client = RawClient(server.port, streams)
            assert {client.read(300, how, 4007) for how in handover.RAW} == {4007}
            assert client.read(300, "into arrays", 4007) == 4007
            for place in client.places:
                assert place.tobytes() == arrays["a"].tobytes() + arrays["b"].tobytes()


@pytest.mark.slow
def test_every_transport_is_measured_and_its_arrays_are_compared():
    measured = handover.measure(200_000, rounds=1, repeats=2)
    assert set(MEASURED) <= measured.seconds.keys()
    more = {name for name, values in measured.seconds.items() if len(values) == 2 * handover.FLIGHT_TURNS}
    assert more == {name for name in measured.seconds if name.startswith("arrow_flight") or name.endswith("arrays")}
    assert all(len(values) == 2 for name, values in measured.seconds.items() if name not in more)


def test_other_arrays_than_were_published_fail_the_benchmark():
    def fetcher(**command):
        return {"w": "00000000"}

    with pytest.raises(AssertionError, match="checkpoint delivered other arrays"):
        handover._check(fetcher, ("checkpoint",), {"w": np.ones(3, np.float32)})


def test_the_warm_up_is_left_out():
    measured = Measured(1_000_000)
    measured.add("x", 9.0)
    measured.warm = True
    for seconds in (1.0, 3.0, 2.0):
        measured.add("x", seconds)
    assert measured.median("x") == 2.0 and measured.rate("x") == pytest.approx(0.0005)


@pytest.fixture(scope="module")
def recorded():
    return {rate: training.record(training.TINY, rate, updates=2) for rate in benchmark.RATES}


@pytest.mark.slow
def test_few_elements_change_at_a_small_learning_rate_and_most_at_a_large_one(recorded):
    found = {rate: deltas.measure(recorded[rate], bits_per_s=1e10) for rate in benchmark.RATES}
    small, large = found[1e-6], found[1e-3]
    assert len(small) == len(large) == 2 and small[0].bytes_full == 61_632
    assert all(update.changed_share < 0.1 for update in small) and all(update.changed_share > 0.3 for update in large)
    assert deltas.bytes_ratio(small) > 10 > deltas.bytes_ratio(large) > 1
    assert small[0].seconds.keys() == {"full", "delta"}


@pytest.mark.slow
def test_a_run_is_the_same_every_time_and_begins_with_the_weights_before_it(recorded):
    runs = [recorded[1e-3], training.record(training.TINY, 1e-3, updates=2)]
    assert len(runs[0]) == len(runs[1]) == 3
    for name, array in runs[0][0].items():
        assert array.tobytes() == recorded[1e-6][0][name].tobytes()
    for first, second in zip(*runs, strict=True):
        assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    assert any(runs[0][0][name].tobytes() != runs[0][1][name].tobytes() for name in runs[0][0])


def test_arrays_of_any_size_change_by_a_share_and_cross_whole_and_as_deltas(capsys):
    arrays = make_arrays(400_000)
    first, second = deltas.changing(arrays, 0.05, 1)
    bits = [(array.view(np.uint32), second[name].view(np.uint32)) for name, array in first.items()]
    changed = sum(int((before != after).sum()) for before, after in bits) / sum(before.size for before, _ in bits)
    assert first is arrays and 0.04 < changed <= 0.05
    found = deltas.measure(deltas.changing(arrays, 0.05, 2), None)
    assert len(found) == 2 and all(0.04 < update.changed_share <= 0.05 for update in found)
    assert all(update.bytes_delta < update.bytes_full / 4 for update in found)
    deltas.print_sized(found)
    said = capsys.readouterr().out
    assert re.search(r"delta, 4\.\d% changed: 0\.\d MB sent; full [\d,]+ ms \(.* GB/s\), delta", said), said


def test_the_slow_link_passes_everything_at_its_rate():
    source = socket.create_server(("127.0.0.1", 0))
    sent = bytes(range(256)) * 1024

    def serve():
        connection, _ = source.accept()
        connection.sendall(sent)
        connection.close()

    threading.Thread(target=serve, daemon=True).start()
    link = SlowLink(f"127.0.0.1:{source.getsockname()[1]}", bits_per_s=8e6)
    host, port = link.address.split(":")
    began, received = time.monotonic(), b""
    with socket.create_connection((host, int(port)), timeout=280) as connection:
        while piece := connection.recv(1 << 16):
            received += piece
    assert received == sent and time.monotonic() - began > 0.2  # 262 kB at 1 MB/s
    link.close()
    source.close()


@pytest.mark.slow
@pytest.mark.parametrize("bits_per_s", [None, 1e9])
def test_the_tree_is_measured_beside_a_server_that_serves_everybody(bits_per_s):
    found = distribution.measure(clients=2, nbytes=50_000, rounds=1, bits_per_s=bits_per_s, fanout=1)
    assert found.keys() == {"tree", "no tree"} and all(len(rounds) == 1 for rounds in found.values())
    assert all(0 < mean <= last for [(mean, last)] in found.values())
    with pytest.raises(AssertionError, match="fetches from other clients"):
        distribution.measure(clients=1, nbytes=50_000, rounds=1, bits_per_s=None, fanout=1)


def test_every_mark_is_printed_and_a_missed_one_is_the_exit_code(monkeypatch, capsys):
    measured = Measured(25_000_000, warm=True)
    seconds = {name: 1.0 for name in (*MEASURED, *MORE)}
    for name, value in (seconds | {"local": 0.0005, "raw Flight, into arrays": 0.5}).items():
        measured.add(name, value)
    updates = [deltas.Update(0.01, 100.0, 5.0, {"full": 0.3, "delta": 0.1})]
    monkeypatch.setattr(handover, "measure", lambda nbytes, rounds, repeats: measured)
    monkeypatch.setattr(training, "record", lambda size, rate, updates_: [])
    monkeypatch.setattr(deltas, "measure", lambda publications, *link: updates)
    assert benchmark.main(["--sizes", "25"]) == 1
    printed = capsys.readouterr().out
    assert "Flight is 1.00 of raw Flight, thrown away" in printed
    marks = dict(re.findall(r"^  (.*?) +[\d.]+  at (?:most|least) [\d.e+]+ +(reached|MISSED)$", printed, re.MULTILINE))
    assert marks == {
        "25 MB: local, ms": "reached",
        "25 MB: shared memory / memory copy": "reached",
        "25 MB: Flight / raw Flight, both into arrays": "MISSED",
        "learning rate 1e-06: bytes whole / delta": "reached",
        "learning rate 1e-06: time whole / delta, 1 Gbit/s": "reached",
    }


def test_what_the_machine_has_no_memory_for_is_skipped_aloud(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "available_bytes", lambda: 1e9)
    monkeypatch.setattr(training, "record", lambda *arguments: [])
    monkeypatch.setattr(
        deltas, "measure", lambda publications: [deltas.Update(0.01, 100.0, 5.0, {"full": 3, "delta": 1})]
    )
    assert benchmark.main(["--sizes", "2000"]) == 0
    assert "2,000 MB: skipped, 20.0 GB are not there" in capsys.readouterr().out
