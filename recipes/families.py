"""Compare every architecture of the installed transformers, in a tiny size, with a loop of plain autograd.

    python recipes/families.py                    # all; goes on where it was stopped
    python recipes/families.py --only mixtral t5  # some, measured again
    python recipes/families.py --report           # the tables alone, from what was measured

Each model type is built with each of its heads (`architectures.py`) in float64, trained in full and with LoRA. At
several numbers of records B and lengths T (in most of them B divides T), norms and weighted sums of the engine are
compared with those of one record at a time. What is exact is then put through the self-check, once per type. Results:
`results/families.json`, `results/families.md`, and the table in the guide to gradients.
"""

import argparse
import gc
import json
import resource
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from architectures import HEADS, tiny_model
from family_inputs import inputs_of, own
from family_report import GUIDE, STATUSES, guide_table, report, rows_of, with_guide_table
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

import hf_private
from hf_private.gradients.bookkeeper import BookKeeper, trainable
from hf_private.gradients.layers import PART, UncoveredError
from hf_private.gradients.selfcheck import SelfCheckError, self_check
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch

RESULTS = Path(__file__).parent / "results"
SIZES = ((5, 7), (4, 8))  # records, length
EXACT = 1e-5  # some models compute a part of themselves in float32
EXACT_SINGLE = 1e-3  # for models that float64 is too wide for: masks of its least number, parts of a fixed type
SECONDS = 60  # of CPU time, for one row
GIGABYTES = 8  # of memory
LORA_LAYERS = "all-linear"


class TooSlowError(RuntimeError):
    """A row needs more CPU time than `SECONDS`."""


class CoupledError(RuntimeError):
    """A record's loss depends on the other records of its batch, so no engine can be compared with a loop."""


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss per record (N,) from whatever the model predicts: the mean of log-probabilities of fixed classes."""
    out = model(**batch)
    logits = out.logits if isinstance(getattr(out, "logits", None), Tensor) else _first_float(out)
    logp = logits.log_softmax(-1)
    classes = torch.arange(logp[0, ..., 0].numel()).view(logp[0, ..., 0].shape) % logp.shape[-1]
    losses = -logp.gather(-1, classes.expand(logp.shape[:-1]).unsqueeze(-1)).flatten(1).mean(1)
    records = len(batch.get("input_ids", losses))
    return losses.unflatten(0, (records, -1)).mean(1)  # a codec has several rows for each record


def _first_float(out: Any) -> Tensor:
    return next(x for x in out.values() if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1)


def with_lora(model: nn.Module, every: bool = True) -> nn.Module:
    """LoRA on all linear layers, with B away from 0, but those that PEFT leaves out (the projection behind Mamba's
    kernel) and, without `every`, those with a forward pass of their own, which PEFT's would replace."""
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    own = [name for name, m in linear.items() if type(m).forward is not nn.Linear.forward and not every]
    try:
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=LORA_LAYERS, exclude_modules=own or None))
    except ValueError:
        left_out = {n for n in linear if n.endswith(("out_proj", "lm_head"))}
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=sorted(linear.keys() - left_out - set(own))))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.2)
    return adapted


def loop(model: nn.Module, batch: dict[str, Tensor], records: int) -> list[dict[str, Tensor]]:
    """The gradient of each record by itself, by parameter."""
    found, losses = [], []
    for n in range(records):
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, {key: own(x, records, n) for key, x in batch.items()}).sum()
        loss.backward()
        losses.append(loss.detach())
        found.append({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trainable(model).items()})
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        together = loss_of(model, batch)
    change = float(((together - torch.stack(losses)).abs() / together.abs()).max())
    if change > (EXACT if together.dtype == torch.float64 else EXACT_SINGLE):
        raise CoupledError(f"a record's loss changes by {change:.1g} of itself in a batch with others")
    return found


def compare(model: nn.Module, batch: dict[str, Tensor], records: int) -> tuple[float, set[str], set[str], set[str]]:
    """The largest relative difference of norms and weighted sums, and which weights were copied per record: small
    ones, and those that are multiplied with activations; then those that the loss of a record reaches."""
    wanted = loop(model, batch, records)
    weights = torch.rand(len(wanted), dtype=next(model.parameters()).dtype) + 0.5
    with BookKeeper(model) as book:
        book.backward(loss_of(model, batch))
        norms, sums = book.norms(), book.weighted_sum(weights)
        copied, formed = ({name.partition(PART)[0] for name in names} for names in (book.copied, book.formed))
    expected = torch.stack([torch.cat([g.flatten() for g in one.values()]).norm() for one in wanted])
    if not bool(torch.isfinite(expected).all()):
        raise FloatingPointError("the gradients are not finite")
    differences = [((norms - expected).abs() / expected.clamp_min(1e-12)).max()]
    total = {name: sum(c * one[name] for c, one in zip(weights, wanted, strict=True)) for name in wanted[0]}
    scale = torch.cat([g.flatten() for g in total.values()]).norm()
    _check_loop(model, batch, weights, total, scale)
    for name, g in total.items():
        differences.append((sums.get(name, torch.zeros_like(g)) - g).norm() / (g.norm() + 1e-3 * scale + 1e-12))
    worst = float(torch.stack(differences).max())  # NaN, if there is one
    return worst if worst == worst else float("inf"), copied, formed, {n for n, g in total.items() if bool(g.any())}


def _check_loop(
    model: nn.Module, batch: dict[str, Tensor], weights: Tensor, total: dict[str, Tensor], scale: Tensor
) -> None:
    """Raise if autograd finds another gradient for the whole batch, though the losses are the same: the loop cannot
    judge then. torch's own gradient of CvT's convolutions is wrong for one record in float64."""
    losses = loss_of(model, batch)
    alone = {key: own(x, len(losses), 0) for key, x in batch.items()}
    (weights * losses).sum().backward()  # not autograd.grad, which misses reversible layers
    distance = torch.stack(
        [(torch.zeros_like(p) if p.grad is None else p.grad).sub(total[n]).norm() for n, p in trainable(model).items()]
    )
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        same = torch.allclose(loss_of(model, alone)[0], losses[0], rtol=1e-9)
    if same and bool((distance > (EXACT if scale.dtype == torch.float64 else EXACT_SINGLE) * scale).any()):
        raise FloatingPointError("autograd of the batch is not the sum of autograd of its records")


def checked(model: nn.Module, head: str) -> str:
    """What the self-check says of a model: passed, or its message. What no loss reaches is frozen before it."""
    if any(len(x) != 2 for x in inputs_of(model, head, 2, 8).values()):
        return (
            "not run: the images of all records lie in one row, which DPTrainer refuses in batches of several records"
        )
    try:
        loss, make = PerSampleLoss(model), lambda *args: synthetic_batch(model, *args)
        losses = loss(model, make(2, 11))
    except Exception:  # no loss or no records of this head in hf_private.tasks
        loss, make = loss_of, lambda *args: inputs_of(model, head, *args[:2], generator=args[2] if args[2:] else None)
        losses = loss(model, make(2, 11))
    parameters = trainable(model)
    found = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
    for p, g in zip(parameters.values(), found, strict=True):
        p.requires_grad_(g is not None)
    try:
        self_check(model, loss, make)
        return "passed"
    except (SelfCheckError, UncoveredError) as error:
        return short(error)
    except TooSlowError:
        raise
    except Exception as error:  # in training mode a model may want longer records
        return f"{type(error).__name__}: {short(error)}"


def short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def built(model_type: str, head: str, method: str) -> nn.Module:
    """A tiny model that computes finite losses: in float64, or, if it cannot, in float32."""
    try:
        return built_with(model_type, head, method, True)
    except (AttributeError, RuntimeError, TypeError):  # of a router that returns more than a product
        if method == "full":
            raise
        return built_with(model_type, head, method, False)


def built_with(model_type: str, head: str, method: str, every: bool) -> nn.Module:
    for dtype in (torch.float64, torch.float32):
        model = tiny_model(model_type, head).to(dtype)
        if method == "lora":
            model = with_lora(model, every)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.02 * torch.randn_like(p))
            try:
                if torch.isfinite(loss_of(model, inputs_of(model, head, 1, 8))).all():
                    break
            except RuntimeError:
                if dtype == torch.float32:
                    raise
    return model


def measure(model_type: str, head: str, method: str, check: bool) -> dict[str, Any]:
    """One row: a type with a head, trained in one way."""
    row: dict[str, Any] = {"type": model_type, "head": head, "method": method}
    try:
        model = built(model_type, head, method)
    except (TooSlowError, KeyboardInterrupt):
        raise
    except Exception as error:  # whatever a model class raises for a config or inputs that it cannot take
        return row | {"status": "not built", "reason": f"{type(error).__name__}: {short(error)}"}
    single = next(model.parameters()).dtype == torch.float32
    worst, copied, formed, reached = 0.0, set(), set(), set()
    try:
        for batch_size, length in SIZES:
            difference, small, large, met = compare(model, inputs_of(model, head, batch_size, length), batch_size)
            worst, copied, formed, reached = max(worst, difference), copied | small, formed | large, reached | met
    except UncoveredError as error:
        return row | {"status": "refused", "reason": short(error)}
    except CoupledError as error:
        found = checked(model.float(), head)
        status = "wrong" if found == "passed" else "refused"
        return row | {"status": status, "reason": f"{short(error)}; the self-check: {found}"}
    except FloatingPointError as error:  # the loop is no judge
        return row | {"status": "not built", "reason": short(error)}
    except (TooSlowError, KeyboardInterrupt):
        raise
    except Exception as error:
        try:  # is it the engine that fails, or the model, which cannot take this batch?
            loss_of(model, inputs_of(model, head, *SIZES[0])).sum().backward()
        except Exception:
            return row | {"status": "not built", "reason": f"{type(error).__name__}: {short(error)}"}
        if "allocate memory" in str(error):
            return row | {"status": "not built", "reason": f"it needs more than {GIGABYTES} GB"}
        return row | {"status": "refused", "reason": f"{type(error).__name__}: {short(error)}", "crash": True}
    limit = EXACT_SINGLE if single else EXACT
    status = "wrong" if worst > limit else "exact by fallback" if formed else "exact"
    row |= {"status": status, "difference": worst, "formed": sorted(formed)[:5], "copied": len(copied - formed)}
    row |= {"parameters": len(trainable(model)), "reached": len(reached)} | ({"single": True} if single else {})
    if check and status != "wrong":
        row["self_check"] = checked(model.float(), head)
    return row


def _alarm(*args: Any) -> None:
    raise TooSlowError(f"it takes more than {SECONDS} s")


def versions() -> dict[str, str]:
    """What a table was made with."""
    return {m.__name__: m.__version__ for m in (transformers, torch, peft, hf_private)}


def read(path: Path) -> dict[str, dict[str, Any]]:
    """What was measured with the versions that are installed: with others a run starts anew."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return found["rows"] if found.get("versions") == versions() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="model types, measured again")
    parser.add_argument("--again", nargs="+", choices=STATUSES, default=[], help="statuses to measure again")
    parser.add_argument("--first-head", action="store_true", help="one head for each type")
    parser.add_argument("--methods", nargs="+", choices=("full", "lora"), default=["full", "lora"])
    parser.add_argument("--no-check", action="store_true", help="without the self-check")
    parser.add_argument("--minutes", type=float, help="CPU minutes after which to stop")
    parser.add_argument("--report", action="store_true", help="write the tables from what was measured")
    parser.add_argument("--output", type=Path, default=RESULTS / "families.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGPROF, _alarm)
    resource.setrlimit(resource.RLIMIT_DATA, (GIGABYTES << 30, GIGABYTES << 30))
    done = read(args.output)
    types = args.only or sorted({t for listed in HEADS.values() for t in listed if t in CONFIG_MAPPING})
    for model_type, head, method, check in [] if args.report else rows_of(types):
        key = f"{model_type}/{head}/{method}"
        if args.minutes and time.process_time() > 60 * args.minutes or method not in args.methods:
            continue
        if key in done and not args.only and done[key]["status"] not in args.again or args.first_head and not check:
            continue
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            row = measure(model_type, head, method, check and not args.no_check)
        except TooSlowError as error:
            row = {"type": model_type, "head": head, "method": method, "status": "not built", "reason": str(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        done[key] = row | {"seconds": round(time.process_time() - start, 1)}
        args.output.parent.mkdir(exist_ok=True)
        args.output.write_text(json.dumps({"versions": versions(), "rows": done}, indent=1) + "\n")
        print(key, row["status"], row.get("reason", row.get("self_check", ""))[:200], flush=True)
        if len(done) % 20 == 0:
            gc.collect()  # takes as long as a small row
    found = json.loads(args.output.read_text())
    rows = list(found["rows"].values())
    args.output.with_suffix(".md").write_text(report(rows, found["versions"]))
    if args.output.parent == RESULTS:
        GUIDE.write_text(with_guide_table(GUIDE.read_text(), guide_table(rows, found["versions"])))


if __name__ == "__main__":
    main()
