"""The run-time type checker of the tests: beartype, with an int allowed where a float is declared (PEP 484)."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
