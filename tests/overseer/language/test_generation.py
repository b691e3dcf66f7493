"""Offline generation: from a recipe, a checkpoint and a server, to Parquet and to JSONL."""

import pyarrow.parquet as pq
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import penstock
from penstock.inference.access import AccessRules
from penstock.inference.config import ServedEngineConfig
from penstock.inference.engine import InferenceEngine
from penstock.inference.http_server import HttpServer
from penstock.inference.server import create_app
from penstock.model.language import load_policy, named_arrays, save_decoder
from penstock.model.language.adapter import base_digest
from penstock.model.language.hugging_face import save_adapter
from penstock.model.language.lora import LoraConfig
from penstock.overseer import generate
from penstock.rundir import read_json_lines
from penstock.text import Tokenizer
from penstock.types import CheckpointError, ConfigError, UnreachableError, WeightVersion
from tests.adapted import adapted
from tests.overseer.conftest import tiny

TOKEN = "a test's token"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint: the policy that the recipe of another seed would begin with."""
    folder, tokenizer = tmp_path_factory.mktemp("checkpoint") / "step-0" / "model", Tokenizer.load("penstock")
    decoder = load_policy(tiny().model, 9, tokenizer)
    save_decoder(decoder, folder, tokenizer)
    return decoder, folder


def config(**sampling):
    return tiny({"curriculum": {"lessons": {"cats": {"sampling_params": sampling}}}})


def answers(path):
    return pq.read_table(path).column("response_tokens").to_pylist()


def test_a_recipe_s_own_policy_answers_n_prompts_prompts_of_each_lesson(tmp_path):
    report = generate(None, config(n_prompts=5), tmp_path / "new" / "rollouts.parquet")
    rows = pq.read_table(report.path)
    assert rows.num_rows == 15 and set(rows.column("worker_id").to_pylist()) == {"generate"}
    rewards = rows.column("episode_reward").to_pylist()
    lesson = report.lessons["cats"]
    assert (lesson.rollouts, lesson.reward_mean.value) == (15, pytest.approx(sum(rewards) / 15))
    assert len(set(rows.column("group_id").to_pylist())) == 5
    assert str(report).startswith("cats: 15 rollouts of ") and str(report.path) in str(report)


@pytest.mark.slow
def test_a_checkpoint_and_a_server_over_it_give_the_same(tmp_path, made):
    decoder, folder = made
    reports = [generate(folder.parent, config(), tmp_path / f"{n}.parquet", n=2) for n in range(2)]
    assert answers(reports[0].path) == answers(reports[1].path) and len(answers(reports[0].path)) == 6
    tokenizer = Tokenizer.load("penstock")
    engine = InferenceEngine(decoder, WeightVersion(0, 0), tokenizer, ServedEngineConfig(max_slots=12, max_seq_len=48))
    server = HttpServer(create_app(engine, tokenizer, "mine", AccessRules(TOKEN)))
    engine.start()
    server.start()
    try:
        engine.wait_until_ready(120)
        generate(server.url + "/", config(), tmp_path / "served.jsonl", n=2, token=TOKEN)
        with pytest.raises(
            ConfigError, match="answered 401 to /v1/models: give the URL of a server as http://HOST:PORT, and its tok"
        ):
            generate(server.url, config(), tmp_path / "refused.jsonl", n=2)
    finally:
        server.stop()
        engine.stop(30)
    rows = list(read_json_lines(tmp_path / "served.jsonl"))
    text = pq.read_table(reports[0].path).column("turns").to_pylist()
    assert [[turn["content"] for turn in row["turns"]] for row in rows] == [
        [turn["content"] for turn in turns] for turns in text
    ]
    assert [row["mode"] for row in rows] == ["train"] * 6


@pytest.fixture(scope="module")
def served(made):
    """The URL of a `penstock serve` over that checkpoint, which asks for a token."""
    tokenizer = Tokenizer.load("penstock")
    engine = InferenceEngine(made[0], WeightVersion(0, 0), tokenizer, ServedEngineConfig(max_slots=4, max_seq_len=48))
    server = HttpServer(create_app(engine, tokenizer, "mine", AccessRules(TOKEN)))
    engine.start(lazily=True)
    server.start()
    yield server.url
    server.stop()
    engine.stop(30)


def fixed(**external):
    external = {"weights": "none", "model": "mine"} | external
    return tiny({"inference": {"engine": "openai", "external": external, "prefill_rows": 8}})


def test_a_server_with_openais_api_answers_by_the_name_of_its_model(tmp_path, served):
    def asked(url, model="mine", token=TOKEN):
        return generate(
            url, fixed(model=model), tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet", n=2, token=token
        )

    rows = pq.read_table(asked(f"{served}/v1").path)  # as `penstock serve` says it
    assert rows.num_rows == 6 and all(rows.column("response_tokens").to_pylist())
    assert not any(map(any, rows.column("response_logprobs").to_pylist())), "nobody says what they are"
    with pytest.raises(ConfigError, match="external.model is 'policy', and .* has 'mine': name one of them"):
        asked(served, "policy")
    with pytest.raises(ConfigError, match=r"v1/models: give the URL of a server as http://HOST:PORT"):
        asked(f"{served}/v2")
    with pytest.raises(ConfigError, match="answered 401 to /v1/models"):
        asked(served, token=None)


def test_without_a_source_servers_of_fixed_weights_answer_that_the_recipe_names(tmp_path, served):
    (tmp_path / "key").write_text(TOKEN)
    recipe = fixed(urls=[served], api_key_file=tmp_path / "key")
    rows = pq.read_table(generate(None, recipe, tmp_path / "a.parquet", n=2).path)
    assert rows.num_rows == 6 and not any(map(any, rows.column("response_logprobs").to_pylist()))
    with pytest.raises(ConfigError, match="answered 401 .* its token in PENSTOCK_TOKEN or .*external.api_key_file"):
        generate(None, recipe, tmp_path / "b.parquet", token="another")  # which goes before the file's
    (tmp_path / "key").unlink()
    with pytest.raises(ConfigError, match="inference.external.api_key_file is .*key: .*No such file"):
        generate(None, recipe, tmp_path / "b.parquet")


def test_a_server_is_evaluated_as_a_checkpoint_is_and_compared_with_one(tmp_path, served, made, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # by no proxy, as all that asks it
    report = penstock.evaluate(
        served, fixed(), n=2, baseline=made[1], rollouts_path=tmp_path / "a.parquet", token=TOKEN
    )
    assert report.checkpoint == served and report.to_json()["checkpoint"] == served  # no slash is lost
    rows = pq.read_table(tmp_path / "a.parquet")
    labels, logprobs = rows.column("evaluation").to_pylist(), rows.column("response_logprobs").to_pylist()
    assert [(label, any(of_one)) for label, of_one in zip(labels, logprobs, strict=True)] == [
        *[("offline", False)] * 2, *[("baseline", True)] * 2,
    ]  # fmt: skip
    assert report.lessons["cats"].rollouts == 2 and report.lessons["cats"].difference is not None


def test_a_server_of_another_make_is_asked_in_no_dialect_of_ours(tmp_path):
    async def models(_):
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "vllm"}]})

    server = HttpServer(Starlette(routes=[Route("/v1/models", models)]))
    server.start()
    try:
        with pytest.raises(ConfigError, match=r"engine is builtin, and .*\(owned_by is 'vllm'\): set inference.engine"):
            generate(server.url, tiny(), tmp_path / "a.jsonl")
    finally:
        server.stop()


def test_an_adapter_answers_in_the_dtype_that_its_run_trains_it_in(tmp_path, made, monkeypatch):
    decoder, folder = made
    base, tokenizer, loaded = str(folder), Tokenizer.load("penstock"), []
    beside = adapted(decoder, LoraConfig(rank=2, dtype="float32"), base=base)
    own = {name: each for name, each in named_arrays(beside).items() if not name.startswith("adapter.")}
    save_adapter(beside, tmp_path, tokenizer, base_digest(own))
    model = {"init": None, "path": base, "dtype": "bfloat16", "lora": {"rank": 2, "dtype": "float32"}}

    def recorded(*given):
        loaded.append(load_policy(*given))
        raise ConfigError("enough")

    monkeypatch.setattr("penstock.overseer.language.generation.load_policy", recorded)
    for answer in (
        lambda run: generate(tmp_path, run, tmp_path / "new.parquet"),
        lambda run: penstock.evaluate(tmp_path, run),
    ):
        with pytest.raises(ConfigError, match="enough"):
            answer(tiny({"model": model}))
    assert [(each.adapter.query.a.dtype, each.embedding.dtype) for each in loaded] == [("float32", "bfloat16")] * 2


@pytest.mark.slow
def test_a_recipe_goes_by_its_name_and_a_file_by_its_path_as_text(tmp_path):
    report = generate(None, "cats", str(tmp_path / "a.jsonl"), n=1)
    assert report.lessons["cats"].prompts == 1 and report.path == tmp_path / "a.jsonl" and report.path.exists()


def test_held_out_prompts_are_others(tmp_path):
    paths = [tmp_path / f"{mode}.jsonl" for mode in ("train", "eval")]
    for path in paths:
        generate(None, config(), path, n=8, mode=path.stem)
    asked = [{row["env_example_id"] for row in read_json_lines(path)} for path in paths]
    assert all(asked) and not asked[0] & asked[1]


def test_bad_input_is_found_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="lesson 'dogs' is not in the recipe: its lessons are cats"):
        generate(None, config(), tmp_path / "a.jsonl", ["dogs"])
    with pytest.raises(ConfigError, match="lessons is empty: name some; the lessons are cats"):
        generate(None, config(), tmp_path / "a.jsonl", [])
    with pytest.raises(ConfigError, match="ends in '.csv': it must be one of .parquet, .jsonl"):
        generate(None, config(), tmp_path / "a.csv")
    for n in (0, -1):
        with pytest.raises(ConfigError, match=f"n is {n}: give at least 1 prompt per lesson"):
            generate(None, config(), tmp_path / "a.jsonl", n=n)
        with pytest.raises(ConfigError, match=f"n is {n}: give at least 1 prompt per lesson"):
            penstock.evaluate(tmp_path, config(), n=n)
    with pytest.raises(ConfigError, match="n is 1000001: at most 1,000,000 prompts per lesson are held in memory"):
        generate(None, config(), tmp_path / "a.jsonl", n=1_000_001)
    with pytest.raises(ConfigError, match="config cartpole trains a control policy"):
        generate(None, "cartpole", tmp_path / "a.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out .* cannot be written"):
        generate(None, config(), tmp_path / "file" / "b.jsonl")
    with pytest.raises(CheckpointError, match="holds no config.json"):
        generate(tmp_path, config(), tmp_path / "a.jsonl")
    with pytest.raises(UnreachableError, match="127.0.0.1:9/v1/models does not answer"):
        generate("http://127.0.0.1:9", config(), tmp_path / "a.jsonl")
    for url in ("http://127.0.0.1:port", "http://"):
        with pytest.raises(ConfigError, match="cannot be asked .* give the URL of a server as http://HOST:PORT"):
            generate(url, config(), tmp_path / "a.jsonl")
    assert not (tmp_path / "a.jsonl").exists()
