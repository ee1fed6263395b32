"""The oracle: per-sample gradients by a for-loop of plain autograd, one record at a time."""

import torch

from hf_private.gradients.bookkeeper import BookKeeper, trainable

EXACT = 1e-8


def record(batch: dict, n: int) -> dict:
    """Batch of the n-th record alone."""
    return {key: value[n : n + 1] for key, value in batch.items()}


def per_sample_gradients(model, loss, batch: dict) -> list[dict[str, torch.Tensor]]:
    """For each record, its gradient by parameter name (zeros where the record does not reach a parameter)."""
    parameters = trainable(model)
    before = {name: p.grad for name, p in parameters.items()}
    result = []
    for n in range(len(next(iter(batch.values())))):
        for p in parameters.values():
            p.grad = None
        loss(model, record(batch, n)).sum().backward()  # not autograd.grad, which reversible layers escape
        result.append({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()})
    for name, p in parameters.items():
        p.grad = before[name]
    return result


def norms(gradients: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.cat([g.flatten() for g in one.values()]).norm() for one in gradients])


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
    scale = torch.cat([g.flatten() for g in expected.values()]).double().norm()
    for name, g in expected.items():
        got = sums[name] if name in sums else torch.zeros_like(g)
        assert got.dtype in (torch.float32, torch.float64)
        assert (got.double() - g.double()).norm() <= tolerance * (g.double().norm() + 1e-3 * scale), name
