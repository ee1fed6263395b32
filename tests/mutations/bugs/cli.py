"""Bugs put into `hf_private/cli`."""

from tests.mutations.mutant import Mutant

MUTANTS = (
    Mutant(
        "epsilons of different units are added up",
        "cli/compose.py",
        (("if not same or _group(known)", "if False and _group(known)"),),
        "tests/trainer/test_units.py::test_releases_compose_per_unit_if_all_draw_the_same_unit",
    ),
    Mutant(
        "epsilons of groups of records are added up as if each were one record's",
        "cli/compose.py",
        (('else unit["records_per_unit"]', "else 1"),),
        "tests/trainer/test_units.py::test_releases_of_groups_compose_as_groups",
    ),
)
