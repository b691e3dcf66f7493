"""Which events of simulators are kept, and which the user is told of at once."""

from penstock.overseer.simulator_events import failure_in_words, is_news


def test_every_life_of_a_simulator_is_kept_and_the_terminal_is_quiet_about_it():
    for life in (0, 1):
        fields = {"worker": "fleet-0", "life": life, "first_seeds": [7]}
        assert is_news("simulator_started", fields) and failure_in_words("simulator_started", fields) == ""


def test_a_nursery_is_news_only_with_troubles():
    assert not is_news("nursery_ready", {"seconds": 0.1, "troubles": []})
    assert is_news("nursery_ready", {"seconds": 0.1, "troubles": ["a module started a thread"]})
    assert is_news("nursery_ended", {"reason": "it ended"})


def test_a_failure_is_told_in_one_line_with_its_task():
    told = failure_in_words("simulator_failed", {"task": "pole", "reason": "it\nended by SIGKILL"})
    assert told == "a simulator failed (task pole): it ended by SIGKILL"
