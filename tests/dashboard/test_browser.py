"""The dashboard in a real browser: flows that a person takes, on runs of every kind."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from penstock.dashboard import write_bundle
from penstock.rundir import (
    EventLog,
    JsonLinesLog,
    KeptReplay,
    MetricsLog,
    RescoredRollout,
    RunDirectory,
    read_examples,
    table_from_fragments,
    write_examples,
    write_parquet,
    write_records,
    write_replay,
    write_rescored,
)
from penstock.types import RolloutRecord
from tests.dashboard.prepared_runs import evaluate
from tests.dashboard.sample_run import HOSTILE, example, group, write_run
from tests.dashboard.visitors import Served, Visitor, expect
from tests.fragments_made import make_fragment

pytestmark = [pytest.mark.dashboard, pytest.mark.timeout(120)]
TOKEN = "token-of-the-browser"
MARKUP = "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 2'>"


def measure(directory, steps, reward, stall=None):
    metrics = MetricsLog(directory.metrics_path)
    for step in range(1, steps + 1):
        metrics.append(step, {
            "train/reward_mean": reward(step), "train/loss": 1 / step, "train/entropy": 3 - step / steps,
            "train/parity_kl": 10.0 ** -(step % 5 + 6), "train/grad_norm": 9.0 if step == stall else 1.0,
            "replay/staleness_mean": 1.0, "replay/staleness_max": 2.0, "inference/tokens_per_s": 100.0 + step,
            "inference/tokens_total": 1000.0 * step, "curriculum/cats/probability": 0.5, "train/tokens": 50.0,
        })  # fmt: skip
    metrics.close()


@pytest.fixture(scope="session")
def parent(tmp_path_factory):
    """Runs of every kind that a page may meet."""
    folder = tmp_path_factory.mktemp("watched")
    good = write_run(folder / "good")
    measure(good, 120, lambda step: step / 120, stall=81)
    evaluate(good, 0.95, 9)
    events = EventLog(good.events_path)
    events.append("start", step=0, pid=1, lineage=0)
    events.append("component_death", step=60, component="rollout-0", reason="out of memory")
    for process, kind in ((0, "simulator_started"), (1, "simulator_started"), (1, "simulator_failed")):
        events.append(kind, step=3, worker="fleet-0", process=process, task="maze", reason="the floor is lava")
    events.append("graduated", step=30, lesson="cats", reason="0.9 ≥ 0.8")
    for number, moment in ((0, 400.0), (1, 500.0)):
        events.append("weights_served", component=f"inference-{number}", version=[0, 1], time=-5.0)
        events.append("weights_served", component=f"inference-{number}", version=[0, 2], time=moment)
    events.close()
    good.write_status({
        "state": "finished", "step": 120, "steps": 120, "bottleneck": "learner busy 99%", "lineage": 0,
        "lessons": {"cats": "graduated 10%", "tools": "active 90%"}, "ledger": {"started": 21, "trained": 8},
    })  # fmt: skip
    weak = write_run(folder / "weak")
    measure(weak, 120, lambda step: 0.1)
    evaluate(weak, 0.1, 9)
    dead = write_run(folder / "dead")
    dead.write_status({"state": "running", "step": 2, "steps": 10, "pid": 2**22 + 7, "time": 1.0, "bottleneck": ""})
    hostile = write_run(folder / "hostile")
    records = group("cats-1-0", [(MARKUP, 0.5), (HOSTILE, 1.0)], timestamp=2000.0)
    write_records(hostile.rollouts / "part-h.parquet", records)
    events = EventLog(hostile.events_path)
    events.append("failure", step=1, error="Odd", message=MARKUP + "\u202ereversed")
    events.close()
    half = write_run(folder / "half")
    (half.rollouts / "part-b.parquet").write_bytes((half.rollouts / "part-b.parquet").read_bytes()[:300])
    with half.metrics_path.open("a") as file:
        file.write('{"step": 1, "time": 5.0, "train/loss": 0.5}\n{"step": 2, "ti')
    large = write_run(folder / "large")
    said = " ".join(f"word{n}" for n in range(60_000))
    write_records(large.rollouts / "part-l.parquet", group("cats-9-0", [(said, 1.0)], timestamp=3000.0))
    many = write_run(folder / "many")
    records = [
        r for n in range(1200) for r in group(f"cats-7-{n}", [("cat", n / 1200), ("dog", 0.0)], timestamp=2000.0 + n)
    ]
    write_records(many.rollouts / "part-m.parquet", records)
    write_examples(many.batches / "batch_7_7.parquet", [example([records[0]], [0.25])], "batch_7_7", 7, 0)
    fleet = RunDirectory.create(folder / "robots", {"fleet": {"tasks": {"cart": {"id": "CartPole-v1"}}}})
    (fleet.path / "fragments").mkdir(exist_ok=True)
    made = [make_fragment(f"w0-0-3-{n}", timestamp=1000.0 + 2 * n, weight_steps=n) for n in range(3)]
    records = [RolloutRecord(each, each.group_id, "CartPole-v1:3") for each in made]
    write_parquet(fleet.path / "fragments" / "part-0.parquet", table_from_fragments(records))
    events = EventLog(fleet.events_path)
    for step, moment in ((0, 998.0), (1, 1000.5), (2, 1003.0)):
        events.append("weights_served", worker="w0", incarnation=0, version=[0, step], time=moment)
    events.close()
    old = folder / "old"
    (old / "rollouts").mkdir(parents=True)
    (old / "config.yaml").write_text("seed: 0\n")
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = {
        "env_name": ["cats"], "env_example_id": ["7"], "prompt_tokens": [[1, 2]], "response_tokens": [[3, 4]],
        "response_logprobs": [[-0.5, -0.25]], "token_rewards": [[0.0, 0.75]], "episode_reward": [0.75],
    }  # fmt: skip
    stamp = json.dumps({"worker_id": "w", "timestamp": 5.0, "weight_step": 3})
    pq.write_table(
        pa.table(fields).replace_schema_metadata({"penstock.batch_metadata": stamp}),
        old / "rollouts" / "part-0.parquet",
    )
    return folder


@pytest.fixture(scope="session")
def site(parent, tmp_path_factory):
    served = Served(parent, tmp_path_factory.mktemp("cache"))
    yield served
    served.end()


@pytest.fixture
def visitor(browser, site, request):
    made = Visitor(browser, site.url, **getattr(request, "param", {}))
    yield made
    made.context.close()
    assert made.abroad == [], "a request left for another host"
    assert made.errors == []


def _row(page, name):
    return page.locator("tr", has=page.get_by_role("link", name=name, exact=True))


def test_all_runs_stand_in_a_table_with_their_state(visitor):
    page = visitor.open("#/", "Runs")
    for name in ("good", "dead", "hostile", "half", "large", "old"):
        expect(page.get_by_role("link", name=name, exact=True)).to_be_visible()
    expect(_row(page, "dead").locator(".badge")).to_have_text("dead")
    expect(_row(page, "good").locator(".badge")).to_have_text("finished")


def test_a_filter_of_runs_keeps_the_keyboard_and_stands_in_the_address(visitor):
    page = visitor.open()
    page.keyboard.press("/")
    page.keyboard.type("hosti", delay=30)
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("#filter")).to_be_focused()
    assert page.url.endswith("#/?search=hosti")


def test_rows_by_keys_and_enter_opens_one(visitor):
    page = visitor.open()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    name = page.locator("tr.pick.at td").nth(1).inner_text()
    page.keyboard.press("Enter")
    expect(page.locator("h1").first).to_have_text(name)


def test_help_lists_the_keys_and_closes(visitor):
    page = visitor.open()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)


def test_a_run_has_its_bottleneck_its_curves_and_its_events(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good", "good")
    expect(page.get_by_text("learner busy 99%")).to_be_visible()
    for title in ("Held-out reward", "Pace", "Staleness in updates", "Entropy"):
        card = page.get_by_role("region", name=title, exact=True)
        expect(card.locator("canvas")).to_be_visible()
    expect(page.locator("table", has_text="component death")).to_contain_text("out of memory")


def test_a_curve_is_zoomed_by_dragging_and_the_address_keeps_it(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good")
    box = page.get_by_role("region", name="Entropy", exact=True).locator(".u-over")
    box.scroll_into_view_if_needed()
    at = box.bounding_box()
    page.mouse.move(at["x"] + at["width"] * 0.25, at["y"] + 40)
    page.mouse.down()
    page.mouse.move(at["x"] + at["width"] * 0.5, at["y"] + 60, steps=5)
    page.mouse.up()
    expect(page.get_by_role("button", name=re.compile("show all"))).to_be_visible()
    assert re.search(r"from=\d+&to=\d+", page.url)
    page.reload()
    visitor.settled()
    page.get_by_role("button", name=re.compile("show all")).click()
    expect(page.get_by_role("button", name=re.compile("show all"))).to_have_count(0)


def test_a_chart_hands_out_its_numbers(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download Entropy as CSV").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert (
        lines[0] == "series,step,value,low,high" and len(lines) == 121 and lines[1].startswith("train entropy,1,2.99")
    )


def test_any_metric_becomes_a_chart(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good")
    page.locator("#filter").fill("tokens_total")
    page.get_by_label("inference/tokens_total").check()
    expect(page.get_by_role("region", name="inference/tokens_total", exact=True).locator("canvas")).to_be_visible()
    assert "m=inference" in page.url


def test_a_stall_is_found_from_the_update_alone(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good/update?step=81", "Update 81")
    first = page.get_by_role("region", name="Numbers").locator("tbody tr").first
    expect(first).to_contain_text("train/grad_norm")
    expect(page.get_by_role("button", name=re.compile("why .*--step 81"))).to_be_visible()
    page.keyboard.press("j")
    expect(page.locator("h1").first).to_have_text("Update 82")


def test_a_replay_stands_on_the_page_of_its_update_number_by_number(visitor, parent):
    visitor.read("good")
    directory = RunDirectory(parent / "good")
    before = sorted(directory.path.rglob("*"))
    numbers = {"train/entropy": 2.5, "train/grad_norm": 0.0623521283, "train/loss": 0.000267387019}
    as_it_was = KeptReplay(1e9, "step-0", numbers, numbers, (), True)
    page = visitor.open("#/run/good/update?step=2", "Update 2")
    expect(page.get_by_role("button", name=re.compile("replay .*--step 2"))).to_be_visible()
    expect(page.get_by_role("region", name="Replayed as it was")).to_have_count(0)
    changed = {**numbers, "train/loss": 0.25}
    written = write_replay(directory, "batch_1_1", as_it_was)
    write_replay(directory, "batch_1_1", KeptReplay(2e9, "step-0", numbers, changed, ("train/loss",), None,
                                                    ("learner.loss.preset=grpo",), ("cats-0-1/0",)))  # fmt: skip
    page.reload()
    visitor.settled()
    first = page.get_by_role("region", name="Replayed learner.loss.preset=grpo, without cats-0-1/0").locator("tbody tr")
    expect(first).to_have_text([
        "train/loss0.0002673870190.25+0.25", "train/grad_norm0.06235212830.0623521283equal", "train/entropy2.52.5equal",
    ])  # fmt: skip
    expect(page.get_by_text("3 of 3 numbers equal bit for bit; parameters and optimiser")).to_be_visible()
    rows = page.get_by_role("region", name="Replayed as it was").locator("tbody tr")
    expect(rows.locator("td:last-child")).to_have_text(["equal"] * 3)
    assert sorted(directory.path.rglob("*")) == before
    written.unlink()


def test_the_ledger_in_three_units_and_a_ribbon_opens_its_groups(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good/ledger", "Ledger")
    expect(page.get_by_role("cell", name="the update waited too long")).to_be_visible()
    page.get_by_role("button", name="tokens").click()
    expect(page.get_by_role("group", name="Ledger in tokens")).to_be_visible()
    page.get_by_role("button", name="rollouts").click()
    page.get_by_role("link", name=re.compile("→ stale_step: 2 rollouts")).first.focus()
    page.keyboard.press("Enter")  # where ribbons cross, a click in the middle of one may meet another
    expect(page.locator("h1").first).to_have_text("Groups")
    expect(page.locator("a.vrow")).to_have_count(1)
    expect(page.locator("a.vrow")).to_contain_text("cats-0-3")


def test_a_list_of_many_groups_draws_what_is_seen_and_scrolls_to_its_end(visitor):
    visitor.read("many")
    page = visitor.open("#/run/many/groups", "Groups")
    expect(page.locator(".count")).to_contain_text("1,207 groups")
    assert page.locator("a.vrow").count() < 80
    page.locator(".virtual").evaluate("(list) => { list.scrollTop = list.scrollHeight; }")
    expect(page.get_by_role("link", name=re.compile("cats-0-5"))).to_be_visible()
    assert page.locator("a.vrow").count() < 80


def test_filters_narrow_the_list_and_are_the_address(visitor):
    visitor.read("many")
    page = visitor.open("#/run/many/groups")
    page.get_by_label("reward from").fill("0.99")
    page.get_by_label("reward from").press("Enter")
    expect(page.locator(".count")).to_contain_text(re.compile(r"^1\d groups"))
    assert "min_reward=0.99" in page.url
    page.get_by_label("order").select_option("oldest")
    expect(page.locator("a.vrow").first).to_contain_text("cats-0-0")


def test_groups_by_keys_alone(visitor):
    visitor.read("many")
    page = visitor.open("#/run/many")
    page.keyboard.press("g")
    page.keyboard.press("g")
    expect(page.locator("h1").first).to_have_text("Groups")
    expect(page.locator("a.vrow").first).to_be_visible()
    for _ in range(3):
        page.keyboard.press("j")
    expect(page.locator("a.vrow.at")).to_contain_text("cats-7-1196")
    page.keyboard.press("Enter")
    expect(page.locator("h1").first).to_have_text("cats-7-1196")
    page.keyboard.press("u")
    expect(page.locator("h1").first).to_have_text("Groups")


def test_a_query_is_answered_in_a_table_whose_groups_are_links(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good/groups")
    page.locator("#sql").fill("select group_id, count(*) as n from rollouts group by 1 order by 1")
    page.locator("#sql").press("Control+Enter")
    answer = page.get_by_role("region", name="Answer")
    expect(answer.get_by_role("link", name="cats-0-10")).to_be_visible()
    assert "sql=select" in page.url
    page.locator("#sql").fill("drop table rollouts")
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_text("it must be one statement that reads")).to_be_visible()
    visitor.errors.clear()  # the browser's own note of status 400


def test_answers_side_by_side_colour_by_what_is_chosen(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good/group?id=cats-0-0", "cats-0-0")
    expect(page.locator("article.answer")).to_have_count(4)
    token = page.locator("article.answer .tok").first
    by_logprob = token.evaluate("(node) => node.style.background")
    page.locator("#color").select_option("advantage")
    expect(page.locator(".scale")).to_contain_text("advantage")
    assert page.locator("article.answer .tok").first.evaluate("(node) => node.style.background") != by_logprob
    assert page.locator("article.answer .tok").first.get_attribute("title").startswith("p ")


def test_ratios_are_coloured_once_they_are_computed_and_else_a_command_says_how(visitor, parent):
    visitor.read("good")
    page = visitor.open("#/run/good/group?id=cats-0-1&color=now")
    expect(page.locator(".computed .command")).to_have_text(re.compile("penstock why .*good --step 2$"))
    assert page.locator("article.answer .tok").first.evaluate("(node) => node.style.background") == ""
    directory = RunDirectory(parent / "good")
    rescored = [
        RescoredRollout(each.rollout_ids[0], 120, *(np.where(each.loss_mask, value, np.nan).astype(np.float32)
                                                    for value in (-1.0, 0.5, -2.0)))
        for each in read_examples(directory.batches / "batch_1_1.parquet")[:2]
    ]  # fmt: skip
    written = write_rescored(directory, "batch_1_1", rescored)
    page.reload()
    visitor.settled()
    token = page.locator("article.answer .tok:not(.given)").first
    assert "ratio now 0.13" in token.get_attribute("title") and "entropy 0.500" in token.get_attribute("title")
    expect(page.locator(".computed")).to_contain_text("the weights of version 120")
    expect(page.locator(".scale")).to_contain_text("≥2")
    assert token.evaluate("(node) => node.style.background") != ""
    page.locator("#color").select_option("entropy")
    expect(page.locator(".computed")).to_contain_text("In nats")
    expect(page.locator(".computed .command")).to_have_count(0)
    written.unlink()


def test_what_differs_from_the_first_answer_is_marked(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good/group?id=cats-0-0")
    expect(page.locator(".differs")).to_have_count(0)
    page.locator("#diff").check()
    expect(page.locator("article.answer").nth(2).locator(".differs").first).to_be_visible()
    assert page.locator("article.answer").nth(0).locator(".differs").count() == 0


def test_turns_tools_and_where_reward_fell(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good/group?id=tools-0-0")
    article = page.locator("article.answer").first
    expect(article.locator(".given-turn")).to_contain_text("<result>6</result>")
    expect(article.locator(".earned")).to_have_text("+1.00")


def test_a_group_that_was_never_stored_says_why(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good/group?id=cats-0-5")
    expect(page.get_by_text("the update waited too long").first).to_be_visible()


def test_hostile_text_is_text(visitor):
    visitor.read("hostile")
    page = visitor.open("#/run/hostile/group?id=cats-1-0")
    expect(page.locator("article.answer").first).to_contain_text("<script>window.harmed = 1</script>")
    shown = page.locator("article.answer").nth(1).inner_text()
    assert "\\u202e" in shown and "\u202e" not in shown and "\\x1b" in shown
    page.goto(f"{visitor.url}/#/run/hostile")
    visitor.settled()
    expect(page.get_by_text("<img src=x onerror=").first).to_be_visible()
    assert page.evaluate(
        "() => window.harmed === undefined && document.querySelectorAll('main script, main img').length === 0"
    )


def test_a_megabyte_of_tokens_is_cut_and_says_so(visitor):
    visitor.read("large")
    page = visitor.open("#/run/large/group?id=cats-9-0")
    expect(page.get_by_text("Only the first tokens are shown")).to_be_visible()
    assert page.locator("article .tok").count() <= 4096


def test_a_half_written_part_is_named_and_the_rest_is_there(visitor):
    visitor.read("half")
    page = visitor.open("#/run/half")
    expect(page.get_by_text(re.compile("part-b.parquet")).first).to_be_visible()
    page = visitor.open("#/run/half/group?id=cats-0-0")
    expect(page.locator("article.answer")).to_have_count(4)


def test_a_run_of_the_oldest_format_is_read(visitor):
    visitor.read("old")
    page = visitor.open("#/run/old/groups")
    expect(page.locator("a.vrow")).to_have_count(1)
    page.locator("a.vrow").click()
    expect(page.locator(".reward")).to_have_text("0.750")


def test_the_timeline_leads_to_a_group(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good/timeline", "Timeline")
    page.get_by_role("link", name=re.compile("^cats-0-1:")).click(force=True)
    expect(page.locator("h1").first).to_have_text("cats-0-1")


def test_how_a_rollouts_seconds_were_spent_stands_on_the_timeline_and_on_its_page(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good/timeline", "Timeline")
    told = page.locator("title", has_text="tools-0-0/0:").last
    expect(told).to_have_text(
        re.compile(r"prefill 50 ms, decode 100 ms, tools 30 ms, rest of generating 50 ms, reward")
    )
    drawn = (
        told.locator("xpath=..").locator("rect").evaluate_all("rects => rects.map((rect) => rect.className.baseVal)")
    )
    assert drawn[0] == "life-wait" and drawn[-1] == "end-good"
    page = visitor.open("#/run/good/group?id=tools-0-0")
    spent = page.get_by_label("Seconds by stage")
    expect(spent).to_have_count(1)
    expect(spent).to_have_text("waiting20 msprefill50 msdecode100 mstools30 msrest of generating50 msreward10 ms")
    heads = page.locator(".answer").first.locator(".turn h3")
    expect(heads).to_have_text([
        re.compile("assistant.* · waiting 20 ms · prefill 30 ms · decode 60 ms$"), re.compile("tool.* · tools 30 ms$"),
        re.compile("assistant.* · rest before it 10 ms · prefill 20 ms · decode 40 ms · reward 10 ms$"),
    ])  # fmt: skip


def test_the_timeline_has_the_versions_of_each_engine(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good/timeline", "Timeline")
    for engine in ("inference-0", "inference-1"):
        expect(page.locator("text.lane", has_text=engine)).to_have_count(1)
        expect(page.locator("g.served title", has_text=re.compile(f"^{engine}: version 2, from"))).to_have_count(1)
    lines = page.locator("g.served line").evaluate_all("lines => lines.map((line) => +line.getAttribute('x1'))")
    assert len(lines) == 2 and lines[0] < lines[1]  # the one had it later; version 1 both had before this stretch
    expect(page.locator("g.swap")).to_have_count(0)
    visitor.read("weak")
    page = visitor.open("#/run/weak/timeline", "Timeline")  # which says nothing of engines: its lines are updates
    expect(page.locator("g.served")).to_have_count(0)
    expect(page.get_by_text("lines are updates")).to_be_visible()


def test_the_timeline_of_simulators_draws_policy_and_simulator(visitor):
    visitor.read("robots")
    page = visitor.open("#/run/robots/timeline", "Timeline")
    told = "w0-0-3-1/0: policy 500 ms, simulator 1.25 s, waiting for others 250 ms, in the buffer 2 s; waiting"
    named = page.locator("title", has_text=re.compile("^w0-0-3-1/0:"))
    expect(named).to_contain_text(told)
    rects = named.locator("xpath=..").locator("rect")
    drawn = rects.evaluate_all("rects => rects.map((r) => [r.className.baseVal, +r.getAttribute('width')])")
    widths = dict(map(tuple, drawn))
    assert [name for name, _ in drawn[:3]] == ["life-decode", "life-tool", "life-rest"]
    assert widths["life-tool"] == pytest.approx(2.5 * widths["life-decode"], rel=0.01)
    assert widths["life-rest"] == pytest.approx(0.5 * widths["life-decode"], rel=0.01)
    expect(page.locator("g.served title")).to_have_count(3)  # in its worker's lane
    page = visitor.open("#/run/robots/group?id=w0-0-3-1", "w0-0-3-1")
    expect(page.get_by_label("Seconds by stage")).to_have_text("policy500 mssimulator1.25 swaiting for others250 ms")


def test_lessons_and_their_states(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good/lessons", "Lessons")
    expect(page.locator(".node.graduated")).to_contain_text("cats")
    expect(page.get_by_text("0.9 ≥ 0.8")).to_be_visible()


def test_the_sick_simulator_stands_first(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good/fleet", "Fleet")
    first = page.get_by_role("region", name="Simulators, the sickest first").locator("tbody tr").first
    expect(first).to_contain_text("fleet-0 process 1")
    expect(first).to_contain_text("the floor is lava")


def test_is_b_better_than_a_in_words_from_two_ticks(visitor):
    visitor.read("good")
    visitor.read("weak")
    page = visitor.open()
    page.get_by_label("Compare weak").check()
    page.get_by_label("Compare good").check()
    page.get_by_role("main").get_by_role("link", name="Compare", exact=True).click()
    expect(page.locator(".verdicts")).to_contain_text("yes, good is better than weak")
    expect(page.get_by_role("img", name=re.compile("yes, good is better"))).to_be_visible()
    expect(page.locator("h1")).to_have_text("Is good better than weak?")
    expect(page.get_by_role("img", name=re.compile("yes, good is better"))).to_contain_text("weak better, −")
    expect(page.get_by_role("columnheader", name="good − weak")).to_be_visible()
    page.locator("#by").select_option("tokens")
    expect(page.get_by_text("by tokens trained").first).to_be_visible()


def test_the_only_other_run_is_chosen_too(browser, parent, tmp_path):
    for name in ("good", "weak"):
        shutil.copytree(parent / name, tmp_path / "two" / name)
    served = Served(tmp_path / "two", tmp_path / "cache")
    visitor = Visitor(browser, served.url)
    visitor.open("#/run/weak")
    visitor.page.get_by_role("navigation").get_by_role("link", name="Compare").click()
    expect(visitor.page.locator("h1")).to_have_text("Is weak better than good?")
    visitor.context.close()
    served.end()
    assert visitor.errors == []


def test_two_runs_that_are_alike_are_not_called_different(visitor):
    visitor.read("good")
    page = visitor.open("#/compare?a=good&b=good")
    expect(page.locator(".verdicts")).to_contain_text("no difference was seen")


def test_of_runs_that_are_being_read_nothing_is_said_yet(visitor):
    visitor.read("good")
    asked = []

    def half_read(route):
        asked.append(route.request.url)
        answer = route.fetch()
        words = {**answer.json(), "unread": ["good"], "lessons": []} if len(asked) == 1 else answer.json()
        route.fulfill(response=answer, json=words)

    visitor.page.route("**/api/compare?*", half_read)
    page = visitor.open("#/compare?a=good&b=good")
    expect(page.get_by_text("Reading good …")).to_be_visible()
    expect(page.get_by_text("nothing can be said")).to_have_count(0)
    expect(page.locator(".verdicts")).to_contain_text("no difference was seen")
    assert len(asked) == 2


def test_an_address_is_the_whole_state(browser, visitor):
    visitor.read("many")
    address = "#/run/many/groups?min_reward=0.5&order=reward&row=2"
    one = visitor.open(address).locator("a.vrow.at").inner_text()
    other = Visitor(browser, visitor.url)
    assert other.open(address).locator("a.vrow.at").inner_text() == one and "tools-0-0" in one
    other.context.close()


def test_back_goes_back(visitor):
    visitor.read("good")
    page = visitor.open("#/run/good/ledger", "Ledger")
    page.get_by_role("link", name="Fleet").click()
    expect(page.locator("h1").first).to_have_text("Fleet")
    page.go_back()
    expect(page.locator("h1").first).to_have_text("Ledger")


def test_dark_and_light_by_the_system_and_by_the_switch(browser, site):
    visitor = Visitor(browser, site.url, color_scheme="dark")
    page = visitor.open()
    ground = "() => getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.locator("#theme").click()
    light = page.evaluate(ground)
    assert dark != light
    page.reload()
    visitor.settled()
    assert page.evaluate(ground) == light
    visitor.context.close()


def test_an_unknown_page_and_an_unknown_run_say_so(visitor):
    page = visitor.open("#/run/good/nothing")
    expect(page.get_by_text("There is no page nothing.")).to_be_visible()
    visitor.pardoned = "404"
    with page.expect_console_message(lambda message: "404" in message.text):
        page = visitor.open("#/run/gone")
    expect(page.get_by_text("there is no run 'gone' here")).to_be_visible()


def test_a_live_run_grows_on_the_page(browser, tmp_path):
    directory = write_run(tmp_path / "live")
    measure(directory, 5, lambda step: 0.5)
    status = {"state": "running", "pid": os.getpid(), "steps": 10, "time": 4e9}
    directory.write_status({**status, "step": 5})
    served = Served(tmp_path / "live", tmp_path / "cache")
    visitor = Visitor(browser, served.url)
    page = visitor.open("")
    expect(page.locator("h1").first).to_have_text("live")
    expect(page.locator("#news")).to_have_text("live, update 5")
    metrics = MetricsLog(directory.metrics_path)
    metrics.append(6, {"train/entropy": 123.0})
    metrics.close()
    directory.write_status({**status, "step": 6})
    expect(page.locator("#news")).to_have_text("live, update 6", timeout=20_000)
    expect(page.get_by_role("region", name="Entropy", exact=True)).to_contain_text("123", timeout=20_000)
    fates = JsonLinesLog(directory.fates_path)
    fates.append(
        {"rollout_id": "cats-0-2/0", "fate": "evicted", "reason": "no room", "step": 6, "lineage": 0, "time": 2.0}
    )
    fates.close()
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Ledger").click()
    expect(page.get_by_text("no room")).to_be_visible(timeout=20_000)
    visitor.context.close()
    served.end()
    assert visitor.errors == [] or all("ERR_" in error for error in visitor.errors)


def test_the_list_shows_runs_that_begin_and_go_on_while_it_is_open(browser, tmp_path):
    folder, status = tmp_path / "runs", {"state": "running", "pid": os.getpid(), "steps": 10, "time": 4e9}
    first = write_run(folder / "first")
    first.write_status({**status, "step": 5})
    served = Served(folder, tmp_path / "cache")
    visitor = Visitor(browser, served.url)
    page = visitor.open("#/")
    rows = page.locator("tr.pick")
    expect(rows).to_contain_text(["first"])
    page.get_by_label("Compare first").check()
    write_run(folder / "second").write_status({**status, "step": 1})
    page.wait_for_timeout(7000)  # longer than the list's own pause
    assert rows.count() == 1 and page.get_by_label("Compare first").is_checked()
    page.get_by_label("Compare first").uncheck()
    expect(rows).to_have_count(2, timeout=20_000)
    first.write_status({**status, "step": 9})
    expect(page.locator("tr.pick", has_text="first")).to_contain_text("9 / 10", timeout=40_000)
    visitor.context.close()
    served.end()
    assert visitor.errors == [] or all("ERR_" in error for error in visitor.errors)


def test_a_token_is_refused_accepted_and_gone_from_the_address(browser, parent, tmp_path):
    served = Served(parent / "good", tmp_path / "cache", TOKEN)
    visitor = Visitor(browser, served.url)
    assert visitor.page.goto(served.url).status == 401
    assert visitor.page.goto(f"{served.url}/?token=wrong-token-here").status == 401
    visitor.page.goto(f"{served.url}/?token={TOKEN}")
    visitor.settled()
    assert TOKEN not in visitor.page.url and visitor.page.evaluate("() => document.cookie") == ""
    visitor.context.close()
    served.end()


def test_a_bundle_opens_from_the_disk(browser, parent, tmp_path):
    runs = tmp_path / "runs"
    for name in ("good", "weak", "hostile"):
        shutil.copytree(parent / name, runs / name)
    write_bundle(runs, tmp_path / "out")
    visitor = Visitor(browser, f"file://{tmp_path}/out")
    page = visitor.open("index.html", "Runs")
    page.get_by_role("link", name="good", exact=True).click()
    expect(page.get_by_role("region", name="Entropy", exact=True).locator("canvas")).to_be_visible()
    page.goto(f"{visitor.url}/index.html#/run/good/groups?state=trained")
    expect(page.locator("a.vrow")).to_have_count(3)
    page.locator("a.vrow").first.click()
    expect(page.locator("article.answer").first).to_be_visible()
    page.goto(f"{visitor.url}/index.html#/compare?a=weak&b=good")
    expect(page.locator(".verdicts")).to_contain_text("yes, good is better than weak")
    page.goto(f"{visitor.url}/index.html#/run/hostile/group?id=cats-1-0")
    expect(page.locator("article.answer").first).to_contain_text("<script>")
    assert page.evaluate("() => window.harmed === undefined")
    visitor.context.close()
    assert visitor.errors == [] and visitor.abroad == []


PAGES = [
    "#/", "#/run/good", "#/run/good/ledger", "#/run/good/groups", "#/run/good/group?id=tools-0-0",
    "#/run/good/timeline", "#/run/robots/timeline", "#/run/good/lessons", "#/run/good/fleet",
    "#/run/good/update?step=2", "#/compare?a=weak&b=good",
]  # fmt: skip

AXE = """() => axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice'] }).then((found) =>
  found.violations.flatMap((rule) => rule.nodes.map((node) => `${rule.id}: ${node.html.slice(0, 120)} (${
    node.any.concat(node.all, node.none).map((check) => check.message).join('; ').slice(0, 160)})`)))"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_any_page(browser, site, scheme, width):
    """Contrast, names, labels, landmarks, order of headings and more, by the rules of axe-core."""
    axe = pytest.importorskip("axe_playwright_python", reason="no axe: pip install 'penstock[dashboard-test]'")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text()
    visitor = Visitor(browser, site.url, color_scheme=scheme)
    visitor.page.set_viewport_size({"width": width, "height": 900})
    visitor.open()
    for run in ("good", "weak", "robots"):
        visitor.read(run)
    found = {}
    for address in PAGES:
        page = visitor.open(address)
        if "groups" in address:
            expect(page.locator("a.vrow").first).to_be_visible()
        page.evaluate(script)
        if problems := page.evaluate(AXE):
            found[address] = problems
    visitor.context.close()
    assert not found, json.dumps(found, indent=1)


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(browser, site, width):
    visitor = Visitor(browser, site.url)
    visitor.page.set_viewport_size({"width": width, "height": 800})
    for address in PAGES:
        page = visitor.open(address)
        over = page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth")
        assert over <= 0, f"{address} is {over} px too wide at {width}"
    visitor.context.close()
