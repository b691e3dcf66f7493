import numpy as np
import pytest

from penstock.inference.config import EngineConfig
from penstock.inference.meter import ThroughputMeter
from penstock.inference.scheduler import PrefixIndex, RunningBatch, padded_length, plan_admission
from penstock.inference.sequence import GenerationRequest, PendingRequest, Response
from penstock.types import Decoding, WeightVersion

CONFIG = EngineConfig(max_slots=6, max_seq_len=100, prefill_rows=2, prefill_lengths=(4, 8))
VERSION = WeightVersion(0, 0)


def response(*prompt):
    request = GenerationRequest(np.array(prompt, np.int32), Decoding(), 0)
    return Response(PendingRequest(request, (), 4), 0)


@pytest.fixture
def prefixes():
    return PrefixIndex()


def test_samples_of_one_prompt_share_a_row_and_prompts_share_a_prefill(prefixes):
    same, other = response(1, 2, 3), response(4, 5)
    admission = plan_admission([(0, same), (1, other), (3, response(1, 2, 3))], prefixes, CONFIG, VERSION)
    (prefill,) = admission.prefills
    assert not admission.fork and admission.hits == 0
    assert prefill.tokens.tolist() == [[1, 2, 0, 0], [4, 0, 0, 0]]  # the last token is decoded, not prefilled
    assert prefill.source.tolist() == [0, 1, -1, 0, -1, -1]


def test_prefills_are_split_by_rows_and_length(prefixes):
    arrivals = [response(*range(i, i + 4)) for i in range(3)] + [response(*range(9)), response(*range(10))]
    admission = plan_admission(list(enumerate(arrivals)), prefixes, CONFIG, VERSION)
    assert [prefill.tokens.shape for prefill in admission.prefills] == [(2, 4), (2, 4), (2, 8), (1, 98)]
    assert [prefill.source.tolist()[:5] for prefill in admission.prefills] == [
        [0, 1, -1, -1, -1], [-1, -1, 0, -1, -1], [-1, -1, -1, 0, -1], [-1, -1, -1, -1, 0],
    ]  # fmt: skip


def test_a_prompt_that_is_cached_is_copied_from_its_lowest_slot(prefixes):
    plan_admission([(1, response(1, 2)), (2, response(1, 2))], prefixes, CONFIG, VERSION)
    admission = plan_admission([(4, response(1, 2))], prefixes, CONFIG, VERSION)
    assert admission.prefills == ()
    assert admission.fork == {4: (1, 1)} and admission.hits == 1


def test_a_slot_that_is_overwritten_no_longer_lends_its_prompt(prefixes):
    plan_admission([(1, response(1, 2)), (2, response(1, 2))], prefixes, CONFIG, VERSION)
    plan_admission([(1, response(7, 8))], prefixes, CONFIG, VERSION)
    assert prefixes.find(np.array([1, 2], np.int32)) == [2]
    plan_admission([(2, response(7, 8))], prefixes, CONFIG, VERSION)
    assert prefixes.find(np.array([1, 2], np.int32)) == []


def test_what_is_overwritten_in_the_same_admission_lends_nothing(prefixes):
    plan_admission([(0, response(1, 2)), (3, response(7, 8, 9))], prefixes, CONFIG, VERSION)
    arrivals = [(0, response(3, 4)), (1, response(1, 2)), (3, response(7, 8, 9)), (4, response(7, 8, 9))]
    admission = plan_admission(arrivals, prefixes, CONFIG, VERSION)
    assert admission.fork == {4: (3, 2)} and admission.hits == 2  # slot 3 holds its prompt already
    assert admission.prefills[0].tokens[:, 0].tolist() == [3, 1]
    assert prefixes.find(np.array([1, 2], np.int32)) == [1] and prefixes.find(np.array([7, 8, 9], np.int32)) == [3, 4]


def test_responses_take_the_slots_that_hold_their_prompts_before_others_take_any(decoder, monkeypatch):
    batch = RunningBatch(decoder, CONFIG, ThroughputMeter())
    runner, done = batch._runner, []
    monkeypatch.setattr(runner, "fork", lambda sources: done.append(sources))
    monkeypatch.setattr(runner, "prefill", lambda tokens, source: done.append(source.tolist()))
    batch.admit([response(1, 2), response(3, 4), response(5, 6)], WeightVersion(0, 0), fresh_start=True)
    assert done == [[0, 1, -1, -1, -1, -1], [-1, -1, 0, -1, -1, -1]]
    batch.clear()
    done.clear()
    batch.admit(
        [response(3, 4), response(3, 4), response(1, 2), response(7, 8)], WeightVersion(0, 0), fresh_start=False
    )
    held = {slot: each.prompt.tolist() for slot, each in batch._slots.occupied()}
    assert held == {0: [1, 2], 1: [3, 4], 2: [3, 4], 3: [7, 8]}
    assert done[0] == {2: (1, 1)} and [i for i, row in enumerate(done[1]) if row >= 0] == [3]


def test_a_cleared_index_shares_nothing(prefixes):
    plan_admission([(0, response(1, 2))], prefixes, CONFIG, VERSION)
    prefixes.clear()
    assert prefixes.find(np.array([1, 2], np.int32)) == []


def test_a_prompt_of_one_token_needs_no_cache(prefixes):
    assert plan_admission([(0, response(1)), (1, response(1))], prefixes, CONFIG, VERSION).prefills == ()


@pytest.mark.parametrize(("prompt_tokens", "length"), [(1, 4), (5, 4), (6, 8), (9, 8), (10, 98), (99, 98)])
def test_padded_lengths(prompt_tokens, length):
    assert padded_length(prompt_tokens, CONFIG) == length
