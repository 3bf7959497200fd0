"""A few steps, codes and norms on a GPU, small enough for compute-sanitizer."""

from __future__ import annotations

import torch

import memkern
from memkern import optim


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(33, 131), (3, 1000), (150, 7), (5,), (0,), (17, 128)]
    return [torch.randn(shape, device="cuda") * 0.1 for shape in shapes]


def main() -> None:
    for build in (
        optim.SGD8bit,
        optim.AdamW8bit,
        optim.Lion8bit,
        optim.LAMB8bit,
        optim.LARS8bit,
        optim.AdamW,
    ):
        for options in ({}, {"codec": "dynamic"}, {"block_size": 1024}, {"max_grad_norm": 1.0}):
            params = [torch.nn.Parameter(x) for x in tensors()]
            optimizer = build(params, lr=1e-2, min_8bit_size=0, **options)
            for _ in range(2):
                for p in params:
                    p.grad = torch.randn_like(p)
                optimizer.step()
    for x in tensors():
        for signed in (True, False):
            codes, scale = memkern.quantize_blockwise(x.to(torch.bfloat16), signed=signed)
            memkern.dequantize_blockwise(codes, scale)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
