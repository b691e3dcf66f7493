import json

import pyarrow.parquet as pq
import pytest
import yaml

from penstock.dashboard import DatasetRequest, GroupFilter, export_dataset
from penstock.dashboard.lookup import find_rollouts
from penstock.rundir import RunDirectory, RunViews, write_records
from penstock.types import ConfigError
from tests.dashboard.sample_run import group, rollout, write_run

PROMPT = [{"role": "user", "content": "Say cat."}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def exported(views, path, selection="all", **named) -> list[dict]:
    wanted = GroupFilter(**{key: named.pop(key) for key in ("step", "lesson_id", "state") if key in named})
    report = export_dataset(views, DatasetRequest("jsonl", path, selection, wanted, **named))
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert report.examples == len(rows)
    return rows


def test_all_rollouts_as_prompts_and_completions(views, tmp_path):
    rows = exported(views, tmp_path / "all.jsonl")
    assert len(rows) == 14
    assert next(row for row in rows if row["rollout_id"] == "cats-0-0/1") == {
        "prompt": PROMPT, "completion": said("cat cat"), "reward": 0.5, "advantage": pytest.approx(-0.2),
        "rollout_id": "cats-0-0/1", "group_id": "cats-0-0", "lesson_id": "cats", "env_name": "cats_env",
        "env_example_id": "7", "weight_step": 0, "finish_reason": "stop",
    }  # fmt: skip


def test_several_turns_are_one_completion(views, tmp_path):
    (row,) = exported(views, tmp_path / "t.jsonl", "best", lesson_id="tools")
    assert row["prompt"] == [{"role": "system", "content": "Use <calc>."}, {"role": "user", "content": "2*3="}]
    assert [(message["role"], message["content"]) for message in row["completion"]] == [
        ("assistant", "<calc>2*3</calc>"), ("tool", "<result>6</result>"), ("assistant", "6"),
    ]  # fmt: skip


def test_best_of_each_group(views, tmp_path):
    rows = exported(views, tmp_path / "best.jsonl", "best")
    assert {row["rollout_id"]: row["reward"] for row in rows} == {
        "cats-0-0/2": 1.0, "cats-0-1/1": 1.0, "tools-0-0/0": 1.0, "cats-0-10/1": 0.75, "cats-0-2/0": 0.5,
        "cats-0-3/1": 1.0,
    }  # fmt: skip


def test_pairs_of_best_and_worst(views, tmp_path):
    rows = exported(views, tmp_path / "pairs.jsonl", "pairs")
    found = {row["group_id"]: (row["rollout_id_chosen"], row["rollout_id_rejected"]) for row in rows}
    assert found == {
        "cats-0-0": ("cats-0-0/2", "cats-0-0/0"), "cats-0-1": ("cats-0-1/1", "cats-0-1/0"),
        "tools-0-0": ("tools-0-0/0", "tools-0-0/1"), "cats-0-10": ("cats-0-10/1", "cats-0-10/0"),
        "cats-0-3": ("cats-0-3/1", "cats-0-3/0"),
    }  # fmt: skip  # cats-0-2 has a tie
    row = next(row for row in rows if row["group_id"] == "cats-0-0")
    assert (row["prompt"], row["chosen"], row["rejected"]) == (PROMPT, said("cat"), said("dog"))
    assert (row["reward_chosen"], row["reward_rejected"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("named", "count"),
    [
        ({"min_reward": 0.75}, 6),
        ({"min_reward": 0.75, "selection": "best"}, 5),
        ({"min_margin": 1.5, "selection": "pairs"}, 1),
        ({"min_reward": 0.8, "selection": "pairs"}, 4),
        ({"step": 1}, 4),
        ({"lesson_id": "tools"}, 2),
        ({"state": "trained"}, 8),
        ({"state": "trained", "selection": "pairs"}, 3),
    ],
)
def test_filters(views, tmp_path, named, count):
    assert len(exported(views, tmp_path / "x.jsonl", **named)) == count


def test_pairs_need_one_prompt_and_two_texts(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {})
    same = group("a-0-0", [("cat", 0.0), ("cat", 1.0)])
    prompts = [
        rollout(f"a-0-1/{i}", [("user", prompt), ("assistant", "cat")], float(i))
        for i, prompt in enumerate(("Say cat.", "Speak."))
    ]
    good = group("a-0-2", [("dog", 0.0), ("cat", 1.0)])
    write_records(directory.rollouts / "part-a.parquet", same + prompts + good)
    with RunViews(directory.path) as views:
        report = export_dataset(views, DatasetRequest("jsonl", tmp_path / "p.jsonl", "pairs"))
    assert (report.examples, report.indistinct, report.considered) == (1, 2, 6)


def test_what_has_no_text_is_counted(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {})
    records = group("a-0-0", [("cat", 0.0), ("dog", 1.0)])
    from dataclasses import replace

    records[1] = replace(records[1], rollout=replace(records[1].rollout, turns=()))
    write_records(directory.rollouts / "part-a.parquet", records)
    with RunViews(directory.path) as views:
        report = export_dataset(views, DatasetRequest("jsonl", tmp_path / "p.jsonl"))
    assert (report.examples, report.without_text) == (1, 1)


def test_parquet_has_the_same_rows(views, tmp_path):
    rows = exported(views, tmp_path / "p.jsonl", "pairs")
    export_dataset(views, DatasetRequest("parquet", tmp_path / "p.parquet", "pairs"))
    assert pq.read_table(tmp_path / "p.parquet").to_pylist() == rows


def test_a_hugging_face_directory(views, tmp_path):
    rows = exported(views, tmp_path / "a.jsonl")
    export_dataset(views, DatasetRequest("hf", tmp_path / "data_set"))
    files = sorted(str(p.relative_to(tmp_path / "data_set")) for p in (tmp_path / "data_set").rglob("*") if p.is_file())
    assert files == ["README.md", "data/train-00000-of-00001.parquet"]
    table = pq.read_table(tmp_path / "data_set" / files[1])
    assert table.to_pylist() == rows
    front = yaml.safe_load((tmp_path / "data_set" / "README.md").read_text().split("---\n")[1])
    assert front["configs"][0]["data_files"] == [{"split": "train", "path": "data/train-*"}]
    assert [feature["name"] for feature in front["dataset_info"]["features"]] == table.column_names
    assert front["dataset_info"]["splits"][0]["num_examples"] == 14
    assert front["dataset_info"]["features"][0] == {
        "name": "prompt", "list": [{"name": "role", "dtype": "string"}, {"name": "content", "dtype": "string"}],
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "hf"])
def test_what_exists_is_not_overwritten(views, tmp_path, kind):
    path = tmp_path / "there"
    path.write_text("years of work")
    with pytest.raises(ConfigError, match="--out .*there exists already and is not overwritten"):
        export_dataset(views, DatasetRequest(kind, path))
    assert path.read_text() == "years of work" and list(tmp_path.iterdir()) == [path]


def test_where_nothing_can_be_found_it_says_where_to_look(views, tmp_path):
    with pytest.raises(ConfigError, match="--lesson is 'dogs', of which there are no rollouts: there are some of cats"):
        export_dataset(views, DatasetRequest("hf", tmp_path / "x", wanted=GroupFilter(lesson_id="dogs")))
    offline = RunDirectory.create(tmp_path / "offline", {"replay": {"from_rollouts": "runs/cats-1"}})
    with RunViews(offline.path) as own:
        with pytest.raises(ConfigError, match="no rollouts of its own: it trains on those of runs/cats-1"):
            export_dataset(own, DatasetRequest("hf", tmp_path / "x"))
        with pytest.raises(ConfigError, match="with this id; the run trains on those of runs/cats-1: look there"):
            find_rollouts(own, "cats-0-1")


def test_nothing_is_left_where_nothing_is_found_or_it_fails(views, tmp_path):
    with pytest.raises(ConfigError, match="--select best finds nothing among 4 rollouts that match --step 1"):
        export_dataset(views, DatasetRequest("hf", tmp_path / "x", "best", GroupFilter(step=1), min_reward=5))
    with pytest.raises(ConfigError, match=r"--out .*nowhere/x cannot be written"):
        export_dataset(views, DatasetRequest("hf", tmp_path / "nowhere" / "x"))
    assert list(tmp_path.iterdir()) == []


def test_a_failure_half_way_leaves_nothing(views, tmp_path, monkeypatch):
    from penstock.dashboard import datasets

    def broken(*words):
        yield {"prompt": []}
        raise RuntimeError("half way")

    monkeypatch.setattr(datasets, "_examples", broken)
    for kind in ("jsonl", "parquet", "hf"):
        with pytest.raises(RuntimeError, match="half way"):
            export_dataset(views, DatasetRequest(kind, tmp_path / "x"))
    assert list(tmp_path.iterdir()) == []


def test_a_group_spread_over_two_files_still_makes_its_pair(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {})
    for index, record in enumerate(group("a-0-0", [("dog", 0.0), ("cat", 1.0)])):
        write_records(directory.rollouts / f"part-{index}.parquet", [record])
    with RunViews(directory.path) as views:
        assert export_dataset(views, DatasetRequest("jsonl", tmp_path / "p.jsonl", "pairs")).examples == 1


def test_a_part_that_is_merged_half_way_starts_the_export_again(tmp_path, monkeypatch):
    from penstock.dashboard import datasets

    directory = write_run(tmp_path / "run")
    made = datasets._examples

    def interrupted(views, choices, tally):
        monkeypatch.setattr(datasets, "_examples", made)
        (directory.rollouts / "part-a.parquet").rename(directory.rollouts / "part-z.parquet")
        yield from made(views, choices, tally)

    monkeypatch.setattr(datasets, "_examples", interrupted)
    with RunViews(directory.path) as views:
        report = export_dataset(views, DatasetRequest("hf", tmp_path / "out"))
    assert report.examples == pq.read_table(tmp_path / "out" / "data").num_rows == 14
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
def test_without_any_text_there_is_no_data_set(tmp_path, kind):
    directory = RunDirectory.create(tmp_path / "run", {})
    from dataclasses import replace

    records = [replace(r, rollout=replace(r.rollout, turns=())) for r in group("a-0-0", [("cat", 0.0), ("dog", 1.0)])]
    records += group("a-0-1", [("cat", 0.0), ("cat", 1.0)])
    write_records(directory.rollouts / "part-a.parquet", records)
    with RunViews(directory.path) as views:
        with pytest.raises(ConfigError, match="finds no example: of what it chose, 1 have no text and 1 are pairs of"):
            export_dataset(views, DatasetRequest(kind, tmp_path / "out", "pairs"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
def test_what_appears_meanwhile_is_not_replaced(views, tmp_path, monkeypatch, kind, links):
    from penstock.dashboard import datasets

    def no_links(*paths):
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr("os.link", no_links)
    export_dataset(views, DatasetRequest(kind, tmp_path / "free"))
    made, out = datasets._examples, tmp_path / "out"

    def interrupted(*words):
        yield from made(*words)
        out.mkdir() if kind == "hf" else None
        (out / "x" if kind == "hf" else out).write_text("precious")

    monkeypatch.setattr(datasets, "_examples", interrupted)
    with pytest.raises(ConfigError, match="--out .*(exists already|cannot be written: .* not empty)"):
        export_dataset(views, DatasetRequest(kind, out))
    assert (out / "x" if kind == "hf" else out).read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["free", "out"]
