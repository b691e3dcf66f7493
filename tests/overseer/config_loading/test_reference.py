"""The reference of all keys is complete, and docs/config.md is what the models say."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock.overseer.config_loading import all_keys, load_config
from penstock.overseer.config_loading.reference import KINDS, look_up, page, print_key
from penstock.types import ConfigError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "config.md"


def test_the_page_is_what_the_models_say():
    assert PAGE.read_text("utf-8") == page(), "docs/config.md is out of date: run scripts/make_config_page.py"


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_type_and_a_meaning(kind):
    keys = all_keys(KINDS[kind])
    assert [key.path for key in keys if not key.meaning or key.meaning.startswith("See ")] == []
    assert [key.path for key in keys if not key.takes or "typing" in key.takes or "[" in key.takes] == []
    assert [key.path for key in keys if not key.default and key.model is None] == []


def test_every_key_stands_on_the_page_once_per_kind_or_is_referred_to():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    language = all_keys(KINDS["language runs"])
    assert len(rows) >= len(language) > 150
    assert "| `learning_rate` | number ≥ 0 | `1e-05` | Peak; 0 trains nothing (a control). |" in rows
    assert "| `steps` | whole number ≥ 0 | *required* | Number of updates. |" in rows
    assert "| `max_slots` | whole number > 0, ≤ 65536 | `16` | Responses that are generated at the same time. |" in rows
    assert "| `max_slots` | whole number > 0, ≤ 65536 | `64` | Responses that are generated at the same time. |" in rows
    assert "As in [language runs](#overseer)." in page()


def test_one_entry_where_kinds_agree_and_two_where_they_differ():
    (private,) = look_up("overseer.private")
    assert private.kinds == ("language runs", "control runs")
    assert (private.key.takes, private.key.default, private.keys) == ("true or false", "false", ())
    rates = look_up("learner.optimizer.learning_rate")
    assert [(rate.kinds, rate.key.default) for rate in rates] == [
        (("language runs",), "1e-05"), (("control runs",), "0.0003"),
    ]  # fmt: skip


def test_names_of_the_users_own_and_what_is_below_them():
    (lesson,) = look_up("curriculum.lessons.mine")
    assert lesson.key.path == "curriculum.lessons" and "environment" in [key.path.split(".")[-1] for key in lesson.keys]
    (threshold,) = look_up("curriculum.lessons.*.stop_threshold")
    assert look_up("curriculum.lessons.mine.stop_threshold") == [threshold]
    assert threshold.key.takes == "number ≥ 0, ≤ 1" and threshold.key.default == "1"
    (argument,) = look_up("curriculum.lessons.mine.environment.env_args.anything")
    assert argument.key.path == "curriculum.lessons.*.environment.env_args"


def test_the_end_of_a_key_finds_all_that_end_so_and_nothing_that_only_sounds_alike():
    (stops,) = look_up("stop_tokens")
    assert (stops.key.path, stops.kinds) == ("curriculum.lessons.*.sampling_params.stop_tokens", ("language runs",))
    assert [each.key.path for each in look_up("temperature")] == [
        "curriculum.lessons.*.sampling_params.temperature", "curriculum.temperature",
    ]  # fmt: skip
    assert look_up("optimizer.learning_rate") == look_up("learner.optimizer.learning_rate")
    assert {each.key.path for each in look_up("steps")} == {"steps"}  # a whole key is itself alone
    console = Console(width=120, record=True, file=io.StringIO())
    print_key("max_output_tokens", load_config("cats"), console)
    assert "curriculum.lessons.cats.sampling_params.max_output_tokens: 12" in console.export_text()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("lr", "unknown key lr: did you mean learner.optimizer.learning_rate?"),
        ("learner.row_lenght", "unknown key learner.row_lenght: did you mean learner.row_length?"),
        (
            "beta",
            "unknown key beta: language runs: did you mean learner.kl.coefficient?; "
            "control runs: did you mean learner.reference_kl.coefficient?",
        ),
        ("weights.zzz", "unknown key weights.zzz: in weights there are advertise, bfloat16, chunk_bytes, "),
        ("zzz", "unknown key zzz: penstock config lists the sections: async, curriculum, "),
        ("", "unknown key : "),
    ],
)
def test_an_unknown_key_is_refused_with_what_was_meant(key, message):
    with pytest.raises(ConfigError) as caught:
        look_up(key)
    assert str(caught.value).startswith(message)


def test_what_a_recipe_holds_is_printed_with_the_meaning():
    console = Console(width=120, record=True, file=io.StringIO())
    print_key("learner.optimizer.learning_rate", load_config("cats", ["learner.optimizer.learning_rate=0.25"]), console)
    shown = console.export_text()
    assert "0.25" in shown and "1e-05" in shown and "Peak; 0 trains nothing" in shown and "control runs" not in shown
    print_key("curriculum.lessons.*.success_threshold", load_config("cats"), console)
    assert "curriculum.lessons.cats.success_threshold: " in console.export_text()
    print_key("learner.parity", load_config("cats", ["learner.parity.every=7"]), console)
    shown = console.export_text()
    assert "here" in shown and "7" in shown and "canary_prompts" in shown
