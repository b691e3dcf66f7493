"""Places that a run writes to, named by their keys where they cannot be used."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.types import ConfigError


@contextmanager
def naming(key: str, place: object) -> Iterator[None]:
    """A place that cannot be used is bad input.

    Raises:
        ConfigError: whatever the system refused inside, told by its key.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key}: {place} cannot be used: {error}; name a place that can be written") from error
