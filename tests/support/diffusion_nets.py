"""diffusers' nets with random weights and small sizes, and the loss that they are trained with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

NETS: dict[str, tuple[str, dict[str, Any]]] = {  # the class of diffusers, and its sizes
    "UNet": (
        "UNet2DModel",
        {
            "layers_per_block": 1,
            "block_out_channels": (64, 128, 128),
            "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        },
    ),
    "DiT": ("DiTTransformer2DModel", {"num_attention_heads": 8, "attention_head_dim": 64, "num_layers": 4}),
}
CHANNELS = {"UNet": 3, "DiT": 4}


class Denoiser(nn.Module):
    """A net that predicts noise, and the mean square of its error."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, sample: Tensor, timestep: Tensor, noise: Tensor, class_labels: Tensor | None = None) -> Any:
        labels = {} if class_labels is None else {"class_labels": class_labels}
        return SimpleNamespace(loss=F.mse_loss(self.net(sample, timestep, **labels).sample, noise))


def build(name: str, side: int) -> nn.Module:
    """A net for images of ``side``^2; no label is left out at random. ModuleNotFoundError without diffusers."""
    import diffusers

    cls, sizes = NETS[name]
    channels = CHANNELS[name]
    net = getattr(diffusers, cls)(sample_size=side, in_channels=channels, out_channels=channels, **sizes)
    for module in net.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    return Denoiser(net)
