"""Train an image classifier with differential privacy: a small ViT, a Wide ResNet, or a ViT from the Hub.

    # offline: the digits of scikit-learn (1,797 images of 8 x 8), half a minute on one core
    python recipes/vision.py --config recipes/configs/digits.yaml --method rgp --output_dir outputs/digits_rgp

    # CIFAR-10 and SVHN with WRN28-4 as in the papers on RGP and LSG, on four GPUs
    accelerate launch --num_processes 4 recipes/vision.py --config recipes/configs/cifar10_wrn.yaml --method lsg \
        --output_dir outputs/cifar10_lsg
    torchrun --nproc_per_node 4 recipes/vision.py --config recipes/configs/svhn_wrn.yaml --output_dir outputs/svhn

    # a pretrained ViT, images scaled to its size
    accelerate launch recipes/vision.py --config recipes/configs/cifar10_vit.yaml --output_dir outputs/cifar10_vit

Data: digits are part of scikit-learn; CIFAR-10 and SVHN come from the Hub, or from train.npz and test.npz (`images`
uint8 of shape (n, H, W) or (n, H, W, C), and `labels`) in `--data_dir` or HF_PRIVATE_DATA. The output folder gets the
model, its card, and results.json. GEP reads anchors from `--anchor_data file.npz`; for digits it draws numerals.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import evaluate
import numpy as np
import torch
import torch.nn.functional as F
from datasets import DatasetInfo, load_dataset
from options import PUBLIC, RecipeOptions, parse
from torch import Tensor
from training import RecipeTrainer, finish, train, with_method
from transformers import (
    AutoModelForImageClassification,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
    set_seed,
)
from wide_resnet import WideResNetConfig, WideResNetForImageClassification, class_losses, made_up_images

METRICS = Path(__file__).parent / "metrics"


class Task(NamedTuple):
    """The name of a dataset on the Hub, and its columns there."""

    hub: tuple[str, ...]
    image: str = "img"
    label: str = "label"


TASKS = {
    "digits": None,  # part of scikit-learn
    "cifar10": Task(("uoft-cs/cifar10",)),
    "svhn": Task(("ufldl-stanford/svhn", "cropped_digits"), image="image"),
}


@dataclass
class VisionOptions(RecipeOptions):
    """Options of this recipe."""

    task: str = field(default="digits", metadata={"help": "Dataset.", "choices": list(TASKS)})
    model_name_or_path: str = field(
        default="vit-tiny",
        metadata={"help": "vit-tiny or wrn<depth>-<widen>, from scratch; or a Hub name or folder of a ViT."},
    )
    augment: bool = field(default=False, metadata={"help": "Flip and shift training images at random."})


class Images(torch.utils.data.Dataset):
    """Images with values in [-1, 1], resized to `size`, with random flips and shifts if `augment` is set.

    The card shows `name`, which it finds in `info` as for `datasets`.
    """

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, name: str, size: int | None = None, augment: bool = False
    ) -> None:
        self.info = DatasetInfo(dataset_name=name)
        images = torch.from_numpy(np.ascontiguousarray(images))
        self.images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
        self.labels = labels
        self.size = size
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        image = self.images[index].float() / 127.5 - 1
        if self.size and image.shape[-1] != self.size:
            image = F.interpolate(image[None], (self.size, self.size), mode="bilinear", antialias=True)[0]
        if self.augment:  # torch's generator, which DPTrainer reseeds from the operating system
            image = image.flip(-1) if torch.rand(()) < 0.5 else image
            top, left = torch.randint(9, (2,)).tolist()
            height, width = image.shape[-2:]
            image = F.pad(image, (4, 4, 4, 4))[:, top : top + height, left : left + width]
        return {"pixel_values": image, "labels": int(self.labels[index])}


def read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a local file; zeros if it has no labels (anchors need none)."""
    with np.load(path) as file:  # never unpickles
        images = file["images"]
        return images, file["labels"] if "labels" in file else np.zeros(len(images), int)


def load_arrays(task: str, split: str, data_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, H, W) or (n, H, W, C) as uint8, and labels (n,)."""
    folder = data_dir or os.environ.get("HF_PRIVATE_DATA")
    for place in [Path(folder), Path(folder, task)] if folder else []:
        if (place / f"{split}.npz").is_file():
            return read_npz(place / f"{split}.npz")
    if task == "digits":
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(images))
        order = order[360:] if split == "train" else order[:360]
        return (images[order].reshape(-1, 8, 8) * 15.9375).astype(np.uint8), labels[order]
    try:
        records = load_dataset(*TASKS[task].hub, split=split)
    except Exception as error:
        raise FileNotFoundError(
            f"No {split} data for {task}: no {split}.npz in {folder or '`--data_dir` (not given)'}, and the Hub cannot"
            f" be reached ({type(error).__name__}). Pass `--data_dir FOLDER`, or use --task digits, which needs none."
        ) from error
    return np.stack([np.asarray(image) for image in records[TASKS[task].image]]), np.array(records[TASKS[task].label])


def drawn_numerals(count: int) -> np.ndarray:
    """Public numerals (n, 8, 8), drawn with a font at random sizes, places and intensities."""
    from PIL import Image, ImageDraw, ImageFont

    draw, made = np.random.default_rng(0), []
    for index in range(count):
        image = Image.new("L", (32, 32))
        font = ImageFont.load_default(int(draw.integers(24, 34)))
        place = (int(draw.integers(4, 12)), int(draw.integers(-6, 2)))
        ImageDraw.Draw(image).text(place, str(index % 10), int(draw.integers(160, 256)), font=font)
        image = image.rotate(float(draw.uniform(-12, 12)))
        made.append(np.asarray(image.resize((8, 8), Image.Resampling.BOX)))
    return np.stack(made)


def make_model(name: str, size: int, channels: int, classes: int) -> PreTrainedModel:
    """A small network from scratch, or a pretrained one with a new head."""
    shape = {"image_size": size, "num_channels": channels, "num_labels": classes}
    if name == "vit-tiny":
        config = ViTConfig(
            **shape, patch_size=size // 4, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
            intermediate_size=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return ViTForImageClassification(config)
    if name.startswith("wrn"):
        depth, widen = map(int, name.removeprefix("wrn").split("-"))
        return WideResNetForImageClassification(WideResNetConfig(depth, widen, **shape))
    return AutoModelForImageClassification.from_pretrained(name, num_labels=classes, ignore_mismatched_sizes=True)


class ImageTrainer(RecipeTrainer):
    """Runs the self-check on noise with the shape of the images."""

    def public_batch(
        self, batch_size: int, length: int, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        model = self.accelerator.unwrap_model(self.model)
        return made_up_images(model.config, batch_size, generator, model.device)


def main(argv: list[str] | None = None) -> dict:
    options, dp_config, args = parse(VisionOptions, __doc__, argv)
    images, labels = load_arrays(options.task, "train", options.data_dir)
    dev_images, dev_labels = load_arrays(options.task, "test", options.data_dir)
    if options.holdout:
        order = np.random.default_rng(0).permutation(len(images))
        chosen, rest = order[: options.holdout], order[options.holdout :]
        (images, labels), (dev_images, dev_labels) = (images[rest], labels[rest]), (images[chosen], labels[chosen])
    images, dev_images = images[: options.max_train_records], dev_images[: options.max_eval_records]

    set_seed(args.seed)
    channels = images.shape[-1] if images.ndim == 4 else 1
    model = make_model(options.model_name_or_path, images.shape[1], channels, int(labels.max()) + 1)
    model = with_method(model, options, modules_to_save=["classifier"])
    size, anchors = model.config.image_size, None
    if options.method in PUBLIC:
        if not options.anchor_data and options.task != "digits":
            raise ValueError("`anchor_data` must name an .npz file of public images for GEP, got None.")
        public = read_npz(Path(options.anchor_data))[0] if options.anchor_data else drawn_numerals(2000)
        name = Path(options.anchor_data).name if options.anchor_data else "numerals drawn with a font"
        anchors = Images(public, np.arange(len(public)) % model.config.num_labels, name, size)
    accuracy = evaluate.load(str(METRICS / "accuracy"))

    trainer = ImageTrainer(
        model,
        args,
        dp_config=dp_config,
        train_dataset=Images(images, labels, options.task, size, options.augment),
        eval_dataset=Images(dev_images, dev_labels, options.task, size),
        anchor_dataset=anchors,
        data_collator=default_data_collator,
        per_sample_loss=class_losses,
        compute_metrics=lambda p: accuracy.compute(predictions=p.predictions.argmax(-1), references=p.label_ids),
    )
    took = train(trainer, options)
    return finish(trainer, options, trainer.evaluate(), took)


if __name__ == "__main__":
    main()
