"""Wide ResNet (Zagoruyko and Komodakis 2016) as a Transformers model.

It uses group normalisation, because batch normalisation mixes records. The papers on RGP and LSG use WRN28-4 for
CIFAR-10 and SVHN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention


class WideResNetConfig(PretrainedConfig):
    """Depth (6n + 4), widening factor, and the shape of the images."""

    model_type = "wide_resnet"

    def __init__(
        self, depth: int = 28, widen: int = 4, groups: int = 16, image_size: int = 32, num_channels: int = 3, **kwargs
    ) -> None:
        if (depth - 4) % 6:
            raise ValueError(f"`depth` must be 6 n + 4, got {depth}.")
        self.depth = depth
        self.widen = widen
        self.groups = groups
        self.image_size = image_size
        self.num_channels = num_channels
        super().__init__(**kwargs)


class Block(nn.Module):
    """Norm, ReLU, convolution, twice; added to the input, or to its 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.conv_shortcut = None
        if stride > 1 or inputs != outputs:
            self.conv_shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        shortcut = x if self.conv_shortcut is None else self.conv_shortcut(h)
        return shortcut + self.conv2(F.relu(self.norm2(self.conv1(h))))


class WideResNetTrunk(nn.Module):
    """Images (B, channels, H, W) -> features (B, 64 * widen)."""

    def __init__(self, config: WideResNetConfig) -> None:
        super().__init__()
        self.conv = nn.Conv2d(config.num_channels, 16, 3, padding=1, bias=False)
        blocks, inputs = [], 16
        for stage in range(3):
            for index in range((config.depth - 4) // 6):
                outputs = 16 * config.widen * 2**stage
                blocks.append(Block(inputs, outputs, 2 if stage and not index else 1, config.groups))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.GroupNorm(config.groups, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.blocks(self.conv(x)))).mean((2, 3))


class WideResNetForImageClassification(PreTrainedModel):
    """Wide ResNet with a linear head."""

    config_class = WideResNetConfig
    base_model_prefix = "trunk"
    main_input_name = "pixel_values"

    def __init__(self, config: WideResNetConfig) -> None:
        super().__init__(config)
        self.trunk = WideResNetTrunk(config)
        self.classifier = nn.Linear(64 * config.widen, config.num_labels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **_: object
    ) -> ImageClassifierOutputWithNoAttention:
        logits = self.classifier(self.trunk(pixel_values))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)


def class_losses(outputs: ImageClassifierOutputWithNoAttention, labels: Tensor) -> Tensor:
    """Cross entropy of each record (B,), for DPTrainer's `per_sample_loss`."""
    return F.cross_entropy(outputs.logits.float(), labels, reduction="none")


def made_up_images(
    config: PretrainedConfig, batch_size: int, generator: torch.Generator | None, device: torch.device
) -> dict[str, Tensor]:
    """A batch of noise with labels, for the self-check of DPTrainer."""
    generator = generator or torch.Generator().manual_seed(0)
    shape = (batch_size, config.num_channels, config.image_size, config.image_size)
    labels = torch.randint(config.num_labels, (batch_size,), generator=generator)
    return {"pixel_values": torch.randn(shape, generator=generator).to(device), "labels": labels.to(device)}
