import io

import pytest
from rich.console import Console

from penstock.overseer.terminal import CONTROL_LABELS, Progress, Sample, TerminalView, sparkline, step_line


@pytest.mark.parametrize(
    ("values", "line"),
    [([], ""), ([1.0], "▁"), ([0.0, 0.5, 1.0], "▁▅█"), ([2.0, 2.0], "▁▁"), ([0.0, 1.0, 0.25], "▁█▃")],
)
def test_sparklines_span_their_own_range(values: list[float], line: str):
    assert sparkline(values) == line


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_sparklines_leave_out_what_is_not_finite(broken: float):
    assert sparkline([0.0, broken, 0.5, 1.0]) == "▁▅█" and sparkline([broken]) == ""


def test_long_histories_are_averaged_into_the_width():
    assert sparkline([0.0, 0.0, 1.0, 1.0, 0.0, 1.0], width=3) == "▁█▅"
    assert len(sparkline([float(i) for i in range(1000)])) == 60


def progress() -> Progress:
    made = Progress("penstock · cats", steps=40, staleness_budget=1, phase="training", step=12)
    made.rewards.extend([0.1, 0.4, 0.8])
    made.samples.append(Sample("Say something", "the cat\nsat", 0.9, "cats"))
    made.units_per_s, made.staleness = 4321.0, 0.75
    made.ledger = {"started": 104, "in_flight": 8, "waiting": 0, "trained": 96}
    return made


def test_the_view_shows_step_reward_pace_staleness_ledger_and_text():
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(TerminalView(progress(), console).render())
    text = console.file.getvalue()
    for expected in (
        "penstock · cats", "step 12/40", "0.800", "▁▄█", "4,321 tok/s", "0.75 of at most 1 updates",
        "started 104  in_flight 8  trained 96", "Say something → the cat sat",
    ):  # fmt: skip
        assert expected in text
    assert "waiting" not in text


def test_without_a_terminal_every_step_is_one_plain_line():
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    shown = progress()
    with TerminalView(shown, console) as view:
        shown.lines.append(step_line(shown))
        shown.step = 13
        shown.lines.append(step_line(shown))
        view.tick()
        view.tick()
    lines = console.file.getvalue().splitlines()
    assert [line.split("]")[1].split()[:2] for line in lines] == [["step", "12/40"], ["step", "13/40"]]
    assert "reward 0.800" in lines[0]


def test_without_a_terminal_events_are_told_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("penstock.overseer.terminal.time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    shown = progress()
    with TerminalView(shown, console) as view:
        for at, words in ((100.0, "one"), (101.0, "two"), (102.0, "three"), (110.0, ""), (121.0, "")):
            now[0] = at
            if words:
                shown.note(words)
            view.tick()
    told = [line.split("] ")[1] for line in console.file.getvalue().splitlines()]
    assert told == ["one", "three (1 more since)"]


def test_quiet_prints_nothing():
    console = Console(file=io.StringIO(), force_terminal=True)
    with TerminalView(progress(), console, quiet=True) as view:
        view.tick()
    assert console.file.getvalue() == ""


def test_a_fleet_is_shown_in_its_own_words():
    shown = Progress("penstock · cartpole", 40, 8, "training", 12, wording=CONTROL_LABELS)
    shown.rewards.append(123.456)
    shown.units_per_s = 23456.0
    shown.lessons = {"easy": "CartPole-v1, 3 episodes", "hard": "CartPole-v0, 2 episodes"}
    shown.reward = {"easy": 200.0}
    shown.ledger = {"started": 10, "trained": 4}
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(TerminalView(shown, console).render())
    text = console.file.getvalue()
    for expected in ("return", "123.5", "23,456 steps/s   0.00 s/update", "fragments", "task", "easy", "200.0"):
        assert expected in text
    assert "step 12/40  return 123.5  23,456 steps/s  staleness 0.00" in step_line(shown)


@pytest.mark.parametrize(("speed", "words"), [(None, "–"), (0.0, "0"), (0.04, "0.04"), (9.96, "10"), (1234.5, "1,234")])
def test_a_line_never_says_zero_while_there_is_some_speed(speed, words):
    assert f"  {words} steps/s  " in step_line(Progress("t", 10, 0, units_per_s=speed, wording=CONTROL_LABELS))


def test_an_event_is_one_line_where_the_output_is_no_terminal_however_long_it_is():
    console = Console(file=io.StringIO(), width=40)
    progress = Progress("t", 10, 0, phase="training")
    progress.note("rollout-1 died: " + "its machine is gone " * 5)
    TerminalView(progress, console).tick()
    assert console.file.getvalue().count("\n") == 1


def test_a_notebook_gets_lines_and_no_markup(monkeypatch, capsys):
    class ZMQInteractiveShell:  # by whose name a notebook is known
        pass

    monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)
    shown = progress()
    shown.phase = "compiling"
    with TerminalView(shown) as view:
        view.tick()
    assert capsys.readouterr().out.endswith("] compiling\n")
