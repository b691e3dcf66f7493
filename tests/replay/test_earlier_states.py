"""Checkpoints and files of an earlier revision mean what they meant there, down to what is trained next."""

import json
from pathlib import Path

import pytest
from tests.replay.earlier_states import RUNS, resume_open, resume_paced

EARLIER = json.loads(Path(__file__).with_name("earlier_states.json").read_text())


def as_stored(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("run", RUNS)
def test_a_paced_run_goes_on_as_it_did(sim, tmp_path, run):
    made = EARLIER[run]
    assert as_stored(resume_paced(sim, tmp_path, run, made)) == made["followed"]


def test_an_open_buffer_goes_on_as_it_did(sim, tmp_path):
    made = EARLIER["open"]
    assert as_stored(resume_open(sim, tmp_path, made)) == made["followed"]


def test_the_states_have_something_to_bring_back():
    states = EARLIER["asynchronous"]["states"]
    assert states["issuer"]["outstanding"] and states["replay"]["alive"] and states["replay"]["recorded"]
    assert EARLIER["open"]["states"]["alive"] and EARLIER["open"]["states"]["admission"]["admitted"]
    for run in EARLIER.values():
        assert any(run["followed"]["trained"])
