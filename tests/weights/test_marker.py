import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.weights.publications import INCARNATION, JOB, manifest_of

from penstock.types import SupersededVersionError, WeightsError, WeightVersion
from penstock.weights import marker as markers
from penstock.weights.fetching import Announcement
from penstock.weights.marker import Marker, Offer, free_name

LARGE = 1 << 40
TOKEN = "token"


def marker() -> Marker:
    chains = {manifest_of(4).content: ("delta-0.bin", "delta-1.bin"), manifest_of(6).content: ()}
    return Marker(JOB, (Offer(manifest_of(6), "file-1", chains), Offer(manifest_of(5), "file-0", {})))


def signed(values: Any) -> bytes:
    text = json.dumps(values).encode()
    return markers._signature(text, TOKEN) + text


def test_a_marker_survives_its_file():
    assert Marker.from_bytes(marker().to_bytes(TOKEN), JOB, TOKEN, LARGE) == marker()


@pytest.mark.parametrize("token", ["token", "other", None])
def test_the_signature_is_hmac_sha_256(token: str | None):
    content = marker().to_bytes(token)
    expected = hmac.new((token or "").encode(), content[64:], hashlib.sha256).hexdigest()
    assert content[:64] == expected.encode()


def test_it_announces_the_newest_and_names_every_file():
    assert marker().announcement == Announcement(INCARNATION, WeightVersion(0, 6))
    assert marker().files == {"file-0", "file-1", "delta-0.bin", "delta-1.bin"}


def test_a_version_that_is_not_offered_is_superseded():
    assert marker().offer(WeightVersion(0, 5)).file == "file-0"
    with pytest.raises(SupersededVersionError, match="newest of 2 kept") as refusal:
        marker().offer(WeightVersion(0, 4))
    assert refusal.value.newest == (0, 6)


@pytest.mark.parametrize("token", ["other", None, ""])
def test_another_token_is_refused(token: str | None):
    with pytest.raises(WeightsError, match="another token"):
        Marker.from_bytes(marker().to_bytes(TOKEN), JOB, token, LARGE)


def test_another_job_is_refused_although_the_token_fits():
    with pytest.raises(WeightsError, match="of job 'job', not 'other'"):
        Marker.from_bytes(marker().to_bytes(TOKEN), "other", TOKEN, LARGE)


def test_an_offer_of_another_job_is_refused():
    values = json.loads(marker().to_bytes(TOKEN)[64:])
    with pytest.raises(WeightsError, match="not of job 'other'"):
        Marker.from_bytes(signed(values | {"job": "other"}), "other", TOKEN, LARGE)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "", ".hidden", "x" * 200, 7, None])
def test_only_plain_file_names_are_taken(name: Any):
    values = json.loads(marker().to_bytes(TOKEN)[64:])
    values["offers"][0]["file"] = name
    with pytest.raises(WeightsError, match="plain file name"):
        Marker.from_bytes(signed(values), JOB, TOKEN, LARGE)


@pytest.mark.parametrize(
    "values",
    [None, [], {}, {"format": 1, "job": JOB, "offers": []}, {"format": 1, "job": JOB, "offers": [{}]},
     {"format": 2, "job": JOB, "offers": []}, {"format": 1, "job": JOB, "offers": [[]] * 1001}],
)  # fmt: skip
def test_a_malformed_marker_is_refused_even_when_signed(values: Any):
    with pytest.raises(WeightsError):
        Marker.from_bytes(signed(values), JOB, TOKEN, LARGE)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_is_noticed(data: st.DataObject):
    content = bytearray(marker().to_bytes(TOKEN))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WeightsError):
        Marker.from_bytes(bytes(content), JOB, TOKEN, LARGE)


def test_a_larger_publication_than_allowed_is_refused():
    with pytest.raises(WeightsError, match="max_bytes allows 100"):
        Marker.from_bytes(marker().to_bytes(TOKEN), JOB, TOKEN, 100)


def test_free_names_are_the_first_that_are_free():
    assert free_name("delta", ".bin", set()) == "delta-0.bin"
    assert free_name("delta", ".bin", {"delta-0.bin", "delta-2.bin"}) == "delta-1.bin"
