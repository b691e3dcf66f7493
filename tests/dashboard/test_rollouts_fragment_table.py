"""What `penstock rollouts` shows of a run of simulators."""

import io
import json

import pytest
from rich.console import Console

from penstock.batch import FragmentBatchMaker
from penstock.dashboard.rollouts import RolloutsRequest, show_rollouts
from penstock.replay import FRAGMENTS, FragmentReplayConfig, OpenAdmission, ReplayBuffer, RolloutStore
from penstock.rundir import RunDirectory, RunViews
from penstock.types import ConfigError
from tests.fragments_made import a_batch, make_fragment


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two fragments trained by update 0, one faulty, one waiting."""
    directory = RunDirectory.create(tmp_path_factory.mktemp("runs") / "mine", {"fleet": {}})
    config = FragmentReplayConfig(fragments_per_batch=2)
    store = RolloutStore(directory, config.store, lambda: 1000.0, FRAGMENTS)
    admission = OpenAdmission(store.open_ledger())
    buffer = ReplayBuffer(config.buffer_config(), store, FragmentBatchMaker(), admission, lambda: 1000.0)
    buffer.add_batches(
        [a_batch(make_fragment("cart-0", faults=(2,), reward=0.5), make_fragment("pole-1", task="pole"))]
    )
    buffer.add_batches([a_batch(make_fragment("cart-2", faults=(0, 1, 2, 3)))])
    buffer.next_batch(0, 5.0)
    buffer.finish_update(0)
    buffer.set_current_step(1)
    buffer.add_batches([a_batch(make_fragment("cart-3", weight_steps=[0, 0, 1, 1]))])
    buffer.flush()
    buffer.close()
    store.close()
    return directory


def shown(run, width=100, **options) -> str:
    console = Console(file=io.StringIO(), width=width, height=40)
    show_rollouts(RolloutsRequest(run.path, **options), console)
    return console.file.getvalue()


def test_the_table_shows_fragments_by_step(run):
    text = shown(run)
    rows = [line.split() for line in text.splitlines()[2:6]]
    assert rows == [
        ["–", "cart", "cart-3", "4", "4", "1", "0–1", "–", "waiting"],
        ["0", "cart", "cart-0", "4", "1", "1.5", "2", "0", "0", "trained"],
        ["0", "cart", "cart-2", "4", "4", "0", "5", "0", "0", "invalid"],
        ["0", "pole", "pole-1", "4", "4", "1", "0", "0", "trained"],
    ]
    assert "4 fragments stored: 2 trained, 1 " in text and "1 waiting" in text and "1 invalid" in text
    assert "cart-3" not in shown(run, step=0) and "pole-1" not in shown(run, lesson="cart")
    assert "No fragments match --fate evicted; there are 4 fragments stored" in shown(run, fate="evicted")


def test_json_has_one_line_each(run, capsys):
    shown(run, json=True, fate="trained")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["rollout_id"] for line in lines] == ["cart-0/0", "pole-1/0"]
    assert lines[0]["faulty_steps"] == 1 and lines[0]["terminated"] == 1 and lines[0]["truncated"] == 1


@pytest.mark.parametrize("options", [{"show": "cart-0"}, {"export": "jsonl", "out": "x"}])
def test_what_is_about_text_says_what_to_do_instead(run, options):
    with pytest.raises(ConfigError, match=f"--{next(iter(options))} shows conversations.*--sql"):
        shown(run, **options)


def test_queries_see_columns_fates_and_uses(run):
    with RunViews(run.path) as views:
        sql = "select state, uses, trained_step, rewards, octet_length(observations[1].data) from fragments"
        assert list(views.select(f"{sql} where group_id = 'cart-0'").rows()) == [("trained", 1, 0, [0.5] * 4, 80)]
        assert list(views.select("select rollout_id, step, survives from uses order by 1").rows()) == [
            ("cart-0/0", 0, True), ("pole-1/0", 0, True),
        ]  # fmt: skip
        assert views.select("select count(*) from batches").to_dicts()[0]["count_star()"] == 2


def test_a_fleet_without_fragments_says_so(tmp_path):
    text = shown(RunDirectory.create(tmp_path / "new", {"fleet": {}}))
    assert "No fragments yet: the simulators have sent none so far." in text
