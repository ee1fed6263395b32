"""The oracle: per-sample gradients by a for-loop of plain autograd, one record at a time."""

import torch

from hf_private.gradients.bookkeeper import BookKeeper, trainable

EXACT = 1e-8


def record(batch: dict, n: int) -> dict:
    """Batch of the n-th record alone."""
    return {key: value[n : n + 1] for key, value in batch.items()}


def gradient(model, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of a scalar by parameter name, zeros where it does not depend on a parameter; the graph is kept."""
    parameters = trainable(model)
    before = {name: p.grad for name, p in parameters.items()}
    try:
        for p in parameters.values():
            p.grad = None
        value.backward(retain_graph=True)  # not autograd.grad, which misses reversible layers
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
    finally:
        for name, p in parameters.items():
            p.grad = before[name]


def flat(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    """A gradient as one vector."""
    return torch.cat([g.flatten() for g in gradient.values()])


def per_sample_gradients(model, loss, batch: dict) -> list[dict[str, torch.Tensor]]:
    """For each record, its gradient by parameter name, from a batch of that record alone."""
    records = range(len(next(iter(batch.values()))))
    return [gradient(model, loss(model, record(batch, n)).sum()) for n in records]


def norms(gradients: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([flat(one).norm() for one in gradients])


def weighted_sum(gradients: list[dict[str, torch.Tensor]], factors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: sum(c * one[name] for c, one in zip(factors, gradients, strict=True)) for name in gradients[0]}


def assert_exact(model, loss, batch, tolerance=EXACT, method=None):
    """The engine against the oracle: norms, and sums weighted by random factors."""
    wanted = per_sample_gradients(model, loss, batch)
    factors = torch.rand(len(wanted), dtype=torch.float64) + 0.5
    with BookKeeper(model, method) as book:
        book.backward(loss(model, batch))
        got_norms, sums = book.norms(), book.weighted_sum(factors)
    torch.testing.assert_close(got_norms.double(), norms(wanted).double(), rtol=tolerance, atol=0)
    expected = weighted_sum(wanted, factors)
    scale = flat(expected).double().norm()
    for name, g in expected.items():
        got = sums[name] if name in sums else torch.zeros_like(g)
        assert got.dtype in (torch.float32, torch.float64)
        assert (got.double() - g.double()).norm() <= tolerance * (g.double().norm() + 1e-3 * scale), name
