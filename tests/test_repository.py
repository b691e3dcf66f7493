"""The repository itself: its README tells the truth, its links lead somewhere, and nothing in it is local."""

import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "penstock"
UNLISTED = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
OWN_PATHS = ["/" + "work/", "shared" + "/", "/" + "root/", "/" + "tmp/plan", "/" + "home/"]


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def text_of(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return None


def readme_tree() -> dict[str, str]:
    """Entry → annotation, from the fenced block that begins with the package's path."""
    block = re.search(r"^```\w*\nsrc/penstock/\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None, "README.md has no fenced tree that begins with src/penstock/"
    lines = block.group(1).splitlines()
    form = re.compile(r"  (\S+) +(\S.*)")
    assert [line for line in lines if not form.fullmatch(line)] == [], "lines are '  entry  what it is'"
    return {match.group(1): match.group(2) for line in lines if (match := form.fullmatch(line))}


def test_the_tree_in_the_readme_is_the_tree_on_the_disk():
    on_disk = {path.name + "/" * path.is_dir() for path in PACKAGE.iterdir() if path.name not in UNLISTED}
    assert set(readme_tree()) == on_disk


def test_every_entry_of_the_tree_says_what_it_is():
    tree = readme_tree()
    assert all(len(annotation) >= 10 for annotation in tree.values())
    assert len(set(tree.values())) == len(tree)


def test_nothing_mentions_paths_of_one_machine():
    found = [
        f"{path.relative_to(ROOT)}: {needle}"
        for path in tracked_files()
        if (text := text_of(path)) is not None
        for needle in OWN_PATHS
        if needle in text
    ]
    assert found == []


@pytest.mark.attack
def test_nothing_is_pickled():
    exempt = {Path(__file__), ROOT / "tests" / "types" / "test_pickling.py"}
    pattern = re.compile(r"^\s*(import|from) (pickle|dill|cloudpickle|joblib|marshal|shelve)\b|allow_pickle=True", re.M)
    found = [
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if path.suffix == ".py" and path not in exempt and pattern.search(path.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.attack
def test_nothing_that_was_read_is_evaluated():
    """No text becomes code, and no word of a config a shell's; what a config names to be imported has one way."""
    pattern = re.compile(
        r"(?<![\w.])(eval|exec|execfile|__import__)\(|\byaml\.(load|full_load|unsafe_load|load_all)\b|\bos\.(system|popen)\("
        r"|shell=True|trust_remote_code=True"
    )
    found = [
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if path.suffix == ".py" and path.is_relative_to(ROOT / "src") and pattern.search(path.read_text("utf-8"))
    ]
    assert found == []


def test_constraints_pin_versions_and_hold_no_addresses():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0].casefold())
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.\-]+==[A-Za-z0-9_.\-+!]+", line)] == []


def test_every_direct_dependency_is_pinned():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["gym"], *extras["ray"]]
    names = {re.split(r"[^A-Za-z0-9_.\-]", entry)[0] for entry in wanted}
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {normal(name) for name in names} - {normal(name) for name in pinned} == set()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    "page", sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]), ids=lambda p: p.name
)
def test_relative_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert missing == []


def headings(page: Path) -> set[str]:
    """The names by which links lead to a page's headings."""
    text = re.sub(r"^```.*?^```$", "", html.unescape(page.read_text("utf-8")), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    names = [re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles]
    assert sorted(names) == sorted(set(names)), f"{page.name} has a heading twice: links lead to the first"
    return set(names)


@pytest.mark.parametrize(
    "page", sorted(p for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]), ids=lambda p: p.name
)
def test_links_to_headings_lead_to_one(page):
    targets = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text("utf-8"))
    ours = [(page.parent / path if path else page, name) for path, name in targets if "://" not in path]
    assert [f"{target.name}#{name}" for target, name in ours if name not in headings(target)] == []


def commands_of(target: str, folder: Path) -> str:
    """What `make` would run for a target in a checkout without a virtual environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    return subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    ).stdout


def test_make_train_installs_what_a_run_needs_and_no_more(tmp_path):
    commands = commands_of("train", tmp_path)
    assert re.findall(r"--editable (\S+)", commands) == ["."]
    assert commands.splitlines()[-1] == ".venv/bin/penstock train cats"


def test_make_test_installs_everything_in_one_go_before_it_checks(tmp_path):
    commands = commands_of("test", tmp_path)
    assert re.findall(r"--editable (\S+)", commands) == ['".[dev]"']
    assert commands.index("--editable") < commands.index("ruff check") < commands.index("/pyright >")
    assert commands.index("/pyright >") < commands.index("pytest --numprocesses"), "types are checked beside the tests"


def test_make_dist_builds_from_nothing(tmp_path):
    commands = commands_of("dist", tmp_path).splitlines()
    assert commands.index("rm -rf build dist") < len(commands) - 2, "setuptools packs what an earlier build left"
    assert commands[-2] == ".venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist ."


def test_what_is_said_to_be_tested_is_what_is_tested():
    """Versions in docs/support.md: tested ones are those of the constraints, allowed ones those of the project."""
    import tomllib

    page = (ROOT / "docs" / "support.md").read_text("utf-8")
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    pins["torch"] = re.search(r"torch==([\d.]+)", (ROOT / "Makefile").read_text())[1]
    tested = {"JAX": "jax", "Ray": "ray", "transformers": "transformers", "PyTorch": "torch", "Gymnasium": "gymnasium"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["ray"], f"python{project['requires-python']}"]
    least = dict(re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", each).groups() for each in wanted)
    rows = {cells[0]: cells[1:] for line in page.splitlines() if (cells := [c.strip() for c in line.split("|")[1:-1]])}
    for title, package in tested.items():
        assert rows[title][1].startswith(pins[package]), title
        assert rows[title][0].startswith(least.get(package, "not needed")), title
    assert rows["Python"][0].startswith(least["python"]) and rows["Python"][1].startswith("3.11,")
    assert f"s3fs {pins['s3fs']}" in rows["Object stores"][1]


GPU_FIGURES = ROOT / "scripts" / "gpu_figures.sh"


def test_what_a_machine_with_a_card_is_to_run_exists():
    """Each command of the script: its module, and every option that it gives."""
    done = subprocess.run(
        ["sh", str(GPU_FIGURES), "--dry-run"], capture_output=True, text=True, timeout=280, check=True,
        env={**os.environ, "PYTHON": "python"},
    )  # fmt: skip
    commands = done.stdout.splitlines()
    makefile = (ROOT / "Makefile").read_text("utf-8")
    smollm2 = re.findall(r"^SMOLLM2 := (\S+)$", makefile, re.MULTILINE)
    makefile = makefile.replace("$(SMOLLM2)", *smollm2)
    assert len(commands) >= 6 and all(command.startswith(("python -m ", "make ")) for command in commands)
    for target in [command.removeprefix("make ") for command in commands if command.startswith("make ")]:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
    for command in [command for command in commands if not command.startswith("make ")]:
        module, *arguments = command.removeprefix("python -m ").split()
        if module == "penstock":
            source = "\n".join(path.read_text("utf-8") for path in (ROOT / "src" / "penstock" / "cli").glob("*.py"))
            assert re.search(rf"def {arguments[0]}\(|\"{arguments[0]}\"", source), command
        else:
            source = (ROOT / (module.replace(".", "/") + ".py")).read_text("utf-8")
        missing = [option for option in arguments if option.startswith("--") and option[2:] not in source]
        options = [option for option in missing if option[2:].replace("-", "_") not in source]
        assert options == [], command


def test_figures_of_a_card_are_not_taken_on_a_cpu(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    for arguments, words in (([], "usage:"), ([str(tmp_path / "figures")], "JAX computes on a CPU here")):
        done = subprocess.run(
            ["sh", str(GPU_FIGURES), *arguments], capture_output=True, text=True, timeout=120, env=environment
        )
        assert done.returncode == 2 and words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_page_of_the_documentation_is_reached_from_its_index():
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+\.md)", index.read_text())}
    pages = {path.resolve() for path in (ROOT / "docs").rglob("*.md")} - {index.resolve()}
    assert pages - linked == set()


def test_the_licence_is_the_apache_licence_unmodified():
    import hashlib

    assert hashlib.md5((ROOT / "LICENSE").read_bytes()).hexdigest() == "3b83ef96387f14655fc854ddc3c6bd57"
