"""Which options go together; what each does is tested beside its module."""

from pathlib import Path

import pytest

from penstock.dashboard import RolloutsRequest, show_rollouts
from penstock.types import ConfigError

HERE = Path("run")


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ({}, "table"),
        ({"step": 0, "lesson": "cats", "fate": "waiting", "limit": 3, "json": True}, "table"),
        ({"show": "cats-0-0", "color": "advantage"}, "show"),
        ({"show": "cats-0-0", "tokens": True}, "show"),
        ({"sql": "select 1", "json": True, "limit": 2}, "sql"),
        ({"export": "hf", "out": Path("x"), "select": "pairs", "min_margin": 0.0, "step": 3}, "export"),
    ],
)
def test_what_is_asked_for(words, mode):
    assert RolloutsRequest(HERE, **words).mode == mode


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"show": "x", "sql": "y"}, "--show and --sql do not go together"),
        ({"show": "x", "export": "hf"}, "--show and --export do not go together"),
        ({"tokens": True}, "--tokens goes with --show, not with the table of groups"),
        ({"color": "none", "sql": "x"}, "--color goes with --show, not with --sql"),
        ({"step": 0, "show": "x"}, "--step goes with the table of groups or --export, not with --show"),
        ({"out": Path("x")}, "--out goes with --export, not with the table of groups"),
        ({"min_reward": 0.0}, "--min-reward goes with --export"),
        ({"export": "hf", "json": True}, "--json goes with the table of groups or --show or --sql, not with --export"),
        ({"export": "csv"}, "--export is 'csv': it must be one of jsonl, parquet, hf"),
        ({"fate": "dead"}, "--fate is 'dead': it must be one of waiting, training, trained, stale_step"),
        ({"show": "x", "color": "red"}, "--color is 'red': it must be one of logprob, advantage, none"),
    ],
)
def test_what_does_not_go_together(words, message):
    with pytest.raises(ConfigError, match=message):
        _ = RolloutsRequest(HERE, **words).mode


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"export": "hf"}, "--export hf needs --out PATH"),
        ({"export": "hf", "out": Path("x"), "min_margin": 0.1}, "--min-margin goes with --select pairs"),
    ],
)
def test_an_export_says_what_it_needs(run_dir, printed, words, message):
    with pytest.raises(ConfigError, match=message):
        printed(lambda console: show_rollouts(RolloutsRequest(run_dir, **words), console))


def test_nothing_is_written_into_the_run(run_dir, printed):
    before = sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*"))
    for words in ({}, {"show": "cats-0-0"}, {"sql": "from rollouts"}):
        assert printed(lambda console, words=words: show_rollouts(RolloutsRequest(run_dir, **words), console))
    assert sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*")) == before


def test_without_a_tokenizer_a_note_and_the_text(tmp_path, printed):
    from tests.dashboard.sample_run import write_run

    directory = write_run(tmp_path / "run")
    directory.write_config({"model": {"tokenizer": str(tmp_path / "gone")}})
    out = printed(
        lambda console: show_rollouts(RolloutsRequest(directory.path, show="tools-0-0/1"), console), width=400
    )
    assert "gone/tokenizer.json is missing: the text of the turns is shown, without colours" in out and "\n5\n" in out
