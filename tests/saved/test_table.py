"""Every row of memkern.saved.users, on benign and on hostile data; every tensor that torch's operations save."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from memkern.saved import users
from memkern.saved.session import new_session

from ..support import saved_attributes

Function = Callable[[Tensor, Tensor], Tensor]
R, W = 32, 64
INDEX = torch.arange(R).flip(0)
ATEN = torch.ops.aten


def _heads(x: Tensor) -> Tensor:
    return x.view(1, R, 4, 16).transpose(1, 2)


def _image(x: Tensor) -> Tensor:
    return x.view(1, 8, 16, 16)


def _kernel(w: Tensor) -> Tensor:
    return w.reshape(-1)[: 8 * 8 * 9].view(8, 8, 3, 3)


CODED: dict[str, Function] = {
    "AddmmBackward0": lambda x, w: torch.addmm(w[0], x, w),
    "MmBackward0": lambda x, w: x @ w,
    "BmmBackward0": lambda x, w: torch.bmm(x.view(1, R, W), w[None]),
    "BaddbmmBackward0": lambda x, w: torch.baddbmm(x[None], x[None], w[None]),
    "AddbmmBackward0": lambda x, w: torch.addbmm(x, x[None], w[None]),
    "AddmvBackward0": lambda x, w: torch.addmv(x[:, 0], x, w[0]),
    "MvBackward0": lambda x, w: x @ w[0],
    "AddrBackward0": lambda x, w: torch.addr(w, x.reshape(-1)[:W], w[0]),
    "ConvolutionBackward0": lambda x, w: F.conv2d(_image(x), _kernel(w), padding=1),
    "ScaledDotProductFlashAttentionForCpuBackward0": lambda x, w: F.scaled_dot_product_attention(
        _heads(x), _heads(x @ w), _heads(x)
    ),
    "NativeLayerNormBackward0": lambda x, w: F.layer_norm(x, (W,), w[0], w[1]),
    "NativeGroupNormBackward0": lambda x, w: F.group_norm(x.view(4, 8, W), 2),
    "NativeBatchNormBackward0": lambda x, w: F.batch_norm(x, None, None, w[0], w[1], training=True),
    "EmbeddingBackward0": lambda x, w: F.embedding(INDEX, w) * x,
    "SoftmaxBackward0": lambda x, w: x.softmax(-1),
    "SafeSoftmaxBackward0": lambda x, w: ATEN._safe_softmax(x, -1),
    "LogSoftmaxBackward0": lambda x, w: x.log_softmax(-1),
    "ReluBackward0": lambda x, w: F.relu(x),
    "SigmoidBackward0": lambda x, w: torch.sigmoid(x),
    "TanhBackward0": lambda x, w: torch.tanh(x),
    "SiluBackward0": lambda x, w: F.silu(x),
    "GeluBackward0": lambda x, w: F.gelu(x),
    "MishBackward0": lambda x, w: F.mish(x),
    "HardswishBackward0": lambda x, w: F.hardswish(x),
    "HardsigmoidBackward0": lambda x, w: F.hardsigmoid(x),
    "HardtanhBackward0": lambda x, w: F.hardtanh(x),
    "LeakyReluBackward0": lambda x, w: F.leaky_relu(x, 0.2),
    "EluBackward0": lambda x, w: F.elu(x),
    "CeluBackward0": lambda x, w: F.celu(x, 1.5),
    "SoftplusBackward0": lambda x, w: F.softplus(x),
    "GluBackward0": lambda x, w: F.glu(torch.cat((x, x @ w), -1)),
    "PowBackward0": lambda x, w: (x / 100) ** 3,
    "MulBackward0": lambda x, w: x * (x @ w),
    "AddcmulBackward0": lambda x, w: torch.addcmul(x, x, x @ w),
}
ONE_LARGE, FLAT, MEAN = "one value of 1e6", "flat blocks", "mean 100"
MASKED, LOWEST = "masks of -1e9", "masks of finfo.min"


def _data(kind: str) -> Tensor:
    x = torch.randn(R, W, generator=torch.Generator().manual_seed(3))
    mask = torch.rand(R, W, generator=torch.Generator().manual_seed(4)) < 0.3
    if kind == ONE_LARGE:
        x[3, 5] = 1e6
    elif kind == FLAT:
        x[:8] = 5.0
        x[8:16] = 0.0
    elif kind == MEAN:
        x += 100
    elif kind == MASKED:
        x.masked_fill_(mask, -1e9)
    elif kind == LOWEST:
        x.masked_fill_(mask, torch.finfo(torch.float32).min)
    return x


def _gradients(function: Function, data: Tensor, bits: int | None) -> tuple[Tensor, ...]:
    """A product comes before the operation, so that its argument may be coded, and one after it."""
    torch.manual_seed(0)
    leaves = [data.clone().requires_grad_(), torch.randn(W, W).div_(8).requires_grad_()]
    eye, last = torch.eye(W), torch.randn(R * W * 2)
    session = new_session(bits)
    session.enter()
    result: list[Tensor] = []
    try:
        y = function(leaves[0] @ eye, leaves[1])
        result.append(torch.mv(y.reshape(1, -1), last[: y.numel()]).sum())
    finally:
        session.exit(outputs=result)
    return torch.autograd.grad(result[0], leaves, allow_unused=True)


def _nodes(y: Tensor) -> Iterator[str]:
    stack = [y.grad_fn]
    while stack:
        if (node := stack.pop()) is not None:
            yield users.operation(node)
            stack += [source for source, _ in node.next_functions]


@pytest.mark.parametrize("name", CODED)
def test_benign(name: str) -> None:
    x, w = torch.randn(R, W, requires_grad=True), torch.randn(W, W, requires_grad=True)
    assert name in _nodes(CODED[name](x, w))
    assert users.USERS[name].kind in ("product", "smooth")
    expected, actual = (_gradients(CODED[name], _data(""), bits) for bits in (None, 8))
    for a, b in zip(actual, expected, strict=True):
        if b is not None:  # of hardtanh all is right but for some elements near its limits
            assert (a - b).norm() <= (0.1 if name == "HardtanhBackward0" else 0.03) * b.norm()


@pytest.mark.full
@pytest.mark.parametrize("kind", [ONE_LARGE, FLAT, MEAN, MASKED, LOWEST])
@pytest.mark.parametrize("name", CODED)
def test_hostile(name: str, kind: str) -> None:
    """Finite wherever torch is; off by no more than codes of the largest value allow."""
    expected, actual = (_gradients(CODED[name], _data(kind), bits) for bits in (None, 8))
    for a, b in zip(actual, expected, strict=True):
        if b is None:
            continue
        assert torch.equal(a.isfinite() | ~b.isfinite(), torch.ones_like(b, dtype=torch.bool))
        if kind in (FLAT, MEAN) and b.isfinite().all():
            assert (a - b).norm() <= 0.1 * b.norm() + 1e-6


def test_every_row_names_what_torch_saves() -> None:
    """A row that a new version of torch has renamed would do nothing, and the operation be exact."""
    known = {(node, attribute) for node, attribute, *_ in saved_attributes.read()}
    for name, row in users.USERS.items():
        for attribute in row.coded + row.shape:
            assert attribute == "saved_tensors" or (name, attribute) in known, (name, attribute)


@pytest.mark.full
def test_every_saved_tensor_of_torch_has_its_decision() -> None:
    """python -m tests.support.saved_attributes writes the file."""
    written = {row[:2]: row[2:5] for row in saved_attributes.read()}
    for node, attribute, *rest in saved_attributes.rows():
        assert list(written[node, attribute]) == rest


def test_the_table_covers_every_version_of_torch_that_memkern_runs_on() -> None:
    by_version: dict[str, set[tuple[str, ...]]] = {}
    for row in saved_attributes.read():
        for version in row[5].split():
            by_version.setdefault(version, set()).add(row[:2])
    assert {"2.10", "2.11", "2.12", "2.13", "2.14", "2.15"} <= by_version.keys()
    assert min(map(len, by_version.values())) > 800
    # What may be coded is saved under the same names in all of them.
    coded = {row[:2] for row in saved_attributes.read() if row[3] == "coded"}
    assert all(coded <= saved for saved in by_version.values())


def test_coded_rows_have_a_case_or_no_kernel_here() -> None:
    elsewhere = (
        *(
            "Cudnn",
            "Miopen",
            "Mps",
            "Mkldnn",
            "SlowConv",
            "ConvDepthwise",
            "ConvTbc",
            "Nnpack",
            "Convolution",
        ),
        *("ScaledDotProduct", "FusedRmsNorm", "GroupedMm", "Linear", "Matmul", "memkern.", "torch."),
    )
    coded = {name for name, row in users.USERS.items() if row.coded}
    assert {name for name in coded - set(CODED) if not name.startswith(elsewhere)} == set()


UNLISTED: dict[str, Function] = {
    "cumprod": lambda x, w: (x / 10).cumprod(-1),
    "prod": lambda x, w: (1 + x / 100).prod(-1),
    "renorm": lambda x, w: x.renorm(2, 0, 1.0),
    "hypot": lambda x, w: torch.hypot(x, x @ w),
    "logaddexp": lambda x, w: torch.logaddexp(x, x @ w),
    "erf": lambda x, w: torch.erf(x),
    "matrix_exp": lambda x, w: torch.matrix_exp((x[:, :R]) / 10),
    "svd": lambda x, w: torch.linalg.svdvals(x),
}


@pytest.mark.parametrize("name", UNLISTED)
def test_an_operation_that_is_not_in_the_table_is_exact(name: str) -> None:
    x = torch.randn(R, W, requires_grad=True)
    assert UNLISTED[name](x, torch.randn(W, W)).grad_fn.name() not in users.USERS
    expected, actual = (_gradients(UNLISTED[name], _data(""), bits) for bits in (None, 8))
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        assert b is None or name == "svd" or torch.equal(a, b) or (a - b).norm() < 0.01 * b.norm()
