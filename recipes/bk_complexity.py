"""Operations of a private step, and where to form per-sample gradients: BK's Tables 1, 4, 5 and Figure 2, by formula.

    python recipes/bk_complexity.py                              # writes recipes/results/bk_complexity.{md,json}

For a linear layer with T positions, p outputs and d inputs, per record (multiplications and additions, as in Table 5):

    not private            6 T p d                              forward, gradient of the input, gradient of the weight
    Opacus                 8 T p d                              and the weight gradient once more, record by record
    GhostClip              10 T p d + 2 T^2 (p + d)             two backward passes
    BK, ghost norm         6 T p d + 2 T^2 (p + d)              Gram matrices of input and output gradient
    BK, formed             6 T p d + 2 p d                      the formed gradients give norm and sum
    this library's ghost   6 T p d + T (T + 32) (p + d)         half of each symmetric Gram matrix, in strips of 32 (at
                                                                most: layers that share an input share its matrix)

Two rules say when to form the gradients. The paper's, 2 T^2 >= p d, compares the *scratch* of the norm: two Gram
matrices against the gradient. Ours, 1.6 T (p + d) >= p d, compares the *book*: what is kept from the backward pass to
the sum, (a, ds) against the gradient that replaces them. With p = d they are T >= 0.71 p and T >= 0.31 p. Between the
two, forming needs fewer operations and about the same memory in the book, at the price of a larger scratch for one
layer.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hf_private.gradients.persample import FORMED_MAY_BE

RESULTS = Path(__file__).parent / "results" / "bk_complexity"
STRIP = 32


class Layer(NamedTuple):
    """A linear layer: positions, outputs, inputs, and how many of them a model has."""

    t: int
    p: int
    d: int
    count: int = 1


def transformer(t: int, width: int, depth: int, fused: bool = False) -> list[Layer]:
    """The linear layers of an encoder or decoder with an MLP four times as wide; GPT-2 fuses q, k and v."""
    attention = [Layer(t, 3 * width, width, depth)] if fused else [Layer(t, width, width, 3 * depth)]
    return [
        *attention,
        Layer(t, width, width, depth),
        Layer(t, 4 * width, width, depth),
        Layer(t, width, 4 * width, depth),
    ]


MODELS: Mapping[str, tuple[list[Layer], str]] = {  # with the paper's speed relative to no privacy, by complexity
    "RoBERTa-large, T = 256 (QQP)": (transformer(256, 1024, 24), "0.89"),
    "GPT2-large, T = 100 (E2E)": (transformer(100, 1280, 36, fused=True), "0.97"),
    "BEiT-large, T = 197 (CIFAR)": (transformer(197, 1024, 24), "0.92"),
    "RoBERTa-large, T = 512": (transformer(512, 1024, 24), ""),
    "RoBERTa-large, T = 2048": (transformer(2048, 1024, 24), ""),
    "MLP, 50 layers of width 1,000 (Figure 2)": ([Layer(1, 1000, 1000, 50)], ""),
    "MLP, 10 layers of width 5,000 (Figure 2)": ([Layer(1, 5000, 5000, 10)], ""),
}
RESNET18 = {  # on images of 224 x 224, as in Table 4: without the convolutions of the shortcuts
    "conv1": [Layer(112**2, 64, 147)],
    "conv2_x": [Layer(56**2, 64, 576, 4)],
    "conv3_x": [Layer(28**2, 128, 576), Layer(28**2, 128, 1152, 3)],
    "conv4_x": [Layer(14**2, 256, 1152), Layer(14**2, 256, 2304, 3)],
    "conv5_x": [Layer(7**2, 512, 2304), Layer(7**2, 512, 4608, 3)],
    "linear": [Layer(1, 1000, 512)],
}


def paper_forms(layer: Layer) -> bool:
    """The paper's layerwise decision: form the gradients unless 2 T^2 < p d."""
    return 2 * layer.t**2 >= layer.p * layer.d


def we_form(layer: Layer) -> bool:
    """This library's (`Outer.instantiating_is_smaller`): form them unless 1.6 T (p + d) < p d."""
    return FORMED_MAY_BE * layer.t * (layer.p + layer.d) >= layer.p * layer.d


def operations(layers: list[Layer], engine: str) -> int:
    """Operations for one record, by engine."""
    total = 0
    for layer in layers:
        t, p, d, count = layer
        once, ghost, formed = t * p * d, 2 * t * t * (p + d), 2 * p * d
        half = t * min(t + STRIP, 2 * t) * (p + d)
        total += (
            count
            * {
                "not private": 6 * once,
                "Opacus": 8 * once,
                "GhostClip": 10 * once + ghost,
                "BK": 6 * once + ghost,
                "BK-MixOpt": 6 * once + (formed if paper_forms(layer) else ghost),
                "this library": 6 * once + (formed if we_form(layer) else half),
            }[engine]
        )
    return total


def rows() -> list[dict]:
    """The tables' rows: relative speed by engine, and the share of layers that each rule forms."""
    found = []
    for name, (layers, published) in MODELS.items():
        plain = operations(layers, "not private")
        speed = {e: plain / operations(layers, e) for e in ("Opacus", "GhostClip", "BK", "BK-MixOpt", "this library")}
        number = sum(layer.count for layer in layers)
        forms = {
            rule.__name__: sum(layer.count for layer in layers if rule(layer)) / number
            for rule in (paper_forms, we_form)
        }
        found.append({"model": name, "published": published, "speed": speed, **forms})
    return found


def scratch() -> dict[str, tuple[int, int, int, int]]:
    """Numbers that the norms of one record need in ResNet18, by stage: Gram matrices, gradients, the smaller of them
    by the paper's rule, and what our rule takes."""
    found = {}
    for stage, layers in RESNET18.items():
        grams, formed = ([2 * x.t**2 for x in layers], [x.p * x.d for x in layers])
        by_paper = [f if paper_forms(x) else g for x, g, f in zip(layers, grams, formed, strict=True)]
        by_us = [f if we_form(x) else g for x, g, f in zip(layers, grams, formed, strict=True)]
        counts = [x.count for x in layers]
        found[stage] = tuple(
            sum(n * size for n, size in zip(counts, sizes, strict=True)) for sizes in (grams, formed, by_paper, by_us)
        )
    found["all"] = tuple(map(sum, zip(*found.values(), strict=True)))
    return found


def main(argv: list[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    found = rows()
    engines = list(found[0]["speed"])
    lines = [
        "# Speed by operations, relative to training without privacy",
        "",
        "`python recipes/bk_complexity.py`: linear layers only, by the formulas of the BK paper's Table 5. *Paper*:"
        " its Table 1, the number in parentheses. The last columns: share of the layers whose per-sample gradients are"
        f" formed by the paper's rule 2T² ≥ pd and by ours, {FORMED_MAY_BE} T(p+d) ≥ pd.",
        "",
        "| model | paper (BK) | " + " | ".join(engines) + " | formed, paper | formed, ours |",
        "| " + " | ".join("---" for _ in range(len(engines) + 4)) + " |",
    ]
    for row in found:
        cells = [f"{row['speed'][engine]:.2f}" for engine in engines]
        shares = [f"{row['paper_forms']:.0%}", f"{row['we_form']:.0%}"]
        lines.append("| " + " | ".join([row["model"], row["published"], *cells, *shares]) + " |")
    lines += [
        "",
        "## Memory for the norms of one record: ResNet18, 224 x 224 (Table 4)",
        "",
        "In thousands of numbers. The sums of the paper are 399M, 11.5M and, mixed, 1.0M. Our rule forms more"
        " gradients where T lies between 0.31 and 0.71 of the width (here conv4_x): it then need not keep the"
        " activations, which are about as large.",
        "",
        "| layers | Gram matrices, 2T² | gradients, pd | by the paper's rule | by ours |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for stage, sizes in scratch().items():
        lines.append(f"| {stage} | " + " | ".join(f"{size / 1000:,.1f}" for size in sizes) + " |")
    text = "\n".join(lines) + "\n"
    RESULTS.with_suffix(".md").write_text(text)
    RESULTS.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
