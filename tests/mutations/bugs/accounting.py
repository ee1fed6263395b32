"""Bugs put into `hf_private/accounting`."""

from tests.mutations.mutant import Mutant

MUTANTS = (
    Mutant(
        "the loss of adding a record is that of removing one",
        "accounting/pld.py",
        (("-logs if adds else logs", "logs"),),
        "tests/accounting/test_pld.py::test_one_step_is_that_of_the_package",
    ),
    Mutant(
        "an attacker's risk is that of the easier direction",
        "accounting/risk.py",
        (
            (
                "remove, add = accountants.pld_losses(settings, records)",
                "add, remove = accountants.pld_losses(settings, records)",
            ),
        ),
        "tests/accounting/test_risk.py::test_golden_run",
    ),
    Mutant(
        "a person's further records are left out of the risk",
        "accounting/risk.py",
        (
            (
                "remove, add = accountants.pld_losses(settings, records)",
                "remove, add = accountants.pld_losses(settings)",
            ),
        ),
        "tests/accounting/test_risk.py::test_bounds_are_tight_where_densities_can_be_integrated[three records]",
    ),
    Mutant(
        "tried runs are not part of the risk",
        "accounting/risk.py",
        (("steps=int(runs) * event.steps", "steps=event.steps"),),
        "tests/accounting/test_risk.py::test_a_fixed_number_of_runs_is_composed",
    ),
    Mutant(
        "the risk of tuning is that of one run",
        "accounting/risk.py",
        (("coupled = 1 - expected_power(1 - single.advantage, runs, law)", "coupled = single.advantage"),),
        "tests/accounting/test_risk.py::test_best_of_a_random_number_of_runs",
    ),
    Mutant(
        "risks are rounded down",
        "accounting/risk.py",
        (("math.ceil(value * 10**digits)", "math.floor(value * 10**digits)"),),
        "tests/accounting/test_risk.py::test_displays_round_up",
    ),
    Mutant(
        "mu is the Gaussian that fits at epsilon 0 only",
        "accounting/tradeoff.py",
        (("inside = self.epsilons <= up_to", "inside = self.epsilons <= 0"),),
        "tests/accounting/test_risk.py::test_golden_run",
    ),
    Mutant(
        "a step without noise carries no risk",
        "accounting/risk.py",
        (("0.0 if settings is not None else 1.0", "0.0"),),
        "tests/accounting/test_risk.py::test_without_noise_everything_is_known",
    ),
    Mutant(
        "live epsilon is that of the steps before",
        "accounting/schedule.py",
        (
            (
                "index = int(np.searchsorted(self.steps, step))",
                "index = max(int(np.searchsorted(self.steps, step)) - 1, 0)",
            ),
        ),
        "tests/accounting/test_schedule.py::test_never_below_the_accountant_at_any_step",
    ),
    Mutant(
        "live epsilon forgets what was spent before",
        "accounting/schedule.py",
        (("return (*spent, Event(event.sample_rate", "return (*(), Event(event.sample_rate"),),
        "tests/accounting/test_schedule.py::test_never_below_the_accountant_at_any_step",
    ),
    Mutant(
        "noise for an advantage forgets what was spent before",
        "accounting/risk_budget.py",
        (("return (*spent, Event(sample_rate, (sigma,), steps))", "return (Event(sample_rate, (sigma,), steps),)"),),
        "tests/accounting/test_risk_budget.py::test_what_is_spent_counts",
    ),
    Mutant(
        "noise for an advantage is rounded down",
        "accounting/risk_budget.py",
        (
            ("sigma, up = math.ceil(sigma * 1e6) / 1e6, 1e-6", "return math.floor(sigma * 1e6) / 1e6"),
            ("    while excess(sigma) > 0:\n        sigma, up = round(sigma + up, 6), 2 * up\n    return sigma\n", ""),
        ),
        "tests/accounting/test_risk_budget.py::test_one_gaussian_has_a_closed_form",
    ),
    Mutant(
        "a budget is enforced on the grid that only guides the search",
        "accounting/budget.py",
        (("records=records_per_unit) - goal", "records=records_per_unit, quick=True) - goal"),),
        "tests/accounting/test_calibrate.py::test_quick_grids_only_guide_the_search",
    ),
)
