import io
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from penstock.overseer.progress import CONTROL_LABELS, Progress, Sample
from penstock.overseer.terminal import RunSummary, TerminalView, print_summary, sparkline
from penstock.types import CompiledProgram, RolloutBatch, RolloutBatchStats


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


def conversation(asked: str = "Say something", answered: str = "the cat\nsat", reward: float = 0.9) -> Sample:
    return Sample((("user", asked), ("assistant", answered)), reward, "cats")


def progress() -> Progress:
    made = Progress("penstock · cats", steps=40, staleness_budget=1, phase="training", step=11)
    made.score.extend([0.1, 0.4])
    made.units_per_s = 4321.0
    made.note_rollouts({"rollout/cats/groups": 4.0, "rollout/cats/truncated_fraction": 0.125})
    made.note_update(12, 0.8, 0.75, METRICS)
    made.samples.append(conversation())
    made.ledger = {"started": 104, "in_flight": 8, "waiting": 0, "trained": 96}
    return made


METRICS = {
    "train/loss": -0.0123, "train/entropy": 1.934, "train/grad_norm": 0.4166, "train/response_tokens": 41.4,
    "train/zero_variance_groups": 0.25,
}  # fmt: skip


def shown(progress: Progress, width: int = 100, height: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(TerminalView(progress, console).render())
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def test_the_view_shows_step_reward_pace_staleness_ledger_and_text():
    text = "\n".join(shown(progress(), height=24))
    for expected in (
        "penstock · cats", "step 12/40", "0.800", "▁▄█  0.100 … 0.800", "4,321 tok/s", "0.75 of at most 1 updates",
        "started 104   in_flight 8   trained 96", "user       Say something", "assistant  the cat", "           sat",
        "zero variance 25%   truncated 12%   response 41 tokens   entropy 1.93",
        "               grad norm 0.417   loss -0.0123",
    ):  # fmt: skip
        assert expected in text
    assert "waiting" not in text and "ETA" not in text, "one update forecasts nothing"


def test_without_a_terminal_every_step_is_one_plain_line():
    console = Console(file=io.StringIO(), width=60, force_terminal=False)
    shown = progress()
    with TerminalView(shown, console) as view:
        shown.note_update(13, 0.9, 0.5, METRICS)
        view.tick()
        view.tick()
    lines = console.file.getvalue().splitlines()
    numbers = "zero variance 25%  truncated 12%  response 41 tokens  entropy 1.93  grad norm 0.417  4,321 tok/s"
    assert [line.split("] ")[1] for line in lines] == [
        f"step 12/40  reward 0.800  {numbers}  staleness 0.75",
        f"step 13/40  reward 0.900  {numbers}  staleness 0.50",
    ]


SIZES = [(80, 24), (60, 20), (140, 50), (200, 60), (30, 8), (20, 5)]
HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07", "a\rb\tc\x7f\x9b31m", "\u202eright to left\u2066", "word" * 500, "猫の世界" * 200,
    "😀👩\u200d🚀é" * 100, "[bold red]markup[/] [/nothing] :cat: \\[x]", "\ud800\ufffd", "line\n" * 300,
    "\n\n", "", " " * 400,
)  # fmt: skip


def hostile(text: str) -> Progress:
    made = progress()
    made.title = made.phase = text
    made.lessons = {f"{text}{number}": text for number in range(9)}
    made.reward = {f"{text}1": 0.5}
    made.ledger = {"started": 10**12, **{f"{text}{number}": 7 for number in range(9)}}
    made.compiling = {text: CompiledProgram(text, 1, 3, 0.1), "learner-0": CompiledProgram(text, 2, 3, 0.1)}
    made.note_evaluation(3, {f"eval/{text}/reward_mean": 0.5, "eval/dogs/reward_mean": -1e9})
    made.note(text)
    made.note(text)
    made.note_signal(f"no signal: {text}")
    for reward in (1.0, 0.0, -12345.678):
        made.samples.append(Sample((("user", text), (text, text), ("assistant", text)), reward, text))
    return made


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_overflows_whatever_is_written_and_nothing_of_it_acts_on_the_terminal(size, text):
    width, height = size
    lines = shown(hostile(text), width, height)
    assert len(lines) <= height and {cell_len(line) for line in lines} == {width}
    whole = "".join(lines)
    assert all(character.isprintable() or character == "\u200d" for character in whole)
    if "markup" in text and width > 100:
        assert "[bold red]markup[/] [/nothing] :cat:" in whole


@pytest.mark.parametrize("text", HOSTILE)
def test_plain_lines_are_one_line_each_whatever_is_written(text):
    console = Console(file=io.StringIO(), width=60, force_terminal=False)
    made = hostile(text)
    made.note_compiled(CompiledProgram(text, 1, 3, 7.5), text)
    told = len(made.lines)
    with TerminalView(made, console) as view:
        view.tick()
    lines = console.file.getvalue().split("\n")
    assert len(lines) == told + 2, "and a note, and nothing after the last line's end"
    assert all(character.isprintable() or character == "\u200d" for line in lines for character in line)


def rows(lines: list[str]) -> list[str]:
    """The labels of rows, in their order; conversations by their rewards."""
    return [line[2:16].strip() or "…" for line in lines[1:-1]]


def test_with_more_height_more_rows_appear_in_order_of_importance():
    made = progress()
    made.note_evaluation(0, {"eval/cats/reward_mean": 0.034})
    made.note_evaluation(10, {"eval/cats/reward_mean": 0.5})
    made.lessons = {"cats": "active", "dogs": "locked"}
    seen = [set(rows(shown(made, 80, height))) for height in range(5, 40)]
    assert len(seen[0]) == 1
    heights = {}
    for height, labels in zip(range(5, 40), seen, strict=True):
        for label in labels:
            heights.setdefault(label, height)
    order = ["reward", "pace", "held-out", "training", "staleness", "rollouts", "lesson", "entropy"]
    assert sorted(order, key=heights.__getitem__) == order
    assert heights["reward"] == 6 and heights["pace"] == 7 and heights["held-out"] == 8


def test_with_room_every_number_has_a_line_with_its_history_and_a_conversation_is_shown_whole():
    made = progress()
    made.note_update(13, 0.9, 0.5, {**METRICS, "train/entropy": 1.5})
    made.samples.append(conversation("How many cats?", "\n".join(f"cat {number}" for number in range(20)), 0.25))
    lines = shown(made, 140, 50)
    text = "\n".join(lines)
    assert "entropy        1.5        █▁  1.5 … 1.93" in text
    assert "zero variance  25%        ▁▁  25% " in text
    assert [line for line in lines if "cat 0 " in line] and [line for line in lines if "cat 19 " in line]
    assert " 0.25  cats" in text and " 0.90  cats" in text, "the older one is whole, too"


def test_a_small_terminal_stays_compact_and_says_what_of_a_conversation_it_leaves_out():
    made = progress()
    made.samples.append(conversation("How many cats?", "\n".join(f"cat {number}" for number in range(60)), 0.25))
    lines = shown(made, 80, 24)
    assert len(lines) == 22
    (gap,) = [line for line in lines if "more lines" in line]
    kept = sum(" cat " in line for line in lines if "→" not in line)
    assert f"… {60 - kept} more lines …" in gap and kept >= 4
    assert any(line.startswith("│  0.90 Say something → the cat sat") for line in lines)
    assert any("cat 59" in line for line in lines), "how it ends is kept"


def test_conversations_stay_for_a_moment_to_be_read(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("penstock.overseer.terminal.time.monotonic", lambda: now[0])
    console, made = Console(file=io.StringIO(), width=80, height=24), progress()
    view = TerminalView(made, console)
    for at, answer, expected in ((100.0, "one", "one"), (101.0, "two", "one"), (102.0, "three", "three")):
        now[0] = at
        made.samples.append(conversation("Count", answer))
        console.file = io.StringIO()
        console.print(view.render())
        assert f"assistant  {expected} " in console.file.getvalue()


@pytest.mark.parametrize("size", SIZES)
def test_a_terminal_is_drawn_within_its_size_and_left_empty(size):
    width, height = size
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True)
    with TerminalView(hostile("猫[x]"), console) as view:
        view.tick()
    drawn = console.file.getvalue()
    frame, _, end = drawn.rpartition("╯")
    assert "step 12/40"[: width - 4] in frame and 3 <= frame.count("\n") + 1 <= height
    assert end.count("\x1b[2K") == frame.count("\n") + 1, "every line that was drawn is taken away"


def test_while_programs_are_compiled_before_the_first_update_there_is_no_pace():
    made = Progress("t", 10, 0, "starting components", units_per_s=12.0)
    made.compiling = {"learner-0": CompiledProgram("gradient", 1, 4, 0.1)}
    text = "\n".join(shown(made, 80, 24))
    assert "tok/s" not in text and "1/4 compiled  gradient" in text
    made.compiling = {}
    assert "12 tok/s" in "\n".join(shown(made, 80, 24))


def test_no_signal_is_shown_as_long_as_it_lasts():
    made = progress()
    made.note_signal("no signal: all 16 groups of 10 updates (3–12) had equal rewards: 0. What helps: an easier lesson")
    lines = shown(made, 60, 20)
    assert lines[4].startswith("│ no signal: all 16 groups of 10 updates (3–12) had equal")
    made.note_signal("")
    assert not any("no signal" in line for line in shown(made, 60, 20))


def test_the_summary_tells_of_stretches_without_signal():
    console = Console(file=io.StringIO(), width=60)
    told = "no signal: all 16 groups of 10 updates (3–12) had equal rewards: 0. What helps: [bold]an easier lesson"
    print_summary(RunSummary(Path("runs/x"), 5, 5, True, 2.0, 1.0, no_signal=(told,)), console)
    lines = console.file.getvalue().splitlines()
    assert lines[:2] == [told, "finished at step 5/5 after 2 s (1 s of training)"]


def test_the_summary_tells_why_training_ended_before_its_last_step():
    console = Console(file=io.StringIO(), width=60)
    told = "every lesson has graduated (curriculum.when_complete: stop)"
    print_summary(RunSummary(Path("runs/x"), 8, 60, True, 2.0, 1.0, goal=told), console)
    first = console.file.getvalue().splitlines()[0]
    assert first == f"finished at step 8/60 after 2 s (1 s of training): {told}"


def test_the_summary_tells_of_versions_without_evidence_of_parity():
    console, of_last = Console(file=io.StringIO(), width=100), {"train/parity_unchecked": 2.0}
    print_summary(RunSummary(Path("runs/x"), 5, 5, True, 2.0, 1.0, metrics=of_last), console)
    first = console.file.getvalue().splitlines()[0]
    assert first == "engine and learner not compared: 2 versions and engines (train/parity_unchecked)"


@pytest.mark.parametrize("warm_start", [True, False])
def test_a_warm_start_has_its_row_even_where_it_changed_nothing(warm_start):
    console = Console(file=io.StringIO(), width=60)
    nothing = {"cats": RolloutBatchStats.of("cats", RolloutBatch(()), 0.5)}
    told = {"untrained": nothing, "before": nothing, "after": nothing}
    print_summary(RunSummary(Path("runs/x"), 5, 5, True, 2.0, 1.0, warm_start=warm_start, **told), console)
    rows = [line.split("│")[1].strip() for line in console.file.getvalue().splitlines() if line.startswith("│")]
    assert rows == ["untrained", *(["warm start"] if warm_start else []), "trained", "prompts", "status"]


def test_returns_have_students_interval_whatever_their_size():
    """Wilson's would know that no return exceeds 1, and an interval of one episode must not be read as markup."""

    def results(**returns):
        rows = ((task, np.array(values)) for task, values in returns.items())
        return {
            task: RolloutBatchStats(
                task, len(values), len(values), float(values.mean()), 0.0, 0.0, 1.0, 0.0, tuple(values.tolist()),
                tuple(map(str, range(len(values)))),
            )
            for task, values in rows
        }  # fmt: skip

    console = Console(file=io.StringIO(), width=200)
    after = results(small=[3e-5, 3e-5], huge=[-3e31, -3e31], one=[0.5])
    print_summary(RunSummary(Path("runs/x"), 5, 5, True, 2.0, 1.0, after=after, kind="control"), console)
    (row,) = (line for line in console.file.getvalue().splitlines() if line.startswith("│ trained"))
    assert [cell.strip() for cell in row.split("│")[2:-1]] == [
        "3e-05 [3e-05, 3e-05]", "-3e+31 [-3e+31, -3e+31]", "0.500 (one alone: no interval)"
    ]  # fmt: skip


def test_without_a_terminal_events_are_told_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("penstock.overseer.terminal.time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    shown = progress()
    shown.lines.clear()
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
    made = Progress("penstock · cartpole", 40, 8, "training", 11, wording=CONTROL_LABELS)
    made.units_per_s = 23456.0
    made.note_update(12, 123.456, 0.0, {"train/explained_variance": 0.5, "train/loss": 3.0})
    made.note_evaluation(10, {"eval/easy/return_mean": 101.0, "eval/easy/return_max": 500.0})
    made.lessons = {"easy": "CartPole-v1, 3 episodes", "hard": "CartPole-v0, 2 episodes"}
    made.reward = {"easy": 200.0}
    made.ledger = {"started": 10, "trained": 4}
    text = "\n".join(shown(made))
    for expected in ("return", "123.5", "23,456 steps/s", "fragments", "task", "easy", "200.0", "easy 101.0 (step 10)"):
        assert expected in text
    assert "500" not in text
    assert made.update_words() == "step 12/40  return 123.5  explained variance 0.50  23,456 steps/s  staleness 0.00"


@pytest.mark.parametrize(
    ("speed", "words"), [(None, ""), (0.04, "  0.04 steps/s"), (9.96, "  10 steps/s"), (1234.5, "  1,234 steps/s")]
)
def test_a_line_never_says_zero_while_there_is_some_speed(speed, words):
    made = Progress("t", 10, 0, units_per_s=speed, wording=CONTROL_LABELS)
    assert made.update_words() == f"step 0/10  return –{words}  staleness 0.00"


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
    with TerminalView(shown) as view:
        view.tick()
    out = capsys.readouterr().out
    assert out.startswith("[0:00] step 12/40  reward 0.800") and "\x1b" not in out
