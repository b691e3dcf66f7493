"""Curves of runs pooled over seeds: the numbers that are drawn, and the picture that holds them."""

import csv
import json
import re
from pathlib import Path

import pytest
import yaml

from penstock.cli import main
from penstock.dashboard import PlotRequest, plot_runs
from penstock.types import ConfigError

T95 = {1: 12.7062, 2: 4.30265}
"""97.5% quantiles of Student's t by degrees of freedom."""


def write_run(path, rewards, seed=0, preset="grpo", start=1000.0, tokens=100.0, lives=((0, None),)):
    """A run of one update a second; `lives`: from which update each goes on, and up to which its rows are there."""
    path.mkdir(parents=True)
    config = {"seed": seed, "steps": 9, "learner": {"loss": {"preset": preset}}, "tracking": {"samples": seed > 0}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    metrics, events, now = [], [], start
    for life, (first, last) in enumerate(lives):
        events += [{"event": "resume", "time": now - 0.1}] if life else []
        events.append({"event": "start", "time": now})
        for step in range(first + 1, (len(rewards) if last is None else last) + 1):
            now += 1.0
            row = {"step": step, "time": now, "train/reward_mean": rewards[step - 1], "train/tokens": tokens,
                   "replay/staleness_mean": 1.0, "train/loss": 0.5, "replay/ledger/started": 10.0 * step,
                   "replay/ledger/trained": 8.0 * step, "replay/ledger/filtered": 2.0 * step,
                   "replay/ledger/evicted": 0.0}  # fmt: skip
            metrics.append(row)
            if step % 2 == 0:
                metrics.append({"step": step, "time": now + 0.5, "eval/a/reward_mean": rewards[step - 1],
                                "eval/b/reward_mean": 0.0})  # fmt: skip
        now += 50.0  # nobody is there
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    return str(path)


def drawn(tmp_path, runs, **named):
    said = plot_runs(PlotRequest(runs, data=tmp_path / "out.csv", **named))
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    panels = {}
    for row in rows:
        numbers = tuple(float(row[name]) if row[name] else None for name in ("mean", "low", "high"))
        x = row["x"] if row["by"] == "fate" else float(row["x"])
        panels.setdefault((row["panel"], row["line"]), []).append((x, *numbers, int(row["runs"])))
    return panels, said


def test_seeds_of_one_recipe_are_one_line_with_an_interval(tmp_path):
    runs = [write_run(tmp_path / f"cats-{seed}", [0.1 * seed, 0.2 * seed, 0.4], seed) for seed in (1, 2, 3)]
    panels, said = drawn(tmp_path, runs)
    ((_, name),) = {key for key in panels if key[0] == "reward"}
    assert name == "cats-1"
    first, second, third = panels["reward", name]
    half = T95[2] * 0.1 / 3**0.5
    assert first == pytest.approx((1, 0.2, 0.2 - half, 0.2 + half, 3), abs=1e-5)
    assert second[1] == pytest.approx(0.4) and third == pytest.approx((3, 0.4, 0.4, 0.4, 3))
    assert panels["held-out reward", name][0] == pytest.approx((2, 0.2, 0.2 - half, 0.2 + half, 3), abs=1e-5)
    assert [row[0] for row in panels["staleness (updates)", name]] == [1, 2, 3]
    assert {row[0]: row[1] for row in panels["rollouts by fate", name]} == pytest.approx(
        {"trained": 0.8, "filtered": 0.2}
    )
    assert said == [f"wrote {tmp_path / 'out.csv'}"]


def test_recipes_are_lines_named_by_what_differs(tmp_path):
    runs = [
        write_run(tmp_path / f"{preset}-{seed}", [0.1, 0.2], seed, preset)
        for preset in ("grpo", "dapo")
        for seed in (1, 2)
    ]
    panels, _ = drawn(tmp_path, runs)
    assert {line for panel, line in panels if panel == "reward"} == {'preset="grpo"', 'preset="dapo"'}
    panels, _ = drawn(tmp_path, [f"{'old' if 'grpo' in run else 'new'}={run}" for run in runs])
    assert {line for panel, line in panels if panel == "reward"} == {"old", "new"}
    assert all(row[-1] == 2 for row in panels["reward", "old"])


def test_lines_of_recipes_that_differ_in_much_are_named_by_their_directories(tmp_path):
    runs = [write_run(tmp_path / name, [0.1, 0.2], 1) for name in ("a/cats-20260101-000000", "b/cats-1", "words")]
    for number, run in enumerate(runs):
        config = yaml.safe_load(Path(run, "config.yaml").read_text())
        config["learner"] |= {f"a_key_of_some_length_{key}": number for key in range(9)}
        Path(run, "config.yaml").write_text(yaml.safe_dump(config))
    panels, _ = drawn(tmp_path, runs)
    assert {line for panel, line in panels if panel == "reward"} == {"cats", "cats-1", "words"}
    panels, _ = drawn(tmp_path, [f"{'a name that somebody chose, however long it may be, ' * 2}={runs[0]}", *runs[1:]])
    assert sorted(len(line) for panel, line in panels if panel == "reward")[-1] == 104


def test_what_a_resume_made_anew_supersedes_what_was_before(tmp_path):
    run = write_run(tmp_path / "cats", [0.1, 0.2, 0.3, 0.4], lives=((0, 3), (1, None)))
    panels, _ = drawn(tmp_path, [run])
    drawn_rows = [number for row in panels["reward", "cats"] for number in row[:2]]
    assert drawn_rows == pytest.approx([1, 0.1, 2, 0.2, 3, 0.3, 4, 0.4])
    assert all(row[2:] == (None, None, 1) for row in panels["reward", "cats"]), "of one run no interval is known"


def test_seconds_are_those_in_which_the_run_was_alive(tmp_path):
    run = write_run(tmp_path / "cats", [0.1, 0.2, 0.3, 0.4], lives=((0, 3), (1, None)))
    panels, _ = drawn(tmp_path, [run], by="seconds")
    # the first life lasts 3 s, of which updates 2 and 3 were lost; the second begins 50 s later
    assert [row[0] for row in panels["reward", "cats"]] == pytest.approx([1.0, 4.0, 5.0, 6.0])
    # what a resume tells before its start belongs to the life that begins, not to the one before


def test_tokens_are_those_that_were_trained_and_seeds_meet_on_a_grid(tmp_path):
    runs = [
        write_run(tmp_path / "a", [0.0, 1.0, 2.0], 1, tokens=100),
        write_run(tmp_path / "b", [0.0, 1.0, 2.0], 2, tokens=50),
    ]
    panels, said = drawn(tmp_path, runs, by="tokens")
    row = panels["reward", "a"]
    assert len(row) == 200 and row[0][0] == 100.0 and row[-1][0] == 150.0
    assert row[-1][1] == pytest.approx((0.5 + 2.0) / 2)
    assert said[0] == "reward: a ends at 150, with its shortest run; the longest goes to 300"


def test_a_line_ends_with_its_shortest_run(tmp_path):
    runs = [write_run(tmp_path / "a", [0.1] * 5, 1), write_run(tmp_path / "b", [0.1, 0.3], 2)]
    panels, said = drawn(tmp_path, runs, metrics=["train/reward_mean"])
    assert [row[0] for row in panels["train/reward_mean", "a"]] == [1, 2]
    assert said[0] == "train/reward_mean: a ends at 2, with its shortest run; the longest goes to 5"


def test_held_out_reward_is_of_the_lessons_that_the_run_has_now(tmp_path):
    """A resume removed b and added c: no step has numbers of all three."""
    run = write_run(tmp_path / "a", [0.0, 0.2, 0.4, 0.6], lives=((0, 2), (2, None)))
    metrics = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    metrics[-1] = metrics[-1].replace("eval/b/", "eval/c/")
    (tmp_path / "a" / "metrics.jsonl").write_text("\n".join(metrics) + "\n")
    config = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    for lessons, expected in ((["a", "c"], [(4.0, 0.3)]), (["a"], [(2.0, 0.2), (4.0, 0.6)])):
        config["curriculum"] = {"lessons": dict.fromkeys(lessons, {})}
        (tmp_path / "a" / "config.yaml").write_text(yaml.safe_dump(config))
        panels, _ = drawn(tmp_path, [run])
        assert [(x, round(mean, 6)) for x, mean, *_ in panels["held-out reward", "a"]] == expected


def test_control_runs_have_their_own_names_for_it(tmp_path):
    run = tmp_path / "pole"
    write_run(run, [0.0])
    rows = [{"step": step, "time": 1000.0 + step, "fleet/pole/reward_mean": 20.0 * step, "train/steps": 64.0,
             "eval/pole/return_mean": 30.0 * step} for step in (1, 2)]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    panels, said = drawn(tmp_path, [str(run)], by="tokens")
    assert [row[:2] for row in panels["reward", "pole"]] == [(64.0, 20.0), (128.0, 40.0)]
    assert [row[:2] for row in panels["held-out reward", "pole"]] == [(64.0, 30.0), (128.0, 60.0)]
    assert said[0] == f"staleness (updates): {run} has no such numbers"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing is to be written: give --out FILE.png, or --data FILE.csv"),
        (["--out", "x.gif"], r"--out x.gif: a picture's name ends in \.png, \.svg, \.pdf"),
        (["--data", "x.csv", "--by", "hour"], "--by is 'hour': it must be one of update, tokens, seconds"),
        (["--data", "cats/config.yaml/a/x.csv"], "--data cats/config.yaml/a/x.csv cannot be written: Not a directory"),
        (["--data", "x.csv", "--metric", "train/x"], "--metric train/x is in none of the runs; they have .*train/loss"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "cats", [0.1])
    assert main(["plot", run, *words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_seed_counts_once(tmp_path):
    runs = [write_run(tmp_path / name, [0.1], 7) for name in ("a", "b")]
    with pytest.raises(ConfigError, match=r"runs of one line need seeds of their own: .*a \(seed 7\), .*b \(seed 7\)"):
        drawn(tmp_path, runs)
    with pytest.raises(ConfigError, match="a run is given twice"):
        drawn(tmp_path, [runs[0], f"x={runs[0]}"])
    with pytest.raises(ConfigError, match="nosuch is not a run directory: .* give one that penstock train wrote"):
        drawn(tmp_path, [str(tmp_path / "nosuch")])


def test_without_matplotlib_the_line_says_what_helps(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    run = write_run(tmp_path / "cats", [0.1])
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[plot\]', or write the numbers alone with --data"):
        plot_runs(PlotRequest([run], out=tmp_path / "x.png"))


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib", reason="needs the extra plot: make test-trackers")


@pytest.mark.slow
def test_a_picture_holds_the_numbers_and_is_the_same_file_again(tmp_path, matplotlib, monkeypatch):
    runs = [write_run(tmp_path / f"r{n}", [0.1 * n, 0.2, 0.5], n, "grpo" if n < 3 else "dapo") for n in (1, 2, 3, 4)]
    from matplotlib.axes import Axes

    curves = []
    plot = Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda self, x, y, **named: curves.append((list(x), list(y))) or plot(self, x, y, **named)
    )
    for name in ("a.svg", "b.svg", "c.png", "d.png", "e.pdf", "f.pdf"):
        plot_runs(PlotRequest(runs, out=tmp_path / name))
    panels, _ = drawn(tmp_path, runs)
    of_first = {key: row for key, row in panels.items() if key[0] != "rollouts by fate"}
    wanted = [([row[0] for row in rows], [row[1] for row in rows]) for rows in of_first.values()]
    assert curves[: len(wanted)] == wanted
    for first, second in (("a.svg", "b.svg"), ("c.png", "d.png"), ("e.pdf", "f.pdf")):
        assert (tmp_path / first).read_bytes() == (tmp_path / second).read_bytes()
    assert b"<dc:date>" not in (tmp_path / "a.svg").read_bytes()
