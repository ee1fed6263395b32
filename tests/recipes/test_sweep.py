"""recipes/sweep.py: a table of runs by a recipe that says what it was asked, and can fail."""

import json
import math
import shutil
from pathlib import Path

import pytest
import sweep
import yaml

RECIPE = """
import json, sys
from pathlib import Path
asked = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder, rate = Path(asked["--output_dir"]), float(asked["--learning_rate"])
with open(folder.parent / "calls.txt", "a") as calls:
    calls.write(folder.name + (":resumed" if "--resume_from_checkpoint" in asked else "") + "\\n")
if (folder.parent / "broken").exists():
    sys.exit(1)
score = 1 - abs(rate - 0.2) + float(asked.get("--seed", 0)) / 100
metrics = {"eval_accuracy": score}
took = {"train_seconds": 60, "steps": 10, "resumed_at": 5 if "--resume_from_checkpoint" in asked else 0}
(folder / "results.json").write_text(json.dumps({"learning_rate": rate, "metrics": metrics, **took}))
"""
SAID = {"mr": "name[The Fox]", "reference": "It is a fox.", "generated": "The Fox is a pub."}
GENERATES = f"(folder / 'generated.jsonl').write_text({json.dumps(SAID)!r})"


@pytest.fixture
def table(tmp_path) -> Path:
    (tmp_path / "recipe.py").write_text(RECIPE)
    plan = {
        "title": "A table", "recipe": str(tmp_path / "recipe.py"), "config": str(tmp_path / "some.yaml"),
        "metrics": ["eval_accuracy"], "runs": str(tmp_path / "runs"), "results": str(tmp_path / "out"),
        "tune": {"learning_rates": [0.1, 0.2, 0.3], "by_method": {"np": [0.4, 0.5]}, "settings": {"max_steps": 5}},
        "table": [
            {"methods": ["np"], "epsilons": [None], "seeds": [1]},
            {"methods": ["bk", "rgp"], "epsilons": [8, 3], "seeds": [1, 2]},
        ],
    }  # fmt: skip
    (tmp_path / "some.yaml").write_text("rank: 8\nby_method: {np: {rank: 4}}\n")
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(plan))
    return tmp_path


def calls(folder: Path) -> list[str]:
    return (folder / "runs/calls.txt").read_text().split()


def test_a_sweep_tunes_runs_and_writes_its_table(table, capsys):
    assert sweep.main(["--config", str(table / "sweep.yaml")]) == 0
    results = json.loads((table / "out.json").read_text())
    assert results["learning_rates"] == {"np": 0.4, "bk": 0.2, "rgp": 0.2}
    rows = {(row["method"], row["epsilon"]): row for row in results["rows"]}
    assert rows["bk", 3]["eval_accuracy"] == pytest.approx((1.015, math.sqrt(0.00005)))
    assert rows["np", None]["seeds"] == 1 and len(rows) == 5
    assert "| bk | 8 | 1.0150 ± 0.0071 | 2 | 0.2 | 1.0 |" in (table / "out.md").read_text()
    assert (table / "out.png").stat().st_size > 1000
    assert len(calls(table)) == 8 + 9 and "bk_eps8_seed2" in capsys.readouterr().out


def test_a_sweep_goes_on_where_it_stopped(table):
    (table / "runs").mkdir()
    assert sweep.main(["--config", str(table / "sweep.yaml"), "--dry_run"]) == 0
    assert not (table / "runs/calls.txt").exists()
    sweep.main(["--config", str(table / "sweep.yaml")])
    before = calls(table)
    (table / "runs/rgp_eps3_seed1/results.json").unlink()  # as if it had been interrupted
    (table / "runs/bk_eps8_seed1/cell.json").write_text('{"learning_rate": 9}')  # as if its settings had changed
    (table / "out.json").unlink()
    (table / "runs/np_seed1/results.json").unlink()
    (table / "runs/np_seed1/checkpoint-5").mkdir()  # interrupted, but after a checkpoint
    sweep.main(["--config", str(table / "sweep.yaml")])
    assert sorted(calls(table)[len(before) :]) == ["bk_eps8_seed1", "np_seed1:resumed", "rgp_eps3_seed1"]
    rows = {row["method"]: row for row in json.loads((table / "out.json").read_text())["rows"]}
    assert rows["np"]["minutes"] == 2.0  # half of the steps took a minute
    assert not (table / "runs/np_seed1/checkpoint-5").exists()


def test_a_sweep_goes_on_on_another_machine(table):
    """Its results are enough: the folders of the runs need not be there. Only what was asked otherwise runs again."""
    (table / "recipe.py").write_text(RECIPE + GENERATES)
    config = ["--config", str(table / "sweep.yaml")]
    sweep.main(config)
    before = {ending: (table / f"out.{ending}").read_text() for ending in ("json", "md")}
    shutil.rmtree(table / "runs")
    sweep.main(config)
    assert not (table / "runs").exists()
    assert before == {ending: (table / f"out.{ending}").read_text() for ending in ("json", "md")}
    plan = yaml.safe_load((table / "sweep.yaml").read_text())
    plan["tune"]["by_method"]["np"] = [0.4, 0.6]
    (table / "sweep.yaml").write_text(yaml.safe_dump(plan))
    sweep.main(config)
    assert calls(table) == ["tune_np_0.6"]
    (table / "some.yaml").write_text("# Words do not count.\nrank: 8\nby_method: {np: {rank: 5}}\n")
    sweep.main(config)
    assert calls(table) == ["tune_np_0.6", "tune_np_0.4", "tune_np_0.6", "np_seed1"]


def test_a_sweep_shows_what_models_wrote_and_what_belongs_beside_it(table):
    (table / "recipe.py").write_text(RECIPE + GENERATES)
    (table / "times.md").write_text("# Wall time\n\nan hour\n")  # what another script found out
    with open(table / "sweep.yaml", "a") as plan:
        plan.write(f"\nbeside: {table / 'times.md'}\n")
    sweep.main(["--config", str(table / "sweep.yaml")])
    _, _, shown = (table / "out.md").read_text().partition("## Samples")
    assert shown.endswith("\n\n## Wall time\n\nan hour\n")
    assert shown.count("The Fox is a pub.") == 5
    assert "`name[The Fox]`\n\n- a reference: It is a fox.\n- np_seed1:" in shown


def test_two_sweeps_can_share_a_table(table, capsys):
    """Each runs its own methods, none twice; what either has done is in the results."""
    config = ["--config", str(table / "sweep.yaml")]
    for methods in (["np", "rgp"], ["bk"]):
        assert sweep.main([*config, "--methods", *methods]) == 0
    results = json.loads((table / "out.json").read_text())
    assert [len(results[part]) for part in ("rows", "tuning", "cells")] == [5, 8, 9]
    assert len(calls(table)) == 8 + 9
    with pytest.raises(SystemExit):
        sweep.main([*config, "--methods", "rgb"])
    err = capsys.readouterr().err
    assert "--methods" in err and "rgb" in err


def test_a_recipes_config_is_no_table(tmp_path):
    (tmp_path / "sst2.yaml").write_text("task: sst2\n")
    with pytest.raises(SystemExit, match="sst2.yaml.*`config`"):
        sweep.main(["--config", str(tmp_path / "sst2.yaml")])


def test_a_sweep_survives_failures_and_leaves_strange_folders_alone(table, capsys):
    (table / "runs").mkdir()
    (table / "runs/broken").touch()
    assert sweep.main(["--config", str(table / "sweep.yaml")]) == 1
    assert "FAILED" in capsys.readouterr().out
    (table / "runs/broken").unlink()
    assert sweep.main(["--config", str(table / "sweep.yaml")]) == 0
    (table / "runs/np_seed1/cell.json").unlink()
    (table / "out.json").unlink()
    with pytest.raises(FileExistsError, match="np_seed1"):
        sweep.main(["--config", str(table / "sweep.yaml")])
