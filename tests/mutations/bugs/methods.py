"""Bugs put into `hf_private/methods`."""

from tests.mutations.mutant import Mutant

MUTANTS = (
    Mutant(
        "GEP's two releases are charged as one",
        "methods/gep/method.py",
        (("return (noise_multiplier * math.sqrt(2),) * 2 if", "return (noise_multiplier * math.sqrt(2),) if"),),
        "tests/methods/gep/test_sensitivity.py::test_golden_epsilon",
    ),
    Mutant(
        "GEP's residual norm from a float32 difference, without slack",
        "methods/gep/method.py",
        (("clamp_min(0) + self.slack * sq_norm", "clamp_min(0)"),),
        "tests/methods/gep/test_sensitivity.py::test_no_gradient_releases_more_than_both_clip_norms",
    ),
    Mutant(
        "left carrier is not orthonormal",
        "methods/carriers/lowrank.py",
        (("left = orthonormal(_or_else(product, left))", "left = _or_else(product, left)"),),
        "tests/methods/carriers/test_lowrank.py::test_carriers_are_orthonormal_whatever_the_matrix",
    ),
    Mutant(
        "LSG's mask from private gradients",
        "methods/carriers/lowrank.py",
        (
            (
                "g = _columns(g, self.kept[side])",
                "g = _columns(g, g.abs().sum((0, 1)).topk(len(self.kept[side])).indices)",
            ),
        ),
        "tests/methods/carriers/test_method.py::test_norms_and_clipped_sums_equal_the_oracles",
    ),
    Mutant(
        "the card calls a custom method BK",
        "methods/registry.py",
        (("if recorded is not None and recorded not in CONFIGURED:", "if False:"),),
        "tests/recipes/test_powersgd.py::test_the_recipe_runs_with_its_own_method_and_its_card_names_it",
    ),
    Mutant(
        "GEP forgets the sums of earlier micro-batches",
        "methods/gep/method.py",
        (("sums[block] = sums[block].add_(value) if block in sums else value", "sums[block] = value"),),
        "tests/methods/gep/test_method.py::test_micro_batches_change_nothing",
    ),
    Mutant(
        "carriers from gradients before the noise",
        "methods/carriers/method.py",
        (
            (
                '        return {f"{name}:{side}": part for side, part in self.carriers[name].project(value)}',
                '        found = {f"{name}:{side}": part for side, part in self.carriers[name].project(value)}\n'
                '        if self.source == "momentum":\n'
                "            parts = {block[-1]: part.dense().sum(0) for block, part in found.items()}\n"
                "            self.momentum.setdefault(name, Momentum()).add(parts)\n"
                "        return found",
            ),
            ("self.momentum.setdefault(name, Momentum()).add(parts)  # noised", "pass  # noised"),
        ),
        "tests/methods/carriers/test_sources.py::test_carriers_see_private_records_only_through_the_release",
    ),
    Mutant(
        "the history of the weights holds gradients before the noise",
        "methods/carriers/method.py",
        (
            (
                '        return {f"{name}:{side}": part for side, part in self.carriers[name].project(value)}',
                "        if name in self.start:\n"
                "            self.start[name] = self.start[name] - value.dense().sum(0).view_as(self.start[name])\n"
                '        return {f"{name}:{side}": part for side, part in self.carriers[name].project(value)}',
            ),
        ),
        "tests/methods/carriers/test_sources.py::test_carriers_see_private_records_only_through_the_release[history]",
    ),
    Mutant(
        "public carriers hold gradients of private records too",
        "methods/carriers/method.py",
        (
            (
                '        return {f"{name}:{side}": part for side, part in self.carriers[name].project(value)}',
                '        if self.source == "public":\n'
                "            self.start[name] = self.start.get(name, 0) + value.dense().sum(0)\n"
                '        return {f"{name}:{side}": part for side, part in self.carriers[name].project(value)}',
            ),
            (
                "return lambda: oriented(public[name])",
                "return lambda: oriented(public[name] + self.start.get(name, 0))",
            ),
        ),
        "tests/methods/carriers/test_sources.py::test_carriers_see_private_records_only_through_the_release[public]",
    ),
    Mutant(
        "Sparse DP-SGD keeps the elements with large gradients",
        "methods/carriers/lowrank.py",
        (
            (
                'yield "S", Dense(value.dense().flatten(1).index_select(1, self.index))',
                "g = value.dense().flatten(1)\n"
                '        yield "S", Dense(g.index_select(1, g.abs().sum(0).topk(len(self.index)).indices))',
            ),
        ),
        "tests/methods/carriers/test_method.py::test_norms_and_clipped_sums_equal_the_oracles",
    ),
    Mutant(
        "momentum resumes without its average, silently",
        "methods/carriers/method.py",
        (('if self.source == "momentum":\n                raise', "if False:\n                raise"),),
        "tests/methods/carriers/test_trainer.py::test_momentum_cannot_be_resumed_without_its_average",
    ),
    Mutant(
        "public carriers may share records with the training data",
        "methods/gep/public_data.py",
        (("    if training is not None:\n        check_apart", "    if training is None:\n        check_apart"),),
        "tests/methods/carriers/test_trainer.py::test_public_carriers_come_from_the_anchor_dataset",
    ),
)
