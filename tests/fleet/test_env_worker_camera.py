"""What a simulator process leaves in the film area, turn by turn, without a process."""

import os
from types import SimpleNamespace

import pytest
from tests.fleet.painted import COLOURS, Painted

from penstock.fleet.env_worker import Camera, filmed_maker
from penstock.fleet.shared_block import SharedBlock, block_bytes, create_memory
from penstock.types import ConfigError, LeafSpace, Spaces

_SPACES = Spaces((LeafSpace("", "box", (3,), "uint8"),), (LeafSpace("", "discrete", (), "int64", n=(2,)),))


class _Turns:
    """Two painted simulators of one process."""

    def __init__(self):
        fd = create_memory(block_bytes(_SPACES, 2, True))
        block = SharedBlock(fd, _SPACES, 2, True)
        os.close(fd)
        self.area, self._envs = block.film, [Painted("rgb_array"), Painted("rgb_array")]
        for env in self._envs:
            env.reset()
        self._camera = Camera(block, [SimpleNamespace(env=env) for env in self._envs])

    def turn(self):
        for row, env in enumerate(self._envs):
            if env.step(0)[2]:
                self._camera.note_end(row)
                env.reset()
                self._camera.note_begin(row)
        self._camera.note_turn()
        frame = self.area.take()
        step = None if frame.picture is None else int((COLOURS == frame.picture[0, 0]).all(axis=1).argmax())
        return frame.label.name, step


def test_the_next_episode_is_taken_and_then_no_more():
    turns = _Turns()
    assert [turns.turn() for _ in range(2)] == [("NOTHING", None)] * 2
    turns.area.ask(1)
    assert [turns.turn() for _ in range(7)] == [
        ("NOTHING", None), ("FIRST", 0), ("NEXT", 1), ("NEXT", 2), ("NEXT", 3), ("LAST", 4), ("NOTHING", None),
    ]  # fmt: skip
    assert turns.area.asked is None


def test_a_request_that_is_taken_back_ends_the_pictures_and_the_next_one_begins_with_a_whole_episode():
    turns = _Turns()
    turns.area.ask(0)
    assert [turns.turn() for _ in range(5)][3:] == [("FIRST", 0), ("NEXT", 1)]
    turns.area.ask(None)
    assert turns.turn() == ("NOTHING", None)
    turns.area.ask(0)
    assert [turns.turn()[0] for _ in range(3)] == ["NOTHING", "FIRST", "NEXT"]


def test_pictures_are_asked_for_where_a_simulator_takes_it_and_the_tasks_own_words_go_first():
    def make(id, kwargs):
        if id == "plain" and kwargs:
            raise ConfigError("no such argument")
        return SimpleNamespace(kwargs=kwargs)

    made = filmed_maker(make)
    assert made("any", {"a": 1}).kwargs == {"a": 1, "render_mode": "rgb_array"}
    assert made("any", {"render_mode": None}).kwargs == {"render_mode": None}
    assert made("plain", {}).kwargs == {}
    with pytest.raises(ConfigError, match="no such argument"):
        made("plain", {"a": 1})
