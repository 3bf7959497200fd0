"""timm's nets with random weights, and a loss; torchvision, which `import timm` asks for, is not needed."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

NETS = {
    "MobileNetV3": "mobilenetv3_large_100",
    "EfficientNet-B0": "efficientnet_b0",
    "ResNet-18": "resnet18",
    "ViT-tiny": "vit_tiny_patch16_224",
    "RegNet": "regnety_004",
    "Mixer": "mixer_s32_224",
    "ConvNeXt-atto": "convnext_atto",
}
CLASSES = 10  # of images
_NOT_USED = {  # what timm imports of torchvision beside its data sets
    "torchvision": (),
    "torchvision.models": (),
    "torchvision.models.feature_extraction": ("create_feature_extractor", "get_graph_node_names"),
    "torchvision.ops": (),
    "torchvision.ops.misc": ("FrozenBatchNorm2d",),
}


def _timm() -> Any:
    """The module timm, also where torchvision is missing."""
    if not hasattr(sys.modules.get("timm"), "create_model"):  # not there, or timm_factory's
        for name in [name for name in sys.modules if f"{name}.".startswith(("timm.", "memkern.integrations.timm."))]:
            del sys.modules[name]
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):  # none, or one of another torch
        with _instead_of_torchvision():
            return importlib.import_module("timm")
    return importlib.import_module("timm")


@contextlib.contextmanager
def _instead_of_torchvision() -> Iterator[None]:
    """Stand-ins for torchvision's modules, only while timm is imported: others would take them for torchvision."""
    for name, classes in _NOT_USED.items():
        sys.modules[name] = module = ModuleType(name)
        vars(module).update({cls: type(cls, (nn.Module,), {}) for cls in classes})
    _without_data_sets()
    try:
        yield
    finally:
        for name in _NOT_USED:
            del sys.modules[name]


def _without_data_sets() -> None:
    """Makes a timm.data with its constants, which the nets import, and nothing else."""
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None or "timm" in sys.modules:
        return
    folder = Path(spec.origin).parent / "data"
    data = sys.modules["timm.data"] = ModuleType("timm.data")
    data.__path__ = [str(folder)]
    exec((folder / "constants.py").read_text(), vars(data))


class Classifier(nn.Module):
    """A net with the loss that transformers' models give."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        return SimpleNamespace(loss=F.cross_entropy(self.net(pixel_values), labels))


def build(name: str) -> nn.Module:
    """Dropout and stochastic depth are off, as timm has them by default. ModuleNotFoundError without timm.

    A last layer of zeros, which some nets begin with, gets random numbers: else all other gradients would be zero.
    """
    net = _timm().create_model(NETS[name], pretrained=False, num_classes=CLASSES)
    if not (weight := net.get_classifier().weight).any():
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return Classifier(net)
