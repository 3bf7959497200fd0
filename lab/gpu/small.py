"""Runs a few steps, codes, norms and activations of small tensors on a GPU, for sanitize.py to watch."""

from __future__ import annotations

import torch

import memkern
from memkern import functional, optim


def tensors(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(33, 131), (3, 1000), (150, 7), (5,), (0,), (17, 128)]
    return [torch.randn(shape, device=device) * 0.1 for shape in shapes]


def main(device: str = "cuda") -> None:
    for build in (
        optim.Muon8bit,
        optim.SGD8bit,
        optim.AdamW8bit,
        optim.Lion8bit,
        optim.LAMB8bit,
        optim.LARS8bit,
        optim.AdamW,
    ):
        for options in ({}, {"codec": "dynamic"}, {"block_size": 1024}, {"max_grad_norm": 1.0}):
            only_matrices = build is optim.Muon8bit
            params = [torch.nn.Parameter(x) for x in tensors(device) if x.dim() == 2 or not only_matrices]
            optimizer = build(params, lr=1e-2, min_8bit_size=0, **options)
            for _ in range(2):
                for p in params:
                    p.grad = torch.randn_like(p)
                optimizer.step()
    for x in tensors(device):
        for signed in (True, False):
            codes, scale = memkern.quantize_blockwise(x.to(torch.bfloat16), signed=signed)
            memkern.dequantize_blockwise(codes, scale)
        for dtype, keep in ((torch.float32, "codes"), (torch.bfloat16, "codes"), (torch.bfloat16, "output")):
            inputs = x.to(dtype).requires_grad_()
            functional.gelu(inputs, keep=keep).sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
