import pytest

from penstock.overseer.assembly import config_error_for
from penstock.types import ConfigError


def test_what_the_system_refuses_is_told_by_its_key():
    with pytest.raises(
        ConfigError, match=r"^replay\.store\.url: /dev/null/x cannot be used: .*; name a place that can"
    ):
        with config_error_for("replay.store.url", "/dev/null/x"):
            raise NotADirectoryError("Not a directory")


def test_other_errors_pass():
    with pytest.raises(ValueError, match="mine"), config_error_for("key", "place"):
        raise ValueError("mine")
