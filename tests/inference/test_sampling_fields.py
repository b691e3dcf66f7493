"""A sampling parameter is declared once: what is in `SAMPLING_FIELDS` goes all the way from key to stored row."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from penstock.curriculum import SamplingParams
from penstock.inference import EngineConfig, GenerationRequest
from penstock.inference.codec import PenstockDialect
from penstock.inference.scheduler import SlotTable
from penstock.inference.schema import CompletionBody, read_body
from penstock.inference.sequence import PendingRequest, Response, check_request
from penstock.rundir import records_from_table, table_from_records
from penstock.types import (
    SAMPLING_FIELDS,
    ConfigError,
    Decoding,
    GenerationCall,
    Rollout,
    RolloutMetadata,
    RolloutRecord,
)

VALUES = {name: 7 if field.dtype is np.int32 else 0.25 for name, field in SAMPLING_FIELDS.items()}


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_a_parameter_goes_from_its_key_over_the_wire_into_a_slot_and_a_row(name, codec):
    decoding = SamplingParams.model_validate({name: VALUES[name]}).decoding(codec)
    prompt = np.array([1, 2], np.int32)
    (request,) = PenstockDialect().requests(GenerationCall([prompt], 1, decoding, [3]), codec, "policy")
    assert json.loads(request.body)[name] == VALUES[name]
    read = read_body(CompletionBody, request.body, 64)
    received = read.decoding(read.max_tokens)
    assert received == decoding and getattr(received, name) == VALUES[name]

    table = SlotTable(slots=2, max_stop_token_ids=1)
    table.assign(Response.of(PendingRequest(GenerationRequest(prompt, received, 3), (2,), 5), 0, codec))
    neutral = SAMPLING_FIELDS[name].neutral
    assert table.rows.sampling[name].tolist() == [VALUES[name], neutral]
    table.release(0)
    assert table.rows.sampling[name].tolist() == [neutral, neutral]

    one, logprobs = np.array([4], np.int32), np.array([-1.0], np.float32)
    rollout = Rollout(
        "cats", "7", prompt, one, logprobs, np.zeros(1, np.float32), 0.0, RolloutMetadata("w", 1.0, 0), "g/0",
        decoding=received,
    )  # fmt: skip
    (stored,) = records_from_table(table_from_records([RolloutRecord(rollout, "g")]))
    assert stored.rollout.decoding == received


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_a_row_that_was_written_before_there_was_the_parameter_has_it_off(name):
    decoding = Decoding(max_output_tokens=9)
    one = np.array([4], np.int32)
    rollout = Rollout(
        "cats", "7", one, one, np.array([-1.0], np.float32), np.zeros(1, np.float32), 0.0,
        RolloutMetadata("w", 1.0, 0), "g/0", decoding=replace(decoding, **{name: VALUES[name]}),
    )  # fmt: skip
    table = table_from_records([RolloutRecord(rollout, "g")])
    index, column = table.schema.get_field_index("decoding"), table.column("decoding").combine_chunks()
    kept = [field for field in column.type if field.name != name]
    older = type(column).from_arrays([column.field(field.name) for field in kept], fields=kept)
    (stored,) = records_from_table(table.set_column(index, "decoding", older))
    assert stored.rollout.decoding == decoding


@pytest.mark.parametrize("name", [name for name, field in SAMPLING_FIELDS.items() if field.truncates])
def test_what_truncates_is_said_and_its_neutral_value_truncates_nothing(name):
    assert SamplingParams.model_validate({name: VALUES[name]}).truncation == {name: VALUES[name]}
    neutral = SAMPLING_FIELDS[name].neutral
    assert not Decoding(**{name: neutral}).truncated
    body = json.dumps({"model": "m", "prompt": "p", name: neutral}).encode()
    assert read_body(CompletionBody, body, 64).decoding(16) == Decoding(max_output_tokens=16)


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_out_of_range_is_refused_by_the_configuration_and_by_the_engine(name):
    for value in (SAMPLING_FIELDS[name].most + 1, -1):
        with pytest.raises(ValueError, match="sampling_range"):
            SamplingParams.model_validate({name: value})
        request = GenerationRequest(np.array([1], np.int32), Decoding(**{name: value}), 0)
        with pytest.raises(ConfigError, match=re.escape(f"{name} is {value}: it must be ")):
            check_request(request, EngineConfig(max_seq_len=64), 10)
