import pytest

from penstock.overseer.assembly import naming
from penstock.types import ConfigError


def test_what_the_system_refuses_is_told_by_its_key():
    with pytest.raises(
        ConfigError, match=r"^replay\.store\.url: /dev/null/x cannot be used: .*; name a place that can"
    ):
        with naming("replay.store.url", "/dev/null/x"):
            raise NotADirectoryError("Not a directory")


def test_other_errors_pass():
    with pytest.raises(ValueError, match="mine"), naming("key", "place"):
        raise ValueError("mine")
