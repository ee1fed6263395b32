"""Bugs put into `hf_private/cli`."""

from tests.mutations.mutant import Mutant

MUTANTS = (
    Mutant(
        "epsilons of different units are added up",
        "cli/compose.py",
        (("if unit_of_statement(known) != unit_of_statement(statement):", "if False:"),),
        "tests/trainer/test_units.py::test_releases_compose_per_unit_if_all_draw_the_same_unit",
    ),
    Mutant(
        "epsilons of groups of records are added up as if each were one record's",
        "cli/compose.py",
        (('if unit["unit"] != "record" and unit.get("sampling") != "units":', "if False:"),),
        "tests/trainer/test_units.py::test_releases_compose_per_unit_if_all_draw_the_same_unit",
    ),
)
