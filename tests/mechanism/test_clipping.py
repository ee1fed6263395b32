"""Clip factors: no record exceeds the clip norm, in any mode, whatever its gradient is."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_private.mechanism.clipping import MODES, Clipping, layer_of, numbered_block_of

BLOCKS = ["h.0.a.weight", "h.0.a.bias", "h.0.b.weight:L", "h.1.b.weight:R"]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(list(MODES)),
    st.sampled_from([0.0, 0.01]),
    st.floats(1e-6, 1e6),
    st.lists(st.lists(st.floats(0, 1e12), min_size=4, max_size=4), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_no_record_exceeds_the_clip_norm(mode, gamma, clip_norm, rows, dtype):
    sq = torch.tensor(rows, dtype=dtype)
    sq_norms = {block: sq[:, i] for i, block in enumerate(BLOCKS)}
    factors = Clipping(mode, clip_norm, gamma).factors(sq_norms, BLOCKS)
    clipped = sum(factors[b].double().square() * sq_norms[b].double() for b in BLOCKS).sqrt()
    assert (clipped <= clip_norm * (1 + 1e-6)).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_record_with_a_nonfinite_norm_gets_factor_zero_in_every_block(mode, bad):
    sq_norms = {"a.weight": torch.tensor([1.0, bad]), "b.weight": torch.tensor([1.0, 1.0])}
    for factor in Clipping(mode, 2.0).factors(sq_norms).values():
        assert factor[1] == 0 and factor[0] > 0


def test_flat_clipping_leaves_small_gradients_alone():
    factor = Clipping("flat", 1.0).factors({"w": torch.tensor([0.0, 0.25, 4.0])})["w"]
    torch.testing.assert_close(factor, torch.tensor([1.0, 1.0, 0.5]), rtol=2e-5, atol=0)
    assert factor[2] < 0.5, "the slack must lower the factor"


def test_automatic_clipping_is_auto_s():
    factor = Clipping("automatic", 2.0, gamma=0.1).factors({"w": torch.tensor([4.0, 0.0]).double()})["w"]
    torch.testing.assert_close(factor, torch.tensor([2 / 2.1, 2 / 0.1], dtype=torch.float64), rtol=1e-9, atol=0)


def test_without_gamma_automatic_clipping_is_auto_v():
    """Every record has the same norm, whatever it was; one that is too small for float32 is dropped."""
    sq_norm = torch.tensor([4.0, 1e-8, 0.0, 1e-26])
    factor = Clipping("automatic", 2.0, gamma=0.0).factors({"w": sq_norm})["w"]
    torch.testing.assert_close(factor * sq_norm.sqrt(), torch.tensor([2.0, 2.0, 0, 0]), rtol=2e-5, atol=0)


def test_global_clipping_drops_large_records():
    factor = Clipping("global", 1.0).factors({"w": torch.tensor([0.0, 0.98, 1.0, 1.02, 1e9])})["w"]
    assert factor.tolist() == [1, 1, 0, 0, 0]  # at the clip norm itself, the slack decides


def test_groups_are_numbered_blocks():
    sq_norms = {block: torch.tensor([9.0]).double() for block in BLOCKS}
    factor = Clipping("per-block", 3.0).factors(sq_norms, [*BLOCKS, "head.weight"])
    share = 3.0 / math.sqrt(3)
    assert factor["h.0.a.weight"].item() == pytest.approx(share / math.sqrt(27))
    assert factor["h.1.b.weight:R"].item() == pytest.approx(share / 3)
    assert numbered_block_of("encoder.layer.11.fc.weight:L") == "encoder.layer.11"
    assert numbered_block_of("pooler.dense.weight") == "pooler.dense"


def test_automatic_clipping_per_layer():
    sq_norms = {"a.weight": torch.tensor([9.0]).double(), "b.weight": torch.tensor([0.0]).double()}
    factor = Clipping("automatic-per-layer", 2.0, gamma=1.0).factors(sq_norms)
    assert factor["a.weight"].item() == pytest.approx(2 / math.sqrt(2) / 4)
    assert factor["b.weight"].item() == pytest.approx(2 / math.sqrt(2))


def test_per_layer_clipping_shares_the_norm_over_all_layers_reached_or_not():
    sq_norms = {"a.weight": torch.tensor([100.0]).double(), "a.bias": torch.tensor([44.0]).double()}
    blocks = ["a.weight", "a.bias", "b.weight", "c.weight:L", "c.weight:R"]
    factor = Clipping("per-layer", 3.0).factors(sq_norms, blocks)
    share = 3.0 / math.sqrt(3)
    torch.testing.assert_close(factor["a.weight"], torch.tensor([share / 12], dtype=torch.float64), rtol=1e-9, atol=0)
    assert factor["a.bias"] is factor["a.weight"]


def test_an_infinite_clip_norm_changes_nothing():
    assert torch.equal(Clipping("flat", math.inf).factors({"w": torch.tensor([1e30, 0.0])})["w"], torch.ones(2))


def test_layer_names():
    assert layer_of("encoder.0.fc.weight") == layer_of("encoder.0.fc.bias") == layer_of("encoder.0.fc.weight:L")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"mode": "adaptive"}, "clipping"),
        ({"clip_norm": 0}, "clip_norm"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"clip_norm": 1e-9}, "clip_norm"),
        ({"clip_norm": float("nan")}, "clip_norm"),
        ({"gamma": -0.1}, "gamma"),
        ({"mode": "automatic-per-layer", "clip_norm": math.inf}, "clip_norm"),
        ({"mode": "automatic", "clip_norm": math.inf}, "clip_norm"),
    ],
)
def test_bad_values_are_named(options, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        Clipping(**options)
