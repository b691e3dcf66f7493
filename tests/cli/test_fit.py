"""`penstock fit`: a run compiled for this machine, and what it refuses."""

import json

import pytest

TINY = [
    "cats", "model.init.hidden_size=8", "model.init.num_hidden_layers=1", "model.init.intermediate_size=16",
    "inference.max_slots=4", "learner.micro_batch_rows=1",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_is_compiled_for_this_machine_and_reported(penstock):
    result = penstock("fit", *TINY, "--json")
    assert result.returncode == 0
    found = json.loads(result.stdout)
    assert found["fits"] and found["note"] == "compiled, not run: not yet measured"
    names = {program["name"] for program in found["programs"]}
    assert {"gradient", "optimiser step", "decode", "fork"} <= names
    assert found["total_bytes"] == sum(found["parts"].values()) > found["parts"]["the process itself"] > 2**29
    table = penstock("fit", *TINY, "--rows", "64,128")
    assert table.returncode == 0 and table.stdout.count("yes") == 2


LONG = ["learner.row_length=1048576", "inference.max_seq_len=1048576", "model.init.max_position_embeddings=1048576"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "h900:1"], "--target is 'h900:1'"),
        (["--rows", "4096,many"], "--rows has 'many': give numbers of tokens"),
        (["--models", "9b"], "--models names '9b'"),
        (["--rows", "8"], "max_output_tokens is 12"),
        (["--rows", ""], "--rows is empty"),
        (["--rows", "64", "learner.row_length=128"], "--rows takes the place of learner.row_length: leave one of"),
        (["--rows", "64", "inference={max_seq_len: 32}"], "--rows takes the place of inference.max_seq_len"),
        (["--models", "0.5b", "model.init.hidden_size=8"], "--models takes the place of model.init"),
        (["--models", " ,"], "--models is empty"),
        (["learner.micro_batch_rows=65536", *LONG], "nothing was compiled"),
        (["inference.max_slots=65536", *LONG], "nothing was compiled"),
    ],
)
def test_bad_words_are_one_line(penstock, words, message):
    result = penstock("fit", "cats", *words)
    assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_control_policies_are_not_compiled(penstock):
    assert "trains a control policy" in penstock("fit", "cartpole").stderr
