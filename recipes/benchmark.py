"""What a private step costs: speed, memory and operations of every engine as ratios against plain training.

    python recipes/benchmark.py                      # the two headline settings (make bench)
    python recipes/benchmark.py --all                # the grid (make bench-all)
    python recipes/benchmark.py --settings bert-8x128 --engines plain bk rgp --rounds 6

One step = forward and backward pass, for private engines with clipping and summing, without noise and optimizer.
All engines of a setting run in one process, in turn, on one thread; a time is the minimum of CPU seconds over the
rounds, because other load on a machine can only add to it. Memory is the peak of live tensor bytes, weights included;
operations are counted by torch. Opacus takes part where it is installed. Results go to recipes/results/benchmark.*.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from hf_private.bookkeeping import BookKeeper, trainable
from hf_private.clipping import Clipping
from hf_private.config import DPConfig
from hf_private.losses import PerSampleLoss
from hf_private.targets import CarrierConfig, resolve_method

RESULTS = Path(__file__).parent / "results"
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


# ---- models and batches


def bert(**changes) -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**NO_DROPOUT | changes))


def minilm() -> nn.Module:
    return bert(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)


def roberta() -> nn.Module:
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**NO_DROPOUT, max_position_embeddings=514))


def gpt2(tied: bool) -> nn.Module:
    config = hf.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, tie_word_embeddings=tied)
    return hf.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=32000, hidden_size=640, intermediate_size=1728, num_hidden_layers=12, num_attention_heads=10,
        num_key_value_heads=5,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": bert,
    "roberta": roberta,
    "minilm": minilm,
    "gpt2": lambda: gpt2(tied=True),
    "gpt2untied": lambda: gpt2(tied=False),
    "llama": llama,
    "vit": vit,
}
HEADLINE = ("bert-8x128", "gpt2-4x100")
GRID = HEADLINE + (
    "bert-8x32", "bert-4x512", "roberta-8x128", "minilm-16x32", "minilm-16x128", "gpt2untied-4x100", "gpt2-4x32",
    "gpt2-2x512", "gpt2-1x1024", "llama-4x32", "llama-4x128", "llama-1x1024", "vit-4x197",
)  # fmt: skip


def make_batch(model: nn.Module, name: str, batch_size: int, length: int) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(batch_size, 3, 224, 224), "labels": torch.randint(2, (batch_size,))}
    ids = torch.randint(1000, 20000, (batch_size, length))
    labels = ids if model.config.model_type in ("gpt2", "llama") else torch.randint(2, (batch_size,))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


# ---- engines: each makes a model ready and returns one step


def plain(model: nn.Module, batch: dict) -> Callable[[], None]:
    loss, parameters = PerSampleLoss(model), list(trainable(model).values())

    def step() -> None:
        loss(model, batch).sum().backward()
        for p in parameters:
            p.grad = None

    return step


def private(model: nn.Module, batch: dict, carriers: CarrierConfig | None = None) -> Callable[[], None]:
    method = resolve_method(DPConfig(noise_multiplier=1.0, carriers=carriers), model, seed=0)
    method.attach(trainable(model))
    loss, clipping = PerSampleLoss(model), Clipping("flat", 1.0)
    method.begin_step(0)  # carriers are computed once per logical step, of many micro-batches

    def step() -> None:
        with BookKeeper(model, method) as book:
            book.backward(loss(model, batch))
            dict(method.clipped_sums(book.take(), clipping))

    return step


def lora(model: nn.Module) -> nn.Module:
    head = [name for name in ("classifier", "score") if hasattr(model, name)]
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", modules_to_save=head or None))


def frozen(model: nn.Module, batch: dict) -> Callable[[], None]:
    """The yardstick of carriers: input gradients only, down to the first layer, no weight gradient."""
    model.requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(lambda _m, _i, y: y.requires_grad_())
    loss = PerSampleLoss(model)
    return lambda: loss(model, batch).sum().backward()


def opacus(mode: str) -> Callable[[nn.Module, dict], Callable[[], None]]:
    def engine(model: nn.Module, batch: dict) -> Callable[[], None]:
        from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

        for module in model.modules():  # Opacus does not know broadcast position ids
            if isinstance(module, nn.Embedding) and module.num_embeddings in (512, 514, 1024):
                module.requires_grad_(False)
        loss = PerSampleLoss(model)
        kind = GradSampleModule if mode == "hooks" else GradSampleModuleFastGradientClipping
        options = {} if mode == "hooks" else {"max_grad_norm": 1.0, "use_ghost_clipping": True}
        wrapped = kind(model, loss_reduction="sum", **options)
        parameters = list(trainable(model).values())

        def step() -> None:
            if mode == "hooks":
                loss(wrapped, batch).sum().backward()
                norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in parameters]).norm(dim=0)
                for p in parameters:
                    p.grad = torch.einsum("n,n...->...", (1 / norms).clamp(max=1), p.grad_sample)
                    p.grad_sample = None
            else:
                losses = loss(wrapped, batch)
                losses.sum().backward(retain_graph=True)
                factors = wrapped.get_clipping_coef()
                for p in parameters:
                    p.grad = None
                wrapped.disable_hooks()
                (losses * factors).sum().backward()
                wrapped.enable_hooks()
            for p in parameters:
                p.grad = None

        return step

    return engine


ENGINES: dict[str, Callable[[nn.Module, dict], Callable[[], None]]] = {
    "plain": plain,
    "bk": private,
    "rgp": lambda model, batch: private(model, batch, CarrierConfig(r=8)),
    "lsg": lambda model, batch: private(model, batch, CarrierConfig(r=8, sparsity=0.3)),
    "frozen": frozen,
    "lora": lambda model, batch: plain(lora(model), batch),
    "lora-bk": lambda model, batch: private(lora(model), batch),
    "opacus-hooks": opacus("hooks"),
    "opacus-ghost": opacus("ghost"),
}


# ---- measuring


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the model's storages and of all that operations create while they live; keeps the peak."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = WeakIdKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            self._track(tensor.untyped_storage())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._track(tensor.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = _Finally(lambda: self._free(size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, size: int) -> None:
        self.live -= size


class _Finally:
    """Runs a function when the entry that holds it goes."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def __del__(self) -> None:
        self.function()


def measure(setting: str, engines: list[str], rounds: int) -> list[dict]:
    """One row per engine: CPU seconds, peak bytes and operations of a step, and their ratios to plain training."""
    name, _, size = setting.partition("-")
    batch_size, length = map(int, size.split("x"))
    rows, steps = {}, {}
    for engine in engines:
        torch.manual_seed(0)
        model = MODELS[name]().train()
        batch = make_batch(model, name, batch_size, length)
        try:
            steps[engine] = ENGINES[engine](model, batch)
            with counted(model) as row:
                steps[engine]()
        except Exception as error:  # a peer that is absent or cannot run this model is a result too
            if not engine.startswith("opacus"):
                raise
            steps.pop(engine, None)
            print(f"  {engine}: skipped ({type(error).__name__}: {str(error).splitlines()[0]})")
            continue
        rows[engine] = {"setting": setting, "engine": engine, "seconds": float("inf"), **row}
    for _ in range(rounds):
        for engine, step in steps.items():
            gc.collect()
            start = time.process_time()
            step()
            rows[engine]["seconds"] = min(rows[engine]["seconds"], time.process_time() - start)
    for row in rows.values():
        row["speed"] = rows["plain"]["seconds"] / row["seconds"]
        row["memory"] = row["bytes"] / rows["plain"]["bytes"]
        row["operations"] = row["flops"] / rows["plain"]["flops"]
    return list(rows.values())


@contextmanager
def counted(model: nn.Module):
    row: dict[str, float] = {}
    with FlopCounterMode(display=False) as flops, LiveBytes(model) as live:
        yield row
    row["flops"], row["bytes"] = flops.get_total_flops(), live.peak


def table(rows: list[dict]) -> str:
    lines = ["| setting | engine | speed | memory | operations |", "|---|---|---|---|---|"]
    lines += [
        f"| {r['setting']} | {r['engine']} | {r['speed']:.2f} | {r['memory']:.2f} | {r['operations']:.2f} |"
        for r in rows
    ]
    return "\n".join(lines)


def chart(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys(r["setting"] for r in rows))
    engines = list(dict.fromkeys(r["engine"] for r in rows))
    figure = Figure(figsize=(2 + 2.2 * len(settings), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(engines)
    for i, engine in enumerate(engines):
        speed = {r["setting"]: r["speed"] for r in rows if r["engine"] == engine}
        axes.bar(
            [x + i * width for x in range(len(settings))], [speed.get(s, 0) for s in settings], width, label=engine
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(settings))], settings)
    axes.set_ylabel("speed (plain training = 1)")
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--settings", nargs="+", default=list(HEADLINE), help="<model>-<records>x<tokens>, e.g. bert-8x128"
    )
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=4, help="rounds over which the minimum is taken")
    parser.add_argument("--all", action="store_true", help="the whole grid of models and sizes")
    parser.add_argument("--output", default="benchmark", help="name of the files in recipes/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hf.logging.set_verbosity_error()
    engines = ["plain"] + [engine for engine in args.engines if engine != "plain"]
    rows: list[dict] = []
    for setting in GRID if args.all else args.settings:
        print(f"{setting} ...", flush=True)
        rows += measure(setting, engines, args.rounds)
        print(table([r for r in rows if r["setting"] == setting]), flush=True)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{args.output}.json").write_text(json.dumps(rows, indent=1))
        (RESULTS / f"{args.output}.md").write_text(table(rows) + "\n")
    chart(rows, RESULTS / f"{args.output}.png")


if __name__ == "__main__":
    main()
