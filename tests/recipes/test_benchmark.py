"""recipes/benchmark.py and overheads.py: what they count, and what is said of aims."""

import cProfile
import pstats

import benchmark
import overheads
import pytest
import torch


def row(setting, engine, *speeds, memory=1.0, operations=1.0):
    ratios = {"speed": min(speeds), "speeds": speeds, "memory": memory, "operations": operations}
    return {"setting": setting, "engine": engine, **ratios}


def test_a_benchmark_counts_with_the_fastest_step_of_a_run_and_the_worst_of_the_runs(monkeypatch):
    """Plain steps take 4, then 2 seconds in every run; private ones 4 in the first run, then 5."""
    clock, took = 0.0, {"plain": iter([4, 2, 4, 2]), "bk": iter([4, 9, 5, 9])}

    def step(engine):
        nonlocal clock
        clock += next(took[engine])

    steps = {engine: lambda engine=engine: step(engine) for engine in took}
    rows = {engine: {"bytes": size, "flops": 1} for engine, size in (("plain", 10), ("bk", 11))}
    monkeypatch.setattr(benchmark, "prepare", lambda setting, engines: (rows, steps))
    monkeypatch.setattr(benchmark.time, "process_time", lambda: clock)
    plain, private = benchmark.measure("bert-8x128", ["plain", "bk"], seconds=0, runs=2)
    assert (plain["speeds"], private["speeds"], private["speed"]) == ([1, 1], [0.5, 0.4], 0.4)
    assert (private["memory"], private["operations"], private["seconds"]) == (1.1, 1, 4)


def test_an_aim_is_met_by_the_worst_run_or_not():
    rows = [row("bert-8x128", "frozen", 1.5, 1.4), row("bert-8x128", "rgp", 1.4, 1.34, memory=0.9)]
    text = benchmark.aims_table([row("bert-8x128", "plain", 1.0, 1.0), *rows])
    assert "| rgp, speed of plain | >= 1.35 | bert-8x128 | 1.340 | no |" in text
    assert "| rgp, speed of frozen | >= 0.95 | bert-8x128 | 0.933 | no |" in text
    assert "| rgp, memory of plain | <= 0.90 | bert-8x128 | 0.900 | yes |" in text
    assert "lsg" not in text and benchmark.aims_table([]) == ""


@pytest.mark.parametrize("aim", benchmark.AIMS)
def test_what_is_asked_is_measured_by_make_bench_or_bench_all(aim):
    for setting in aim.settings:
        assert {aim.engine, aim.against} <= set(benchmark.ENGINES_OF[setting])


def test_aims_of_bench_all_are_judged_where_its_settings_were_run():
    rows = [row("moe-4x64", "plain", 1.0), row("moe-4x64", "bk", 0.8)]
    rows += [row("funnel-16x8", "bk", 0.9), row("funnel-16x8", "loop", 0.3)]
    text = benchmark.aims_table(rows)
    assert "| bk, speed of plain | >= 0.85 | moe-4x64 | 0.800 | no |" in text
    assert "| bk, speed of loop | >= 2.00 | funnel-16x8 | 3.000 | yes |" in text
    assert "deberta" not in text


def test_a_benchmark_shows_what_could_not_be_counted():
    shown = benchmark.table([row("bert-8x128", "opake", 0.5, memory=None, operations=None)])
    assert "| bert-8x128 | opake | 0.50 | 0.500 | not counted | not counted |" in shown


def test_overheads_are_the_seconds_in_a_function_wrapped_or_not():
    """Each spends what it calls, too; what was not called takes no time."""

    @torch.no_grad()
    def wrapped():
        return inner()

    def inner():
        return sum(range(100_000))

    with cProfile.Profile() as profile:
        wrapped()
    stats = pstats.Stats(profile).stats
    assert overheads.seconds(stats, [wrapped]) >= overheads.seconds(stats, [inner]) > 0
    assert overheads.seconds(stats, [overheads.check_parameters]) == 0
