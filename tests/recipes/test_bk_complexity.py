"""The formulas against the paper's numbers, and our rule against the engine's."""

import pytest
import torch
from bk_complexity import MODELS, Layer, operations, paper_forms, rows, scratch, we_form

from hf_private.gradients.persample import Gram, Outer


def test_the_papers_relative_speeds_follow():
    """Table 1, in parentheses: by complexity. BEiT's is 0.912, which the paper prints as 0.92."""
    for name, (layers, published) in MODELS.items():
        if published:
            speed = operations(layers, "not private") / operations(layers, "BK")
            assert speed == pytest.approx(float(published), abs=0.01), name


@pytest.mark.parametrize("t", [1, 19, 20, 32, 45, 46, 64])
def test_the_rules_are_those_of_the_engine_and_of_the_paper(t):
    layer, value = Layer(t, 64, 64), Outer(torch.zeros(1, t, 64), torch.zeros(1, t, 64))
    assert we_form(layer) == value.instantiating_is_smaller() == (t >= 20)
    assert paper_forms(layer) == (t >= 46)


def test_a_gram_matrix_costs_at_most_what_the_formula_says():
    for t in (8, 64, 200):
        strips = Gram(torch.randn(1, t, 16)).strips
        assert 2 * 16 * sum(strip[0].numel() for strip in strips) <= 16 * t * min(t + 32, 2 * t)


def test_ours_forms_wherever_the_paper_does():
    for row in rows():
        assert row["we_form"] >= row["paper_forms"]
        assert row["speed"]["this library"] >= row["speed"]["BK-MixOpt"] - 1e-9


def test_the_memory_of_resnet18_is_that_of_the_papers_table_4():
    grams, formed, mixed, _ = scratch()["all"]
    assert (round(grams / 1e6), round(formed / 1e6, 1), round(mixed / 1e6, 1)) == (399, 11.5, 1.0)
    assert scratch()["conv1"][:2] == (2 * 112**4, 64 * 147)
