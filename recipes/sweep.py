"""Run a table, methods x epsilon x seeds, one recipe at a time; stop it whenever you like, the next start goes on.

    python recipes/sweep.py --config recipes/configs/sweep_sst2.yaml              # runs what is missing
    python recipes/sweep.py --config recipes/configs/sweep_sst2.yaml --dry_run    # shows the cells and which are done
    python recipes/sweep.py --config recipes/configs/sweep_sst2.yaml --methods rgp lsg &  # a part for each core

First the learning rate: every method gets the same number of short runs on records held out of the training data, with
the noise of the full run. Then the table, with each method's best. After every cell, <results>.json and <results>.md
(mean and standard deviation over seeds) and <results>.png (score over epsilon) are written anew. What <results>.json
holds is done, on whatever machine it was run; empty the file to run it again.

A cell that was interrupted goes on from its last checkpoint, if the file's `settings` have it save any; the steps that
were lost are charged, so it ends with a little more noise. Without a checkpoint it begins anew, and its folder is
emptied, ledger included. That is right for research on public data. On private data every run counts, those of the
search too: add them up with `hf-private compose`.
"""

import argparse
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from table import markdown, plot, samples, shown_samples, summary

HERE = Path(__file__).parent


@dataclass
class Cell:
    """One run of the recipe: its name is its folder."""

    name: str
    method: str
    settings: dict[str, Any]
    epsilon: float | None = None
    seed: int = 0
    result: dict[str, Any] | None = field(default=None, repr=False)


class Sweep:
    """What a file asks for, and where its cells lie."""

    def __init__(self, path: str) -> None:
        self.plan = yaml.safe_load(Path(path).read_text())
        if missing := {"title", "recipe", "config", "metrics", "runs", "results", "table"} - self.plan.keys():
            raise SystemExit(f"{path} is no table: it has no `{min(missing)}`. See recipes/configs/sweep_digits.yaml.")
        self.plan["command"] = f"python recipes/sweep.py --config {path}"
        self.base = yaml.safe_load(Path(self.plan["config"]).read_text())
        self.runs, self.results = Path(self.plan["runs"]), Path(self.plan["results"])
        self.metrics: list[str] = self.plan["metrics"]  # the first one decides
        self.methods = list(dict.fromkeys(method for row in self.plan["table"] for method in row["methods"]))
        self.best = {"max": max, "min": min}[self.plan.get("choose", "max")]

    def known(self) -> dict[str, dict[str, Any]]:
        """Cells by name, as <results>.json has them: run here or on another machine."""
        file = self.results.with_suffix(".json")
        content = json.loads(file.read_text() or "{}") if file.is_file() else {}
        return {cell["name"]: cell for part in ("tuning", "cells") for cell in content.get(part, [])}

    def tuning(self) -> list[Cell]:
        """Short runs, one for each method and learning rate."""
        tune = self.plan.get("tune")
        if not tune:
            return []
        rates = {method: tune["by_method"].get(method, tune["learning_rates"]) for method in self.methods}
        return [
            Cell(f"tune_{method}_{rate:g}", method, tune["settings"] | {"learning_rate": rate})
            for method in self.methods
            for rate in map(float, rates[method])
        ]

    def table(self, tuned: list[Cell]) -> list[Cell]:
        """The cells of the table, each with its method's best learning rate."""
        rates = {method: cell.settings["learning_rate"] for method, cell in self.chosen(tuned).items()}
        cells = []
        for row in self.plan["table"]:
            for method, epsilon, seed in itertools.product(row["methods"], row["epsilons"], row["seeds"]):
                budget = {} if epsilon is None else {"target_epsilon": float(epsilon)}
                rate = {"learning_rate": rates[method]} if method in rates else {}
                name = f"{method}_eps{epsilon:g}_seed{seed}" if epsilon else f"{method}_seed{seed}"
                cells.append(Cell(name, method, budget | rate | {"seed": seed}, epsilon, seed))
        return cells

    def chosen(self, tuned: list[Cell]) -> dict[str, Cell]:
        """Each method's best short run, of those that are done."""
        by_method: dict[str, list[Cell]] = {}
        for cell in tuned:
            if cell.result:
                by_method.setdefault(cell.method, []).append(cell)
        return {method: self.best(cells, key=self.score) for method, cells in by_method.items()}

    def score(self, cell: Cell) -> float:
        return cell.result["metrics"][self.metrics[0]]

    def load(self, cells: list[Cell]) -> list[Cell]:
        """Look up which cells are done; returns the others."""
        known = self.known()
        for cell in cells:
            folder, asked = self.runs / cell.name, self.asked(cell)
            if (folder / "results.json").is_file() and _read(folder / "cell.json") == asked:
                cell.result = _read(folder / "results.json") | {"samples": samples(folder)}
            elif known.get(cell.name, {}).get("asked") == asked:
                cell.result = {key: value for key, value in known[cell.name].items() if key not in ("name", "asked")}
        return [cell for cell in cells if cell.result is None]

    def settings(self, cell: Cell) -> dict[str, Any]:
        """What the recipe is told, beside where to write."""
        return {"config": self.plan["config"], **self.plan.get("settings", {}), **cell.settings, "method": cell.method}

    def asked(self, cell: Cell) -> dict[str, Any]:
        """All of a cell's settings, what its config file says besides in a hash; done with others, it is not done."""
        settings, own = self.settings(cell), self.base.get("by_method", {}).get(cell.method) or {}
        files = [
            {k: v for k, v in part.items() if k not in settings} for part in (self.base | {"by_method": None}, own)
        ]
        content = json.dumps(files, sort_keys=True)
        return {"config_sha256": hashlib.sha256(content.encode()).hexdigest()[:16], **settings}

    def command(self, cell: Cell) -> list[str]:
        settings = self.settings(cell) | {"output_dir": str(self.runs / cell.name)}
        flags = [
            (f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value))
            for name, value in settings.items()
        ]
        return [sys.executable, str(HERE / self.plan["recipe"]), *itertools.chain(*flags)]

    def prepared(self, cell: Cell) -> list[str]:
        """Make the cell's folder, or find a checkpoint of the same cell in it; returns what resumes there."""
        folder, asked = self.runs / cell.name, self.asked(cell)
        if folder.exists():
            if not (folder / "cell.json").is_file():
                raise FileExistsError(f"{folder} is not of this sweep. Choose another `runs` folder.")
            if _read(folder / "cell.json") == asked and any(folder.glob("checkpoint-*")):
                return ["--resume_from_checkpoint", "True"]
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        (folder / "cell.json").write_text(json.dumps(asked, indent=2) + "\n")
        return []

    def run(self, cell: Cell, progress: str) -> bool:
        """Run one cell in a process of its own; its output goes to log.txt in its folder."""
        folder, resume = self.runs / cell.name, self.prepared(cell)
        print(f"[{progress}] {cell.name} {'goes on ' if resume else ''}...", end=" ", flush=True)
        start = time.perf_counter()
        with open(folder / "log.txt", "a") as log:
            command = self.command(cell) + resume
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        took = (time.perf_counter() - start) / 60
        self.load([cell])
        if cell.result and not self.plan.get("keep_models", False):  # the scores and the privacy record stay
            for weights in folder.glob("*.safetensors"):
                weights.unlink()
            for checkpoint in folder.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)
        if code or cell.result is None:
            print(f"FAILED, see {folder / 'log.txt'}")
            return False
        print(f"{self.metrics[0]} {self.score(cell):.4f} in {took:.1f} min")
        return True

    def write(self) -> None:
        """Results so far as JSON, Markdown and a plot; those of sweeps beside this one too."""
        tuned = self.tuning()
        self.load(tuned)
        table = self.table(tuned)
        self.load(table)
        rows = summary([cell for cell in table if cell.result], self.metrics)
        chosen = {method: cell.settings["learning_rate"] for method, cell in self.chosen(tuned).items()}
        trials = [(c.method, c.settings["learning_rate"], self.score(c)) for c in tuned if c.result]
        self.results.parent.mkdir(parents=True, exist_ok=True)
        done = [
            [{"name": c.name, "asked": self.asked(c), **c.result} for c in part if c.result] for part in (tuned, table)
        ]
        content = {"rows": rows, "learning_rates": chosen, "tuning": done[0], "cells": done[1]}
        part = self.results.with_name(f".{self.results.name}.{os.getpid()}")  # a sweep beside this one may be reading
        part.write_text(json.dumps(content, indent=2) + "\n")
        part.replace(self.results.with_suffix(".json"))
        texts = shown_samples([c for c in table if c.result and c.seed == table[0].seed])
        beside = Path(self.plan.get("beside", ""))  # results of another script that belong to this table
        texts += f"\n{beside.read_text().replace('# ', '## ', 1)}" if beside.is_file() else ""
        self.results.with_suffix(".md").write_text(markdown(self.plan, rows, trials, len(table)) + texts)
        if rows:
            plot(self.plan, rows, self.results.with_suffix(".png"))


def _read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.is_file() else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file of the sweep")
    parser.add_argument("--dry_run", action="store_true", help="only show the cells and their commands")
    parser.add_argument("--methods", nargs="+", help="run these only; another sweep may run others at the same time")
    options = parser.parse_args(argv)
    sweep, failed = Sweep(options.config), []
    tuned = sweep.tuning()
    methods = options.methods or sweep.methods
    if unknown := sorted(set(methods) - set(sweep.methods)):
        parser.error(f"--methods must be of this table's ({', '.join(sweep.methods)}), got {', '.join(unknown)}")
    for stage in ("tuning", "table"):
        cells = [cell for cell in (tuned if stage == "tuning" else sweep.table(tuned)) if cell.method in methods]
        missing = sweep.load(cells)
        print(f"{stage}: {len(cells) - len(missing)} of {len(cells)} runs are done.")
        for number, cell in enumerate(missing, len(cells) - len(missing) + 1):
            if options.dry_run:
                print(" ", " ".join(sweep.command(cell)))
                continue
            if not sweep.run(cell, f"{stage} {number}/{len(cells)}"):
                failed.append(cell.name)
            sweep.write()
    if not options.dry_run:
        sweep.write()
        print(f"{sweep.results.with_suffix('.md')}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
