from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console

from penstock.cli import main
from penstock.overseer import doctor
from penstock.overseer.doctor import Check, examine, free_memory_bytes, judge_disk, judge_memory, print_checks
from penstock.weights import shared_memory

GIB = 2**30


@pytest.mark.parametrize(("free", "status"), [(8 * GIB, "ok"), (GIB, "warn"), (GIB // 4, "fail")])
def test_memory_is_judged_with_a_remedy(free, status):
    check = judge_memory(free)
    assert check.status == status and (check.remedy == "") == (status == "ok")


@pytest.mark.parametrize(("free", "status"), [(8 * GIB, "ok"), (GIB, "warn"), (GIB // 4, "fail")])
def test_disk_is_judged_with_a_remedy(free, status):
    check = judge_disk(free, Path("/data"))
    assert check.status == status and "/data" in check.detail and (check.remedy == "") == (status == "ok")


def test_free_memory_is_what_the_control_group_leaves(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\n")
    assert free_memory_bytes(meminfo, tmp_path) == 8_192_000_000
    (tmp_path / "memory.current").write_text("1000000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes(meminfo, tmp_path) == 8_192_000_000
    (tmp_path / "memory.max").write_text("3000000000\n")
    assert free_memory_bytes(meminfo, tmp_path) == 2_000_000_000


def test_free_memory_without_proc_is_a_positive_number(tmp_path):
    assert free_memory_bytes(tmp_path / "absent", tmp_path) > 2**20


def test_a_check_that_raises_is_a_failed_check_and_the_others_go_on(monkeypatch):
    def broken(name, module=""):
        def probe():
            raise ImportError("libcuda.so.1:\n cannot open")

        return probe

    monkeypatch.setattr(doctor, "_probe", broken)
    checks = {check.name: check for check in examine()}
    assert checks["parity"].status == checks["devices"].status == "fail"
    assert checks["parity"].detail == "ImportError: libcuda.so.1: cannot open" and checks["parity"].remedy
    assert checks["python"].status == "ok"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("penstock", "no-such-package"))
    check = doctor.check_packages()
    assert check.status == "fail" and check.detail == "missing: no-such-package"
    assert check.remedy == "pip install no-such-package"


def test_few_processors_are_a_warning(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
    assert doctor.check_processors().status == "warn"


def test_the_table_shows_status_detail_and_remedy(capsys):
    checks = [Check("memory", "warn", "1.0 GiB free", "close [other] programs"), Check("python", "ok", "3.11")]
    print_checks(checks, Console(width=100))
    shown = capsys.readouterr().out
    assert "warn" in shown and "→ close [other] programs" in shown
    assert "2 checks, 0 failed, 1 with a warning" in shown


def test_a_cache_of_programs_is_warned_of_on_a_cpu(monkeypatch):
    from penstock.overseer.doctor_probes import check_devices

    assert check_devices().status in ("ok", "warn")
    monkeypatch.setattr(
        "jax.config", SimpleNamespace(values={**jax.config.values, "jax_compilation_cache_dir": "/somewhere"})
    )
    check = check_devices()
    assert check.status == "warn" and "/somewhere" in check.detail and "JAX_COMPILATION_CACHE_DIR" in check.remedy


@pytest.mark.attack
def test_memory_of_killed_runs_is_named_and_cleaned(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(shared_memory, "memory_folder", lambda: tmp_path)
    assert doctor.check_abandoned_memory() == Check("memory of killed runs", "ok", "none")
    left = shared_memory.job_folder("killed")
    left.mkdir(mode=0o700)
    (left / "broadcaster.lock").touch()
    (left / "segment").write_bytes(bytes(8192))
    check = doctor.check_abandoned_memory()
    assert (check.status, check.detail) == ("warn", f"8.0 KiB in {left}") and "doctor --clean" in check.remedy
    assert main(["doctor", "--clean"]) == 0
    assert capsys.readouterr().out == f"removed {left}: 8.0 KiB of memory\n" and not left.exists()
    assert main(["doctor", "--clean"]) == 0
    assert capsys.readouterr().out == "nothing to remove: no killed run left memory behind\n"
