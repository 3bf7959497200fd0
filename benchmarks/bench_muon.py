"""Steps of Muon on GPT-2's matrices beside torch's, and the two element-wise ops by themselves."""

from __future__ import annotations

import math

import torch

from memkern import _ops
from memkern.memory import tensor_bytes
from memkern.quant.codec import CODECS
from memkern.quant.layout import layout_of
from memkern.reference import muon
from memkern.schemas import StepArgs

from .bench_optim import GPT2, Shapes, gpt2_shapes, of, stepper
from .harness import Case, Contender, Subject

BLOCK_SIZE = 128


def step_args(shapes: Shapes, device: str, bits: int) -> StepArgs:
    torch.manual_seed(0)
    params = [torch.randn(shape, device=device) * 0.02 for shape in shapes]
    coded = bits == 8
    return StepArgs(
        params,
        [torch.randn_like(p) * 1e-3 for p in params],
        moments=[torch.zeros_like(p, dtype=torch.int8 if coded else torch.float32) for p in params],
        scales=[torch.zeros(layout_of(p, BLOCK_SIZE).scale_shape, device=device) for p in params]
        if coded
        else [],
        steps=[torch.zeros((), device=device) for _ in params],
        group=[0] * len(params),
        lr=[torch.tensor(1e-3, dtype=torch.float64, device=device)],
        hyperparameters=[0.95, 1.0, 0.1, 0.0],
        codec=[CODECS["power"]],
        block_size=[BLOCK_SIZE],
    )


def ops(name: str, shapes: Shapes, device: str, bits: int, products: bool) -> Contender:
    """A contender that calls the ops; ``products``: with Newton-Schulz between them."""

    def setup() -> Subject:
        args = step_args(shapes, device, bits)
        updates = [torch.empty_like(p, dtype=torch.bfloat16) for p in args.params]
        ratios = [muon.adjusted(None, p.shape) for p in args.params]

        def step() -> None:
            sums = _ops.muon_momentum_(args, updates)
            for u, total in zip(updates, sums, strict=True) if products else ():
                u.copy_(muon.orthogonalize(u, total))
            _ops.muon_apply_(args, updates, ratios)

        state = tensor_bytes([*args.moments, *args.scales])
        size = tensor_bytes(args.params)
        return Subject(
            step, lambda: 3 * size + 2 * state + 3 * tensor_bytes(updates), lambda: state
        )  # u is written and read twice

    return Contender(name, setup)


def cases(size: int, device: str) -> list[Case]:
    own = gpt2_shapes(GPT2 if size >= 2**24 else size)
    matrices = [shape for shape in own if len(shape) == 2][2:]  # without the two embeddings
    numel = sum(map(math.prod, matrices))
    return [
        Case(
            f"Muon, {len(matrices)} matrices like GPT-2's",
            numel,
            [
                ops("memkern Muon's ops, 8 bits", matrices, device, 8, True),
                ops("memkern Muon's ops, 32 bits", matrices, device, 32, True),
                ops("memkern Muon's ops, 8 bits, without products", matrices, device, 8, False),
                stepper("torch Muon", of("torch.optim", "Muon"), matrices, device),
            ],
        )
    ]
