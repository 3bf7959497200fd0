"""timm: memkern's optimizers in its factory, with timm's groups and layer decay."""

from __future__ import annotations

import torch
from timm.optim import create_optimizer_v2
from torch import nn

import memkern
from memkern.integrations.timm import register


def main(model: nn.Module | None = None, steps: int = 20, classes: int = 10, size: int = 224) -> list[float]:
    torch.manual_seed(0)
    if model is None:
        import timm

        model = timm.create_model("vit_tiny_patch16_224", num_classes=classes)
    print(memkern.compress(model))

    register()
    optimizer = create_optimizer_v2(
        model, "memkern_lamb8bit", lr=5e-3, weight_decay=0.05, layer_decay=0.75, max_grad_norm=1.0
    )
    images, labels = torch.randn(16, 3, size, size), torch.randint(classes, (16,))  # put your data here
    losses = []
    for step in range(steps):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
