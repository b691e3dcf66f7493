import pytest
from pydantic import ValidationError

from penstock.inference.config import EngineConfig, InferenceConfig, ServeConfig


def test_buckets_end_with_what_the_longest_sequence_needs():
    config = EngineConfig(max_seq_len=600)
    assert config.prefill_buckets == (16, 64, 256, 598)
    assert config.window_buckets == (128, 256, 512, 600)


@pytest.mark.parametrize(("longest", "buckets"), [(80, (16, 78)), (130, (16, 64, 128)), (32, (30,)), (34, (16, 32))])
def test_no_prompt_length_is_compiled_that_saves_less_than_half(longest, buckets):
    assert EngineConfig(max_seq_len=longest).prefill_buckets == buckets


def test_given_buckets_are_kept_below_the_longest():
    config = EngineConfig(max_seq_len=100, prefill_lengths=(24, 200), windows=(64, 100))
    assert config.prefill_buckets == (24, 98)
    assert config.window_buckets == (64, 100)


@pytest.mark.parametrize(
    ("slots", "rows"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (7, (1, 7)),
        (8, (1, 4, 8)),
        (16, (1, 8, 16)),
        (32, (1, 8, 16, 32)),
        (130, (1, 8, 64, 65, 130)),
    ],
)
def test_a_decode_step_may_have_a_power_of_eight_or_half_of_the_slots_as_its_rows(slots, rows):
    assert EngineConfig(max_slots=slots).decode_buckets == rows
    assert EngineConfig(max_slots=slots, decode_rows=(3, 200)).decode_buckets == ((3, slots) if slots > 3 else (slots,))


def test_the_shortest_possible_sequence_has_buckets():
    assert EngineConfig(max_seq_len=2).prefill_buckets == (1,)
    assert EngineConfig(max_seq_len=2).window_buckets == (2,)


def test_prefill_rows_shrink_with_the_length_and_a_short_prompt_goes_with_the_most():
    config = EngineConfig(prefill_rows=8, prefill_tokens=1024)
    assert [config.prefill_row_counts(n) for n in (16, 17, 128, 512, 4096)] == [(8,), (1, 8), (1, 8), (1, 2), (1,)]


@pytest.mark.parametrize("lengths", [(), (0, 4), (8, 4), (4, 4)])
def test_lengths_must_ascend(lengths):
    with pytest.raises(ValidationError, match="windows is .*ascending"):
        EngineConfig(windows=lengths)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "::", "example.org"])
def test_an_address_that_others_reach_needs_a_token(host):
    with pytest.raises(ValidationError, match="set token"):
        ServeConfig(host=host)
    assert ServeConfig(host=host, token="long enough").host == host


def test_a_server_s_own_defaults_stay_where_another_key_of_its_engine_is_given():
    assert ServeConfig.model_validate({"engine": {"max_seq_len": 256}}).engine == EngineConfig(
        max_slots=16, max_seq_len=256
    )
    assert ServeConfig(engine=EngineConfig(max_slots=2)).engine.max_slots == 2


@pytest.mark.parametrize("kind", [ServeConfig, InferenceConfig])
@pytest.mark.parametrize("given", [{"tls_cert": "a.pem"}, {"tls_key": "a.pem"}])
def test_a_certificate_and_its_key_go_together(kind, given):
    with pytest.raises(ValidationError, match="tls_cert and tls_key go together"):
        kind.model_validate(given)


def test_a_token_is_not_printed():
    assert "long enough" not in repr(ServeConfig(token="long enough"))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"engine": "vllm"}, "engine is vllm, and external is missing"),
        ({"external": {"urls": ["http://a:1"]}}, "engine is builtin, and external has no effect"),
        ({"engine": "vllm", "external": {}}, "exactly one"),
        ({"engine": "vllm", "external": {"urls": ["http://a:1"], "launch": ["{model}"], "weights": "none"}}, "exactly"),
        ({"engine": "vllm", "external": {"urls": ["a:1"]}}, "as http://HOST:PORT"),
        ({"engine": "vllm", "external": {"urls": ["http://a:1/v1"]}}, "without a path"),
        *(
            ({"engine": "vllm", "external": {"urls": [url]}}, "as http://HOST:PORT")
            for url in ("http://:1", "http://a:b", "http://a:0", "http://a:65536", "http://a:", "http://me:key@a:1")
        ),
        ({"engine": "vllm", "external": {"urls": ["http://a:1"] * 2}, "servers": 2}, "urls holds 'http://a:1' twice"),
        ({"engine": "vllm", "external": {"launch": ["vllm", "serve"]}}, "one of its words must be {model}"),
        ({"engine": "vllm", "external": {"urls": ["http://a:1"]}, "servers": 2}, "names 1 servers, and servers is 2"),
        ({"engine": "vllm", "external": {"urls": ["http://a:1"], "weights": "lora", "kv": "keep"}}, "kv is"),
        *(
            ({"engine": "vllm", "external": {"urls": ["http://a:1"]}, **key}, "of Penstock's own engine")
            for key in ({"prefill_rows": 4}, {"prefill_chunk": 64}, {"decode_rows": [8]}, {"host": "0.0.0.0"})
        ),
        *(
            ({"engine": "vllm", "external": {"urls": ["http://a:1"], "pause": pause, "kv": "keep"}}, "kv is")
            for pause in ("wait", "abort")
        ),
        *(
            ({"engine": "vllm", "external": external, "tls_ca": "a.pem"}, "tls_ca is .* asked over http")
            for external in ({"urls": ["http://a:1"]}, {"launch": ["x", "{model}"]})
        ),
        ({"engine": "openai", "external": {"urls": ["http://a:1"]}}, "no way to change weights; set it to none"),
        (
            {"engine": "openai", "external": {"launch": ["x", "{model}"], "weights": "none"}},
            "start the server, and give its urls",
        ),
        (
            {"engine": "vllm", "external": {"launch": ["x", "{model}"], "weights": "none"}},
            "launch is given, and weights is none: .* start the server, and give its urls",
        ),
    ],
)
def test_an_external_engine_that_cannot_be_is_refused(keys, said):
    with pytest.raises(ValidationError, match=said):
        InferenceConfig.model_validate(keys)


@pytest.mark.parametrize("url", ["http://a", "https://a.b:65535", "http://10.0.0.1:1", "http://[::1]:8000"])
def test_a_server_may_be_anywhere(url):
    trusted = {"tls_ca": "a.pem"} if url.startswith("https:") else {}
    config = InferenceConfig.model_validate({"engine": "vllm", "external": {"urls": [url]}, **trusted})
    assert config.external is not None and config.external.urls == (url,)
