"""python -m lab.studies.second_moment PART: Adam with m in 8 bits and sqrt(v) in 4, in plain PyTorch.

``closed-loop``: the relative error of its updates on synthetic gradients. ``training``: a byte-level GPT over 2,000
steps and three seeds, beside 8 bits for both. ``decades``: an MLP whose inputs span four decades, by the optimizers
themselves. Nothing is timed. The outcome is why there are kernels for ``state_bits=(8, 4)``.

The 4-bit codes are those of the power codec with N = 15: ``w = s (q / 15)^2``, at least 1 where w > 0, rounded with the
dither of the step.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from memkern.quant.codec import CODECS
from memkern.quant.layout import layout_of
from memkern.reference.blockwise import decode, dither, encode, from_blocks, to_blocks
from tests.support import gradient_streams as streams

from . import bf16_weights

COLUMNS = (*report.PROVENANCE, "part", "states", "stream", "seed", "steps", "figure", "value")
LEVELS = 15


def encode_w(w: Tensor, u: Tensor, law: str) -> tuple[Tensor, Tensor]:
    """4-bit codes of w = sqrt(v), (blocks, block), and the blocks' scales. ``law``: what is rounded without bias."""
    scale = w.amax(1)
    usable = scale > 0
    t = (w / torch.where(usable, scale, 1.0)[:, None]).sqrt() * LEVELS  # w = s (t / N)^2
    if law == "linear":
        t = t * t / LEVELS
    q = (t + u).floor()
    if law == "value":
        low = t.floor()
        q = low + (t * t - low * low >= (1 - u) * (2 * low + 1))
    q = torch.where(w > 0, q.clamp(1, LEVELS), 0)
    return q, scale


def decode_w(q: Tensor, scale: Tensor, law: str) -> Tensor:
    share = q / LEVELS
    return scale[:, None] * (share if law == "linear" else share * share)


class Adam84(torch.optim.Optimizer):
    """AdamW in fp32 whose moments are, after each step, replaced by the values of their codes."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        law: str = "root",
        both: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.law, self.both = law, both

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr, eps = group["betas"], group["lr"], group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                small = p.numel() < 4096 or (p.dim() < 2 and p.numel() < 65536)
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), w=torch.zeros_like(p))
                state["step"] += 1
                g, step = p.grad, state["step"]
                m = beta1 * state["m"] + (1 - beta1) * g
                v = beta2 * state["w"] ** 2 + (1 - beta2) * g * g
                root = (1 - beta2**step) ** 0.5
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(lr * root / (1 - beta1**step) * m / (v.sqrt() + eps * root))
                state["m"], state["w"] = m, v.sqrt()
                if not small:
                    self._store(state, p, step)

    def _store(self, state: dict[str, Any], p: Tensor, step: int) -> None:
        layout = layout_of(p, 128)
        u = dither(layout.block, step, p.device)
        m, w = to_blocks(state["m"], layout), to_blocks(state["w"], layout)
        if self.both:  # 4 bits, linear, to the nearest, for m too
            scale = m.abs().amax(1, keepdim=True).clamp(min=1e-38)
            new_m = (m / scale * 7).round() * scale / 7
        else:
            new_m = decode(*encode(m, CODECS["power"], True, u), CODECS["power"])
        if self.both:
            u = torch.full_like(u, 0.5)
        q, scale = encode_w(w, u, self.law)
        from_blocks(new_m, layout, state["m"])
        from_blocks(decode_w(q, scale, self.law), layout, state["w"])


def stored_w(optimizer: torch.optim.Optimizer, p: Tensor) -> Tensor:
    return optimizer.state[p]["w"]


Figure = tuple[str, str, int, int, str, float]
STATES: dict[str, Callable[..., Any]] = {
    "m 8 bits, sqrt(v) 4": functools.partial(Adam84, law="root"),
    "m 8 bits, sqrt(v) 4, without bias in the value": functools.partial(Adam84, law="value"),
    "m 8 bits, sqrt(v) 4, linear": functools.partial(Adam84, law="linear"),
    "both 4 bits, linear, to the nearest": functools.partial(Adam84, law="linear", both=True),
}


def closed_loop(steps: int = 600) -> Iterator[Figure]:
    from memkern.optim import Adam8bit

    for name, factory in {**STATES, "both 8 bits": Adam8bit}.items():
        for stream in ("base", "heterogeneous", "sparse"):
            ours = factory is not Adam8bit
            sqrt_v = stored_w if ours else streams.stored_sqrt_v
            run = streams.closed_loop(factory, streams.make(stream, steps, 0), sqrt_v=sqrt_v)
            yield name, stream, 0, steps, "error", run.mean_error
            yield name, stream, 0, steps, "sqrt(v) / true", run.sqrt_v_ratio


def training(steps: int = 2000, seeds: Iterable[int] = range(3), lr: float = 3e-3) -> Iterator[Figure]:
    from memkern.optim import AdamW8bit

    text = bf16_weights.corpus()
    for seed in seeds:
        for name, factory in {
            "both 8 bits": AdamW8bit,
            "m 8 bits, sqrt(v) 4": STATES["m 8 bits, sqrt(v) 4"],
        }.items():
            run = bf16_weights.new_run(seed, torch.float32)
            optimizer = factory(run.params.values(), weight_decay=0.1)
            bf16_weights.train(
                run,
                optimizer,
                text.train,
                seed=seed,
                steps=steps,
                lr=lambda step: bf16_weights.schedule(lr, step, steps),
            )
            loss = bf16_weights.validation_loss(run, text.validation)
            yield name, "GPT", seed, steps, "validation loss", loss if math.isfinite(loss) else math.inf


def decades(steps: int = 800, seeds: Iterable[int] = range(4), width: int = 128) -> Iterator[Figure]:
    """An MLP whose inputs span four decades: the test error over the target's variance, by AdamW's own options.

    The gradients of a row of its first layer span as much, within one block.
    """
    from memkern.optim import AdamW

    ways: dict[str, dict[str, Any]] = {
        "32 bits": {},
        "both 8 bits": {"state_bits": 8},
        "m 8 bits, sqrt(v) 4": {"state_bits": (8, 4)},
        "m 8 bits, sqrt(v) 4, blocks of 64": {"state_bits": (8, 4), "block_size": 64},
    }
    for seed, (name, options) in itertools.product(seeds, ways.items()):
        torch.manual_seed(seed)
        scale = 10 ** (-4 * torch.rand(width))
        first = torch.nn.Linear(width, 64)
        target = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(64, 8)).requires_grad_(False)
        first.weight.mul_(2.0)
        hidden = [
            torch.nn.Linear(width, width),
            torch.nn.GELU(),
            torch.nn.Linear(width, width),
            torch.nn.GELU(),
        ]
        model = torch.nn.Sequential(*hidden, torch.nn.Linear(width, 8))
        optimizer = AdamW(model.parameters(), weight_decay=0.0, **options)
        for step in range(steps):
            z = torch.randn(64, width)
            cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
            optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 100) * cosine
            optimizer.zero_grad()
            (model(z * scale) - target(z)).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            z = torch.randn(4096, width)
            y = target(z)
            error = (model(z * scale) - y).square().mean() / y.var()
        yield name, "MLP, inputs of four decades", seed, steps, "error / variance", error.item()


PARTS: dict[str, Callable[[], Iterator[Figure]]] = {
    "closed-loop": closed_loop,
    "training": training,
    "decades": decades,
}


def main(argv: list[str] | None = None) -> None:
    bf16_weights.run_part("second_moment", __doc__, PARTS, COLUMNS, argv)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
