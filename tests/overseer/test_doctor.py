import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console

from penstock.cli import main
from penstock.model.language import Decoder, InitConfig, save_decoder
from penstock.overseer import doctor
from penstock.overseer.doctor import Check, examine, free_memory_bytes, judge_disk, judge_memory, print_checks
from penstock.text import Tokenizer
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


def test_where_compiled_programs_stay_is_told(monkeypatch, tmp_path):
    from penstock.overseer.doctor_probes import check_devices

    assert check_devices().detail.endswith("; compiled programs are not kept"), "in tests"
    values = {**jax.config.values, "jax_enable_compilation_cache": True, "jax_compilation_cache_dir": "gs://programs"}
    monkeypatch.setattr("jax.config", SimpleNamespace(values=values))
    assert check_devices().detail.endswith("; compiled programs are kept in gs://programs")


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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Of a run: the model is in ``model/``."""
    folder, tokenizer = tmp_path_factory.mktemp("checkpoints") / "step-4", Tokenizer.load("penstock")
    shape = InitConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, max_position_embeddings=48)
    decoder = Decoder.initialise(shape.model(tokenizer.vocab_size, "float32"), jax.random.key(0))
    save_decoder(decoder, folder / "model", tokenizer)
    return folder


SMALL = ["inference.max_slots=2", "inference.prefill_rows=1", "inference.prefill_lengths=[46]", "learner.row_length=64"]


def checked(capsys, *words: str) -> tuple[int, dict[str, str]]:
    """Exit code, and for each check its status and what was found."""
    code = main(["doctor", *words])
    rows, name = {}, ""
    told = capsys.readouterr()
    for line in told.out.splitlines():
        status, _, rest = line.strip().partition("  ")
        if status in ("ok", "warn", "fail"):
            name, _, rest = rest.strip().partition("  ")
            rows[name] = f"{status} {rest.strip()}"
        elif name:
            rows[name] += f" {line.strip()}"
    assert rows, told.err
    return code, rows


def test_a_checkpoint_is_tried_before_any_run(checkpoint, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    code, found = checked(capsys, str(checkpoint), "model.dtype=bfloat16", *SMALL)
    assert code == 0, found
    assert found["checkpoint"].startswith("ok llama, 9,488 parameters, bfloat16")
    assert re.search(r"ok KL \S+, .difference. mean \S+, p99 \S+, max \S+; \d+ tokens in bfloat16, the limit of the KL "
                     r"is \S+ at the start and 0.005 later; rounding alone makes a KL of", found["parity"])  # fmt: skip
    assert re.search(r"ok [\d.]+ s, \d+ programs side by side .*s  decode, window 48", found["engine's compilation"])
    assert re.search(r"4 programs .*[\d.]+ s  gradient", found["learner's compilation"])
    assert re.search(r"prefill [\d,]+ tokens/s .2 prompts of 47 tokens., decoding [\d,]+ tokens/s", found["generation"])
    assert re.search(r"ok [\d.]+ s on 8 answers", found["update"])
    assert re.search(r"ok a run takes 70\d.\d MiB .2 slots of 48 tokens, 1 × 64 at once.; taken here", found["memory"])


@pytest.mark.slow
def test_a_checkpoint_beyond_the_limit_of_parity_or_memory_fails_the_command(checkpoint, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("penstock.overseer.doctor_probes.free_memory_bytes", lambda: 2**20)
    code, found = checked(capsys, str(checkpoint / "model"), "learner.parity.kl_limit=1e-30", *SMALL)
    assert code == 1
    assert found["parity"].startswith("fail engine and learner disagree: KL") and "float32" in found["parity"]
    assert "→ a run would end at once" in found["parity"] and "kl_limit" in found["parity"]
    assert found["memory"].startswith("fail a run takes") and "learner.micro_batch_rows" in found["memory"]
    assert found["update"].startswith("warn not tried") and "learner's compilation" not in found


@pytest.mark.parametrize(("words", "part"), [
    (["nowhere"], "'nowhere' holds no config.json"),
    (["model.dtype=bfloat16"], "the checkpoint is missing; for example: penstock doctor runs/"),
    (["nowhere", "model.dtype=float16"], "model.dtype is 'float16': it must be one of 'float32' or 'bfloat16'"),
    (["nowhere", "dtype=bfloat16"], "unknown key dtype: did you mean model.dtype?"),
    (["nowhere", "elsewhere"], "'elsewhere' beside 'nowhere' is not of the form key=value"),
    (["nowhere", "--clean"], "--clean looks at no checkpoint"),
    (["damaged"], "damaged"),
])  # fmt: skip
def test_a_mistake_about_a_checkpoint_is_one_line(checkpoint, tmp_path, monkeypatch, capsys, words, part):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint / "model", tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"damaged")
    assert main(["doctor", *words]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("penstock: ") and part in line and shown.out == ""
