"""Times Muon's steps on GPT-2's matrices beside torch's, and its two element-wise ops without the matrix products."""

from __future__ import annotations

import importlib
import math

import torch

from memkern import _ops
from memkern.memory import tensor_bytes
from memkern.quant.codec import CODECS
from memkern.quant.layout import layout_of
from memkern.reference import muon
from memkern.schemas import StepArgs

from .bench_optim import GPT2, Shapes, gpt2_shapes, optimizer_of, stepper
from .harness import Case, Contender, Subject

BLOCK_SIZE = 128


def ops_alone(shapes: Shapes, device: str) -> Contender:
    """The element-wise half of a step with 8-bit momentum, without the products between its two ops."""

    def setup() -> Subject:
        torch.manual_seed(0)
        params = [torch.randn(shape, device=device) * 0.02 for shape in shapes]
        args = StepArgs(
            params,
            [torch.randn_like(p) * 1e-3 for p in params],
            moments=[torch.zeros_like(p, dtype=torch.int8) for p in params],
            scales=[torch.zeros(layout_of(p, BLOCK_SIZE).scale_shape, device=device) for p in params],
            steps=[torch.zeros((), device=device) for _ in params],
            group=[0] * len(params),
            lr=[torch.tensor(1e-3, dtype=torch.float64, device=device)],
            hyperparameters=[0.95, 1.0, 0.1, 0.0],  # momentum, nesterov, weight_decay, maximize
            codec=[CODECS["power"]],
            block_size=[BLOCK_SIZE],
        )
        updates = [torch.empty_like(p, dtype=torch.bfloat16) for p in params]
        ratios = [muon.lr_ratio(None, p.shape) for p in params]

        def step() -> None:
            _ops.muon_momentum_(args, updates)
            _ops.muon_apply_(args, updates, ratios)

        state = tensor_bytes([*args.moments, *args.scales])
        # Gradients are read, weights and states read and written, updates written, read for norms, and read again.
        moved = 3 * tensor_bytes(params) + 2 * state + 3 * tensor_bytes(updates)
        return Subject(step, lambda: moved, lambda: state)

    return Contender("memkern Muon8bit, without products", setup)


def pytorch_optimizer_muon(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    cls = importlib.import_module("pytorch_optimizer").Muon
    optimizer: torch.optim.Optimizer = cls([{"params": params, "use_muon": True}])
    return optimizer


def cases(size: int, device: str) -> list[Case]:
    shapes = gpt2_shapes(GPT2 if size >= 2**24 else size)  # a quick run has fewer elements than GPT-2
    _vocabulary, _positions, *matrices = [shape for shape in shapes if len(shape) == 2]
    numel = sum(map(math.prod, matrices))
    return [
        Case(
            f"Muon, {len(matrices)} matrices like GPT-2's",
            numel,
            [
                stepper("memkern Muon8bit", optimizer_of("memkern.optim", "Muon8bit"), matrices, device),
                stepper("memkern Muon", optimizer_of("memkern.optim", "Muon"), matrices, device),
                ops_alone(matrices, device),
                stepper("torch Muon", optimizer_of("torch.optim", "Muon"), matrices, device),
                stepper("pytorch_optimizer Muon", pytorch_optimizer_muon, matrices, device),
            ],
        )
    ]
