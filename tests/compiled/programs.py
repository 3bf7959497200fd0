"""Random programs of torch operations, and the faults of their gradients where memkern cuts their graphs.

A program runs uncompiled first: it records there which results are too large and are scaled down. Its graph scales down
the same ones, as it cannot look at values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.partitioned import Traced

ROWS, WIDTH = 32, 64
MIN_COSINE = 0.8  # between gradients in 8 bits and exact ones: below it a large error is a fault
STEPS = 6  # operations of a program
ROUNDING = 1e-5
"""The relative error that Inductor's decompositions make in a compiled graph without memkern, too."""
NOISE_OF_CODES = 0.0046
"""Root mean square of the rounding of 8-bit codes at the largest value of a block: 1 / (127 * 3 ** .5)."""


class Program:
    """Operations chosen by a seed, on matrices of ROWS x WIDTH that need a gradient.

    has_hard_input: three programs in ten have an outlier, a large mean or equal values in x, and their errors are not
    bounded. saturated: three in ten of the others have operations of SATURATED too.
    """

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.x, self.table = normal(ROWS, WIDTH), normal(ROWS, WIDTH)
        self.weights = [normal(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(3)]
        self.scale, self.shift = 1 + 0.2 * normal(WIDTH), 0.2 * normal(WIDTH)
        self.index = torch.randint(0, ROWS, (ROWS,), generator=generator)
        self.wide = torch.randint(0, WIDTH, (ROWS, WIDTH), generator=generator)
        self.mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.3
        self.last = [normal(ROWS, WIDTH) for _ in range(3)]
        share = self.choice.random()
        if share < 0.1:
            self.x[3, 5] = 1e6
        elif share < 0.2:
            self.x += 100
        elif share < 0.3:
            self.x[:, : WIDTH // 2] = 5.0
        self.has_hard_input = share < 0.3
        self.noise, self.generator = 0.0, generator
        self.saturated = not self.has_hard_input and self.choice.random() < 0.3
        names = [*OPERATIONS, *_OFTEN, *(SATURATED if self.saturated else ())]
        self.names = [self.choice.choice(names) for _ in range(STEPS)]
        self.numbers = [self.choice.random() for _ in range(STEPS)]
        self.picks = [(self.choice.random(), self.choice.random()) for _ in range(STEPS)]
        self.scaled: dict[int, bool] = {}  # by step: whether its result is divided by 1000 (in_range)
        self.is_traced = False

    def loss(self) -> Tensor:
        pool = [self.x * 1.0, F.linear(self.x, self.weights[0])]
        for step, (name, number, picks) in enumerate(zip(self.names, self.numbers, self.picks, strict=True)):
            a, b = (pool[-1 - int(len(pool) * pick * pick)] for pick in picks)
            operation = SATURATED[name] if name in SATURATED else OPERATIONS[name]
            y = self.in_range(operation(self, a, b, number), step)
            pool.append(y if name in SATURATED else self._with_noise(y))
        return sum((x * c).mean() for x, c in zip(pool[-3:], self.last, strict=True))

    def in_range(self, y: Tensor, step: int) -> Tensor:
        """y, or y / 1000 where the mean of |y| is 1000 or more in the uncompiled run."""
        if not self.is_traced:
            self.scaled[step] = float(y.detach().abs().mean()) >= 1e3
        return y * 1e-3 if self.scaled[step] else y

    def _with_noise(self, y: Tensor) -> Tensor:
        """y plus noise that is ``self.noise`` times (|y| s)^1/2, as errors of codes are; s: the block's largest |y|."""
        if not self.noise:
            return y
        blocks = y.detach().reshape(-1, 128)
        size = (blocks.abs().amax(1, keepdim=True) * blocks.abs()).sqrt()
        return y + self.noise * (size * torch.randn(size.shape, generator=self.generator)).view_as(y)

    def traced(self) -> Traced:
        """The graph of the loss as a function of the program's tensors."""

        def loss(*tensors: Tensor) -> Tensor:
            attributes = self.__dict__.copy()
            remaining = iter(tensors)
            try:
                self.__dict__.update({name: next(remaining) for name in (*LEAVES, *CONSTANTS)}, is_traced=True)
                self.weights, self.last = [next(remaining) for _ in self.weights], [next(remaining) for _ in self.last]
                return self.loss()
            finally:
                self.__dict__.update(attributes)

        leaves = [getattr(self, name).clone().requires_grad_() for name in LEAVES]
        constants = [getattr(self, name) for name in CONSTANTS]
        weights = [w.clone().requires_grad_() for w in self.weights]
        return Traced(loss, [*leaves, *constants, *weights, *self.last])


# Names of a program's tensors: those with a gradient, beside its weights, and those without.
LEAVES, CONSTANTS = ("x", "table", "scale", "shift"), ("index", "wide", "mask")


Operation = Callable[[Program, Tensor, Tensor, float], Tensor]


def _in_place(change: Callable[[Tensor, Program, Tensor], Any]) -> Operation:
    def run(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
        y = a.clone()
        change(y, p, b)
        return y

    return run


def _sliced(y: Tensor, p: Program, b: Tensor) -> None:
    y[3:9].mul_(2.0)
    y[:, 10:20] = b[:, :10]


def _attention(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    q, k, v = (x.view(1, ROWS, 4, 16).transpose(1, 2) for x in (a / (1 + a.detach().abs().amax()), b, a))
    return F.scaled_dot_product_attention(q, k, v, is_causal=number < 0.5).transpose(1, 2).reshape(ROWS, WIDTH)


def _attention_by_hand(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    scores = (a @ b.t() / (1 + (a @ b.t()).detach().abs().amax()) * 8).masked_fill(p.mask[:, :ROWS], -1e9)
    return scores.softmax(-1) @ a


def _pooled(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    return b + (a.amax(0) if number < 0.5 else a.amin(-1, keepdim=True))


def _std(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    return (a - a.mean(-1, keepdim=True)) * (a.var(-1, keepdim=True) + 1e-3) ** -0.5


def _rms(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    return p.scale * (a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6))


def _scattered(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    reduce = "amax" if number < 0.5 else "sum"
    return b.scatter_reduce(1, p.wide, a, reduce)


def _normalized(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    return F.normalize(a, dim=-1) if number < 0.5 else a / (torch.linalg.vector_norm(a, dim=-1, keepdim=True) + 1)


def _between(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    low, high = a.amin(-1, keepdim=True), a.amax(-1, keepdim=True)
    return (a - low) / (high - low + 1e-2)


def _layer_norm(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    weight, bias = (p.scale if number < 0.7 else None), (p.shift if number > 0.3 else None)
    return F.layer_norm(a, (WIDTH,), weight, bias)


def _entropy(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    q = (a / (1 + a.detach().abs().amax()) * 10).softmax(-1)
    return b + q * (q + 1e-9).log() if number < 0.5 else b - (q + 1e-9).log()


def _masked_logarithm(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    value = -1e9 if number < 0.5 else torch.finfo(torch.float32).min
    logp = a.masked_fill(p.mask, value).log_softmax(-1)
    return b + logp.gather(1, (~p.mask).float().argmax(-1, keepdim=True))


def _near_limit(a: Tensor, number: float) -> Tensor:
    """Rows with a standard deviation of 1 and a mean of 2 to 14, where sigmoid is 1e-6 from its limit."""
    return _unit(a) + 2 + 12 * number


def _unit(a: Tensor) -> Tensor:
    return F.layer_norm(a, (WIDTH,))


def _gate(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    y = torch.sigmoid(_near_limit(a, number))
    return y * b + (1 - y) * a


def _tanh_gate(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    y = torch.tanh(_near_limit(a, number) / 2)
    return b * (1 - y * y) / (1 - y * y).detach().mean() + y * b


def _nearly_solved(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    """The losses of rows whose target is 4 to 20 above the rest, scaled to be of the same size."""
    target = p.wide[:, :1]
    logits = _unit(a).scatter_add(1, target, torch.full((ROWS, 1), 4 + 16 * number))
    loss = F.cross_entropy(logits, target[:, 0], reduction="none")[:, None]
    return b + loss / loss.detach().mean()


def _sure_attention(p: Program, a: Tensor, b: Tensor, number: float) -> Tensor:
    """Each query is its own key, whose score is up to 15 above the others."""
    q, v = (_unit(x).view(1, ROWS, 4, 16).transpose(1, 2) for x in (a, b))
    q = F.normalize(q, dim=-1) * (60 * number) ** 0.5
    return F.scaled_dot_product_attention(q, q, v).transpose(1, 2).reshape(ROWS, WIDTH)


SATURATED: dict[str, Operation] = {
    "gate": _gate,
    "tanh gate": _tanh_gate,
    "nearly solved": _nearly_solved,
    "sure attention": _sure_attention,
    "sure softmax": lambda p, a, b, n: (_unit(a) * 10 * n).softmax(-1) @ p.weights[0] + b,
}
"""Operations whose gradients are small distances from a limit: errors of codes of their results must not reach them."""

OPERATIONS: dict[str, Operation] = {  # arguments: a program, two earlier results, a random number from 0 to 1
    "silu": lambda p, a, b, n: F.silu(a),
    "gelu": lambda p, a, b, n: F.gelu(a),
    "tanh": lambda p, a, b, n: torch.tanh(a),
    "sigmoid": lambda p, a, b, n: torch.sigmoid(a),
    "relu": lambda p, a, b, n: F.relu(a),
    "leaky_relu": lambda p, a, b, n: F.leaky_relu(a, 0.2),
    "softplus": lambda p, a, b, n: F.softplus(a),
    "sin": lambda p, a, b, n: torch.sin(a),
    "exp": lambda p, a, b, n: torch.exp(-a.abs()),
    "clamp": lambda p, a, b, n: a.clamp(-1.0, n),
    "mul": lambda p, a, b, n: a * b,
    "add": lambda p, a, b, n: torch.add(a, b, alpha=n),
    "add leaf": lambda p, a, b, n: a + p.shift,
    "sub": lambda p, a, b, n: a - b,
    "div": lambda p, a, b, n: a / (b * b + 0.1),
    "square": lambda p, a, b, n: a**2,
    "sqrt": lambda p, a, b, n: (a * a + 1e-3).sqrt(),
    "log": lambda p, a, b, n: (torch.sigmoid(a) + 1e-3).log(),
    "log of tanh": lambda p, a, b, n: torch.log(1 - torch.tanh(a) ** 2 + 1e-3),
    "where": lambda p, a, b, n: torch.where(p.mask, a, b),
    "maximum": lambda p, a, b, n: torch.maximum(a, b),
    "masked_fill": lambda p, a, b, n: a.masked_fill(p.mask, 0.0),
    "view": lambda p, a, b, n: a.t().reshape(ROWS, WIDTH),
    "transposed": lambda p, a, b, n: (a.t() * p.scale[:ROWS]).t(),
    "permute": lambda p, a, b, n: a.view(ROWS, 8, 8).permute(0, 2, 1).reshape(ROWS, WIDTH),
    "split": lambda p, a, b, n: torch.cat(a.split(20, -1)[::-1], -1),
    "chunk": lambda p, a, b, n: torch.cat(list(map(torch.mul, a.chunk(2, -1), b.chunk(2, -1))), -1),
    "flip": lambda p, a, b, n: a.flip(0) * b,
    "expand": lambda p, a, b, n: a.mean(0).expand(ROWS, WIDTH) * b,
    "add_": _in_place(lambda y, p, b: y.add_(b)),
    "mul_": _in_place(lambda y, p, b: y.mul_(p.scale)),
    "relu_": _in_place(lambda y, p, b: y.relu_()),
    "masked_fill_": _in_place(lambda y, p, b: y.masked_fill_(p.mask, -1.0)),
    "slices": _in_place(_sliced),
    "bf16 and back": lambda p, a, b, n: a.bfloat16().float() * b,
    "bf16": lambda p, a, b, n: (a.bfloat16() * b.bfloat16()).float(),
    "fp64": lambda p, a, b, n: (a.double() * 1.5).float(),
    "centred": lambda p, a, b, n: a - a.mean(-1, keepdim=True),
    "sum": lambda p, a, b, n: b + 0.1 * a.sum(-1, keepdim=True),
    "cumsum": lambda p, a, b, n: 0.1 * a.cumsum(0),
    "logsumexp": lambda p, a, b, n: a - a.logsumexp(-1, keepdim=True),
    "softmax": lambda p, a, b, n: a.softmax(-1) * 8,
    "log_softmax": lambda p, a, b, n: a.log_softmax(-1),
    "index": lambda p, a, b, n: a[p.index],
    "index_select": lambda p, a, b, n: a.index_select(0, p.index) * b,
    "gather": lambda p, a, b, n: a.gather(1, p.wide),
    "embedding": lambda p, a, b, n: a * F.embedding(p.index, p.table),
    "layer_norm": _layer_norm,
    "rms_norm": _rms,
    "group_norm": lambda p, a, b, n: F.group_norm(a.view(4, 8, WIDTH), 2).view(ROWS, WIDTH) * b,
    "batch_norm": lambda p, a, b, n: F.batch_norm(a, None, None, p.scale, p.shift, training=True),
    "linear": lambda p, a, b, n: F.linear(a, p.weights[int(3 * n)], p.shift),
    "matmul": lambda p, a, b, n: a @ p.weights[int(3 * n)],
    "bmm": lambda p, a, b, n: torch.bmm(a.view(4, 8, WIDTH), p.weights[0].expand(4, -1, -1)).view(ROWS, WIDTH),
    "product": lambda p, a, b, n: (a @ b.t()) @ b / WIDTH,
    "conv1d": lambda p, a, b, n: F.conv1d(a[None], p.weights[0][:ROWS, :ROWS, None])[0] * b,
    "dropout": lambda p, a, b, n: a * (p.mask * 1.4),
    "attention": _attention,
    "attention by hand": _attention_by_hand,
    "pooled": _pooled,
    "std": _std,
    "scatter": _scattered,
    "normalized": _normalized,
    "between": _between,
    "entropy": _entropy,
    "masked logarithm": _masked_logarithm,
}


_OFTEN = ["linear", "matmul", "layer_norm", "rms_norm", "attention", "mul", "gelu", "silu", "view"] * 3


def gradients(program: Program, noise: float = 0.0, noise_of_results: float = 0.0) -> Tensor:
    """All leaves' gradients without a compiler as one fp64 vector.

    noise: relative, on leaves; noise_of_results: on each step's result.
    """
    attributes = program.__dict__.copy()
    generator = torch.Generator().manual_seed(0)

    def leaf(x: Tensor) -> Tensor:
        return (x + noise * torch.randn(x.shape, generator=generator) * x.abs()).requires_grad_()

    leaves = {name: leaf(attributes[name]) for name in LEAVES}
    weights = [leaf(w) for w in attributes["weights"]]
    try:
        program.__dict__.update(leaves, weights=weights, noise=noise_of_results, generator=generator)
        tensors = [*leaves.values(), *weights]
        grads = torch.autograd.grad(program.loss(), tensors, allow_unused=True)
    finally:
        program.__dict__.update(attributes)
    return flat(tensors, grads)


def flat(tensors: list[Tensor], gradients: Iterable[Tensor | None]) -> Tensor:
    """The gradients of tensors that need one as an fp64 vector; zeros for None."""
    pairs = [(x, g) for x, g in zip(tensors, gradients, strict=True) if x.requires_grad]
    return torch.cat([(torch.zeros_like(x) if g is None else g).flatten().double() for x, g in pairs])


def relative_error_allowing_zero(actual: Tensor, expected: Tensor) -> float:
    """The 2-norm of the error in shares of the 2-norm of ``expected``, which may be 0: then 0 for 0, else large."""
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def faults_in_codes(program: Program, coded: Tensor, expected: Tensor, plain: Tensor) -> list[str]:
    """Faults of gradients from 8-bit codes, [] if there is none. plain: gradients of torch without a compiler.

    An error above 5 % is a fault where it is more than twice what noise as large makes of torch's own gradients.
    """
    if not coded.isfinite().all():
        return ["not finite"]
    error = relative_error_allowing_zero(coded, expected)
    if error <= 0.05 or program.has_hard_input:
        return []
    sensitivity = max(
        *(relative_error_allowing_zero(gradients(program, noise=share), plain) for share in (0.003, 0.01)),
        relative_error_allowing_zero(gradients(program, noise_of_results=NOISE_OF_CODES), plain),
    )
    cosine = float(coded @ expected / (coded.norm() * expected.norm()))
    if error > 2 * sensitivity and (program.saturated or cosine < MIN_COSINE):
        return [f"8 bits off by {error:.1e}, cosine {cosine:.2f}, sensitivity {sensitivity:.1e}"]
    return []


def faults_of(seed: int) -> str:
    """The faults of a random program's gradients, compared with the gradients by torch's own partitioner; "" for none.

    The error of "exact" may be 8 times the error that torch's own partitioner makes against the uncompiled run.
    """
    program = Program(seed)
    torch.manual_seed(seed)
    plain = gradients(program)
    if not plain.isfinite().all():
        return ""
    traced = program.traced()
    expected, exact, coded = (flat([*traced.inputs], traced.gradients(bits)) for bits in (None, "exact", 8))
    faults = []
    error = relative_error_allowing_zero(exact, expected)
    if error > max(ROUNDING, 8 * relative_error_allowing_zero(expected, plain)):
        faults.append(f"exact off by {error:.1e}")
    faults += faults_in_codes(program, coded, expected, plain)
    return ", ".join(faults)
