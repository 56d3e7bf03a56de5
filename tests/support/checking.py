"""The type checker of the test run: beartype, where an int is a float (PEP 484's numeric tower)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
