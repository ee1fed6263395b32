"""Bugs put into the modules outside packages."""

from tests.mutations.mutant import Mutant

MUTANTS = (
    Mutant(
        "no epsilon and no noise given means no noise, silently",
        "config.py",
        (
            (
                "if not given:\n            raise ValueError(",
                "if not given:\n            self.noise_multiplier = 0.0\n            str(",
            ),
        ),
        "tests/test_config.py::test_epsilon_and_noise_exclude_each_other_and_one_is_needed",
    ),
)
