"""The words of each version of the package.

A card is compared word for word with what the version of its statement renders. So each version that changed the words
keeps its templates in `templates/<version>/`, and a card of an older version is compared with the older words.
"""

import re
from functools import cache
from importlib.resources import files
from typing import Any

from hf_private import __version__

TEMPLATES = files("hf_private.publishing").joinpath("templates")


def template_version(version: str) -> str | None:
    """Name of the templates that a version uses: the newest ones that are not newer. None if the version is unknown.

    >>> template_version("0.1.3"), template_version("9.9.9")
    ('0.1.0', None)
    """
    number = _number(version)
    if number is None or number > (_number(__version__) or ()):
        return None
    known = [name for name in _folders() if (_number(name) or ()) <= number]
    return known[-1] if known else None


def is_known(statement: dict[str, Any]) -> bool:
    """Whether the words of the version that wrote a statement are known here."""
    return template_version(statement["versions"]["hf_private"]) is not None


def template(statement: dict[str, Any], name: str) -> str:
    """A template in the words of the statement's version, or of this version if that one is unknown."""
    version = template_version(statement["versions"]["hf_private"]) or _folders()[-1]
    return _read(version, name)


def in_own_words(statement: dict[str, Any]) -> dict[str, Any]:
    """A statement built by this version, as the version that it names would have written it.

    >>> in_own_words({"versions": {"hf_private": "0.1.0"}, "guarantee": {"unit": "record", "risk": {}}})["guarantee"]
    {'unit': 'record'}
    """
    if template_version(statement["versions"]["hf_private"]) == "0.1.0" and "guarantee" in statement:
        guarantee = {name: value for name, value in statement["guarantee"].items() if name != "risk"}
        return {**statement, "guarantee": guarantee}  # 0.1.0 did not state attack rates
    return statement


@cache
def _folders() -> tuple[str, ...]:
    """Versions that have templates, oldest first."""
    names = [folder.name for folder in TEMPLATES.iterdir() if _number(folder.name) is not None]
    return tuple(sorted(names, key=lambda name: _number(name) or ()))


@cache
def _read(version: str, name: str) -> str:
    return TEMPLATES.joinpath(version, name).read_text(encoding="utf-8")


def _number(version: str) -> tuple[int, ...] | None:
    """The numbers of `X.Y.Z` or `X.Y.Z.devN`, without the last; None for anything else."""
    found = re.fullmatch(r"([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})(\.dev[0-9]{1,4})?", version)
    return tuple(int(part) for part in found.groups()[:3]) if found else None
