import numpy as np
import pytest

from penstock.inference.config import EngineConfig
from penstock.inference.meter import ThroughputMeter
from penstock.inference.scheduler import PrefixIndex, RunningBatch, plan_admission
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
    assert prefixes.longest(np.array([1], np.int32)) == (2, 1)
    plan_admission([(2, response(7, 8))], prefixes, CONFIG, VERSION)
    assert prefixes.longest(np.array([1], np.int32)) == (-1, 0)


def test_what_is_overwritten_in_the_same_admission_lends_nothing(prefixes):
    plan_admission([(0, response(1, 2)), (3, response(7, 8, 9))], prefixes, CONFIG, VERSION)
    arrivals = [(0, response(3, 4)), (1, response(1, 2)), (3, response(7, 8, 9)), (4, response(7, 8, 9))]
    admission = plan_admission(arrivals, prefixes, CONFIG, VERSION)
    assert admission.fork == {4: (3, 2)} and admission.hits == 2  # slot 3 holds its prompt already
    assert admission.prefills[0].tokens[:, 0].tolist() == [3, 1]
    assert prefixes.longest(np.array([1], np.int32)) == (1, 1)
    assert [prefixes.common(slot, np.array([7, 8], np.int32)) for slot in range(5)] == [0, 0, 0, 2, 2]


def test_responses_take_the_slots_that_hold_their_prompts_before_others_take_any(decoder, monkeypatch):
    batch = RunningBatch(decoder, CONFIG, ThroughputMeter())
    runner, done = batch.runner, []
    monkeypatch.setattr(runner, "fork", lambda sources: done.append(sources))
    monkeypatch.setattr(runner, "prefill", lambda tokens, source: done.append(source.tolist()))
    batch.admit([response(1, 2), response(3, 4), response(5, 6)], WeightVersion(0, 0), fresh_start=True)
    assert done == [[0, 1, -1, -1, -1, -1], [-1, -1, 0, -1, -1, -1]]
    batch.clear()
    done.clear()
    batch.admit(
        [response(3, 4), response(3, 4), response(1, 2), response(7, 8)], WeightVersion(0, 0), fresh_start=False
    )
    held = {slot: each.prompt.tolist() for slot, each in batch.slots.occupied()}
    assert held == {0: [1, 2], 1: [3, 4], 3: [3, 4], 4: [7, 8]}  # 2 still holds what nobody asks for now
    assert done[0] == {3: (1, 1)} and [i for i, row in enumerate(done[1]) if row >= 0] == [4]


def test_a_cleared_index_shares_nothing(prefixes):
    plan_admission([(0, response(1, 2))], prefixes, CONFIG, VERSION)
    prefixes.clear()
    assert prefixes.longest(np.array([1], np.int32)) == (-1, 0)
    prefixes.note(0, np.array([1], np.int32))  # of a response that ran meanwhile
    assert prefixes.longest(np.array([1], np.int32)) == (-1, 0)


def test_a_prompt_of_one_token_needs_no_cache(prefixes):
    assert plan_admission([(0, response(1)), (1, response(1))], prefixes, CONFIG, VERSION).prefills == ()


@pytest.mark.parametrize(("prompt_tokens", "length"), [(1, 4), (5, 4), (6, 8), (9, 8), (10, 98), (99, 98)])
def test_padded_lengths(prompt_tokens, length):
    assert CONFIG.padded_length(prompt_tokens) == length


TURNS = EngineConfig(max_slots=6, max_seq_len=200, prefill_chunk=16, prefill_lengths=(4, 8))


@pytest.fixture
def spoken(prefixes):
    """Slot 1 holds a turn and its answer, tokens 0 to 59; slot 2 another one, 100 to 119."""
    plan_admission([(1, response(*range(50))), (2, response(*range(100, 110)))], prefixes, TURNS, VERSION)
    prefixes.note(1, np.arange(60, dtype=np.int32))
    prefixes.note(2, np.arange(100, 120, dtype=np.int32))
    return prefixes


def rests(admission):
    assert not admission.prefills
    return [(f.slots, f.done, f.rest.tolist()) for f in (*admission.short, *admission.long)]


def test_a_next_turn_prefills_what_is_new(spoken):
    turn = response(*range(60), 7, 8, 9)
    assert spoken.home(turn.prompt[:-1], [0, 1, 2]) == 1
    admission = plan_admission([(1, turn)], spoken, TURNS, VERSION, whole=32)
    assert rests(admission) == [([1], 60, [7, 8])] and not admission.fork and not admission.long
    assert (admission.hits, admission.cached) == (1, 60)


def test_a_history_that_was_rewritten_shares_what_stands_before_the_change(spoken):
    turn = response(*range(40), *range(45, 63))
    admission = plan_admission([(1, turn)], spoken, TURNS, VERSION, whole=32)
    assert rests(admission) == [([1], 40, [*range(45, 62)])] and admission.cached == 40
    other = response(5, *range(1, 60))
    assert spoken.home(other.prompt[:-1], [0, 1, 2]) is None  # the first token differs: nothing is shared
    assert plan_admission([(0, other)], spoken, TURNS, VERSION, whole=32).hits == 0


def test_who_shares_a_beginning_only_takes_a_copy_and_leaves_what_is_there(spoken):
    one, other = response(*range(20), 90, 91), response(*range(20), 95, 96, 97)
    assert spoken.home(one.prompt[:-1], [0, 1, 2]) is None  # 20 of 60 tokens
    admission = plan_admission([(3, one), (4, other), (5, one)], spoken, TURNS, VERSION, whole=32)
    assert admission.fork == {3: (1, 20), 4: (1, 20)}
    assert rests(admission) == [([3, 5], 20, [90]), ([4], 20, [95, 96])]
    assert (admission.hits, admission.cached) == (3, 60)
    assert spoken.common(1, np.arange(60, dtype=np.int32)) == 60


def test_a_long_rest_goes_by_chunks(spoken):
    admission = plan_admission([(1, response(*range(60), *range(60)))], spoken, TURNS, VERSION, whole=32)
    assert [(f.slots, f.done) for f in admission.long] == [([1], 60)] and not admission.short
    assert spoken.common(1, np.arange(60, dtype=np.int32)) == 60  # the rest is noted when it is there


@pytest.mark.parametrize(("common", "text", "used"), [(1, 70, 0), (15, 70, 15), (1, 7, 0), (7, 7, 7), (0, 7, 0)])
def test_what_saves_nothing_is_not_shared(prefixes, common, text, used):
    prefixes.begin(0, np.zeros(common, np.int32))
    admission = plan_admission([(1, response(*[0] * common, *[1] * (text + 1 - common)))], prefixes, TURNS, VERSION, 32)
    assert admission.cached == used and (admission.fork == ({1: (0, used)} if used else {}))


def test_what_holds_nothing_and_then_what_was_used_longest_ago_is_taken_first(spoken):
    assert spoken.oldest([1, 2, 4], 2) == [4, 1]
    assert spoken.oldest([1, 2], 1) == [1]
    spoken.touch(1)
    assert spoken.oldest([1, 2], 1) == [2]
