"""The worked example of docs/replay.md, played with the real classes."""

import re
from pathlib import Path

from penstock.replay import STATES, ReplayBufferConfig

PAGE = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()


def test_the_worked_example_happens_as_it_is_told(sim):
    rows = re.findall(r"^\| [^|]+ \| (\d) \| (\d) \| (\d) \| ([a-f ]+?) ?[,(|]", PAGE, re.MULTILINE)
    told = [(int(u), int(v), int(limit), set(names.split())) for u, v, limit, names in rows]
    run = sim.Simulation(ReplayBufferConfig(groups_per_batch=2, staleness_budget=1), sim.World(slots=0))
    names, tickets, seen = {}, {}, []

    def look():
        held = {names[entry.ticket.ticket_id] for entry in run.issuer.outstanding}
        seen.append((run.issuer.update, run.issuer.serving_step, run.issuer.limit, held))

    def admit(letters):
        for letter, ticket in zip(letters, run.issuer.acquire(9, 0), strict=True):
            names[ticket.ticket_id], tickets[letter] = letter, ticket

    def finish(*letters):
        for letter in letters:
            rewards = [0.0, 1.0, 0.0][: sim.GROUP_SIZES[tickets[letter].lesson_id]]
            sim.deliver(run.buffer, sim.make_group(tickets[letter], rewards, timestamp=run.now))

    admit("abcd")
    look()
    finish("a", "c")
    look()
    batch = run.buffer.try_next_batch(0)
    assert [names[group] for group in batch.group_ids] == ["a", "c"]
    assert batch.metrics["replay/overtakes"] == 1
    look()
    assert run.issuer.acquire(9, 0) == []
    run.buffer.finish_update(0)
    run.buffer.set_current_step(1)
    run.issuer.set_serving_step(1)
    admit("ef")
    assert {ticket.deadline_step for letter, ticket in tickets.items() if letter in "ef"} == {2}
    look()
    finish("e")
    assert run.buffer.try_next_batch(1) is None
    look()
    finish("b", "d")
    look()
    assert {names[group] for group in run.buffer.try_next_batch(1).group_ids} == {"b", "d"}
    assert seen == told


def test_every_state_is_explained():
    table = PAGE.partition("## The ledger")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {state for row in rows for state in re.findall(r"`(\w+)`", row)} == set(STATES)
