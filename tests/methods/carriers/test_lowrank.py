"""Carriers by themselves, against autograd, SVD and gradients that were formed."""

import pytest
import torch
from torch import nn

from hf_private.gradients.persample import Dense, Outer, Rows
from hf_private.methods.carriers.lowrank import LowRank, Submatrix, important, kept, power_method, truncated

RECTANGLES = [nn.Linear(6, 4, bias=False), nn.Conv2d(3, 4, 2, bias=False), nn.Conv1d(5, 4, 3, bias=False)]


@pytest.mark.parametrize("layer", RECTANGLES, ids=["linear", "conv2d", "conv1d"])
def test_rows_and_columns_are_kept_by_their_own_sums(layer):
    """Swapped masks would not show on square matrices: these are rectangular, and the right answer is planted."""
    weight = torch.rand(layer.weight.shape) * 1e-3
    weight[2] += 1
    weight[0] += 1
    weight[:, 1] += 0.5
    rows, columns = important(weight, sparsity=0.5)
    positions = weight[0, 0].numel()
    assert rows.tolist() == [0, 2]
    assert len(columns) == kept(weight.shape[1], 0.5) * positions
    assert set(range(positions, 2 * positions)) <= set(columns.tolist())
    channels = weight.abs().transpose(0, 1).flatten(1).sum(1).topk(kept(weight.shape[1], 0.5)).indices
    assert sorted(set((columns // positions).tolist())) == sorted(channels.tolist())


def test_conv1d_keeps_the_same_neurons_as_the_linear_layer_that_it_is():
    weight = torch.randn(5, 9)
    outputs, inputs = important(weight, 0.4)
    stored_inputs, stored_outputs = important(weight.t(), 0.4)
    assert outputs.tolist() == stored_outputs.tolist() and inputs.tolist() == stored_inputs.tolist()


def test_masked_reconstruction_is_equation_3_of_the_masked_parts_averaged_over_both_middle_terms():
    torch.manual_seed(0)
    left, right = torch.linalg.qr(torch.randn(7, 2)).Q, torch.linalg.qr(torch.randn(5, 2)).Q.T
    rows, columns = torch.tensor([0, 3, 6]), torch.tensor([1, 2])
    parts = {"L": torch.randn(2, 3), "R": torch.randn(2, 2)}
    d_left, d_right = torch.zeros(7, 2), torch.zeros(2, 5)
    d_left[rows], d_right[:, columns] = parts["L"].T, parts["R"]
    middle = (left.T @ d_left + d_right @ right.T) / 2
    wanted = d_left @ right + left @ d_right - left @ middle @ right
    torch.testing.assert_close(LowRank(left, right, kept=(rows, columns)).reconstruct(parts), wanted)


def test_the_papers_iff_does_not_hold_weights_outside_both_masks_move():
    torch.manual_seed(0)
    left, right = torch.linalg.qr(torch.randn(7, 2)).Q, torch.linalg.qr(torch.randn(5, 2)).Q.T
    carriers = LowRank(left, right, kept=(torch.tensor([0, 3, 6]), torch.tensor([1, 2])))
    assert carriers.reconstruct({"L": torch.randn(2, 3), "R": torch.randn(2, 2)})[1, 0] != 0


def test_truncation_is_the_svds():
    torch.manual_seed(0)
    left, right = torch.randn(9, 4), torch.randn(4, 6)
    u, s, vh = torch.linalg.svd(left @ right, full_matrices=False)
    [(found, directions)] = truncated([(left, right)], 3)
    torch.testing.assert_close(found @ directions, u[:, :3] * s[:3] @ vh[:3])
    torch.testing.assert_close(directions @ directions.T, torch.eye(3))


# ---- what carriers take of a gradient


def test_theorem_2_1_reparametrised_gradients():
    """dL and dR of the reparametrised layer, by autograd, are what is computed without reparametrising."""
    weight, x = torch.randn(5, 7), torch.randn(4, 3, 7)
    left, right = (torch.linalg.qr(torch.randn(5, 2)).Q, torch.linalg.qr(torch.randn(7, 2)).Q.T)
    left.requires_grad_(), right.requires_grad_()

    def gradients(w, *variables):
        return torch.autograd.grad((x @ w.T).tanh().square().sum(), variables)

    (d_weight,) = gradients(weight.requires_grad_(), weight)
    d_left, d_right = gradients(left @ right + (weight - left @ right).detach(), left, right)
    torch.testing.assert_close(d_left, d_weight @ right.T)
    torch.testing.assert_close(d_right, left.T @ d_weight)
    y = (x @ weight.T).detach().requires_grad_()
    (ds,) = torch.autograd.grad(y.tanh().square().sum(), y)
    parts = dict(LowRank(left.detach(), right.detach()).project(Outer(ds, x)))
    torch.testing.assert_close(parts["L"].dense().sum(0).T, d_left)
    torch.testing.assert_close(parts["R"].dense().sum(0), d_right)


def test_all_forms_of_a_gradient_give_the_same_parts():
    torch.manual_seed(0)
    left, right = torch.linalg.qr(torch.randn(9, 3)).Q, torch.linalg.qr(torch.randn(6, 3)).Q.T
    index, ds = torch.randint(9, (4, 5)), torch.randn(4, 5, 6)
    one_hot = nn.functional.one_hot(index, 9).float()
    rows = Rows(index, ds, torch.Size((9, 6)))
    for carriers in (LowRank(left, right), Submatrix(torch.tensor([1, 4]), torch.tensor([0, 5]), torch.Size((9, 6)))):
        forms = [dict(carriers.project(v)) for v in (rows, Outer(one_hot, ds), Dense(rows.dense()))]
        for side in forms[0]:
            for other in forms[1:]:
                torch.testing.assert_close(forms[0][side].dense(), other[side].dense())


def test_mixed_precision_projects_without_widening_the_book():
    left, right = torch.linalg.qr(torch.randn(9, 3)).Q, torch.linalg.qr(torch.randn(6, 3)).Q.T
    ds, a = torch.randn(4, 5, 9), torch.randn(4, 5, 6)
    exact = dict(LowRank(left, right).project(Outer(ds, a)))
    mixed = dict(LowRank(left, right).project(Outer(ds.bfloat16(), a)))
    for side in exact:
        assert mixed[side].dense().dtype == torch.float32
        assert (mixed[side].dense() - exact[side].dense()).norm() <= 0.02 * exact[side].dense().norm()


@pytest.mark.parametrize("iterations", [0, 1, 3])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e15])
def test_carriers_are_orthonormal_whatever_the_matrix(iterations, scale):
    torch.manual_seed(0)
    deficient = torch.outer(torch.randn(7), torch.randn(5)) * scale  # rank 1 or 0, carriers of rank 3
    matrices = [lambda: deficient, lambda: torch.randn(7, 5) * scale]
    starts = [(torch.randn(7, 3), torch.randn(3, 5)) for _ in matrices]
    for left, right in zip(*power_method(matrices, starts, iterations), strict=True):
        torch.testing.assert_close(left.T @ left, torch.eye(3))
        torch.testing.assert_close(right @ right.T, torch.eye(3))


def test_more_iterations_come_closer_to_the_svd():
    torch.manual_seed(0)
    u, v = torch.linalg.qr(torch.randn(30, 30)).Q, torch.linalg.qr(torch.randn(20, 20)).Q
    matrix = u[:, :20] @ torch.diag(0.8 ** torch.arange(20.0)) @ v.T
    starts = [(torch.randn(30, 3), torch.randn(3, 20))]
    found = [power_method([lambda: matrix], starts, k)[0][0] for k in (0, 1, 4, 16)]
    aligned = [(u[:, :3].T @ left).square().sum().item() for left in found]
    assert aligned[0] < aligned[1] < aligned[2] < aligned[3] and aligned[3] > 2.99
