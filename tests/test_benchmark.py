"""recipes/benchmark.py: what it counts, on calls whose times are known."""

import benchmark
import pytest
import torch


def test_a_benchmark_counts_like_calls_with_their_fastest_tenth():
    """Ten calls of a round and one of another kind; the second round was disturbed."""
    quiet = {("mm", "[8, 8]"): [2e6] * 10, ("step", "[]"): [1e6]}
    disturbed = {kind: [5 * took for took in times] for kind, times in quiet.items()}
    assert benchmark.step_time([quiet]) == benchmark.step_time([quiet, disturbed]) == 21
    assert benchmark.step_time([disturbed]) == 105


def test_a_benchmark_sees_every_call_and_what_lies_between():
    weight = torch.randn(30, 30)
    _, calls = benchmark.timed(lambda: weight @ weight @ weight[:, :5])
    products = {shapes: len(times) for (name, shapes), times in calls.items() if name == "aten::mm"}
    assert products == {"[[30, 30], [30, 30]]": 1, "[[30, 30], [30, 5]]": 1}
    assert len(calls["step", "[]"]) == 1
    seconds, calls = benchmark.timed(lambda: weight @ weight, apart=False)
    assert benchmark.step_time([calls]) == pytest.approx(seconds)


def test_a_benchmark_shows_what_could_not_be_counted():
    ratios = {"speed": 0.5, "whole_steps": 0.5, "memory": None, "operations": None}
    assert "| bert-8x128 | opake | 0.50 | 0.50 | not counted | not counted |" in benchmark.table(
        [{"setting": "bert-8x128", "engine": "opake", **ratios}]
    )
