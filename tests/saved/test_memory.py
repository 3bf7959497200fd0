"""memkern.memory against counts by hand."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from memkern import memory, optim

KB = 1024


def test_optimizer_bytes_of_torch_adamw() -> None:
    parameters = [nn.Parameter(torch.zeros(7, 5)), nn.Parameter(torch.zeros(11))]
    optimizer = torch.optim.AdamW(parameters)
    assert memory.optimizer_bytes(optimizer) == 0
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert memory.optimizer_bytes(optimizer) == 2 * 4 * (35 + 11) + 2 * 4  # moments, and a step each


def test_optimizer_bytes_of_8_bit_states() -> None:
    parameter = nn.Parameter(torch.zeros(64, 256))
    parameter.grad = torch.ones_like(parameter)
    optimizer = optim.AdamW8bit([parameter])
    optimizer.step()
    codes, scales = 2 * 64 * 256, 2 * 4 * 64 * 2
    assert codes + scales <= memory.optimizer_bytes(optimizer) <= codes + scales + 64


def test_a_shared_storage_counts_once() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter])
    buffer = torch.zeros(100)
    optimizer.state[parameter] = {"first": buffer[:4], "rest": [buffer[4:], "no tensor", 3]}
    assert memory.optimizer_bytes(optimizer) == 400


def test_peak_follows_allocations_and_frees() -> None:
    x = torch.zeros(256)  # 1 KiB

    def chain() -> None:
        a = x + 1  # 2 KiB live with x
        b = a + 1  # 3
        b += 1  # in place
        view = b[3:].view(-1)
        del a
        c = view + 1  # 3, and 12 bytes less
        torch.cat([c, c])  # 5, and 36 bytes less

    assert memory.peak_bytes(chain, x) == 5 * KB - 3 * 3 * 4


def test_what_is_held_counts_and_what_others_hold_does_not() -> None:
    held = torch.zeros(KB)
    x = torch.zeros(256)
    assert memory.peak_bytes(lambda: x.view(2, 128) + 1) == KB
    assert memory.peak_bytes(lambda: x.view(2, 128) + 1, x) == 2 * KB
    assert memory.peak_bytes(lambda: x.view(2, 128) + 1, x, held, held[:5]) == 6 * KB


def test_peak_of_a_backward_pass() -> None:
    B, I, H = 64, 128, 256  # noqa: E741
    x, w = torch.randn(B, I), nn.Parameter(torch.randn(I, H))
    held, activation, gradient = 4 * (B * I + I * H), 4 * B * H, 4 * I * H
    assert gradient > activation
    peak = memory.peak_bytes(lambda: torch.relu(x @ w).sum().backward(), x, w)
    # At the weight gradient relu's output is gone, and the loss and its gradient are left.
    assert peak == held + activation + gradient + 8


def test_peak_of_a_module_and_its_optimizer() -> None:
    model = nn.Linear(100, 50)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    size = 4 * (100 * 50 + 50)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    state = 2 * size + 2 * 4
    assert memory.peak_bytes(lambda: None, model, optimizer) == 2 * size + state
    # A gradient that the call drops makes room for its successor.
    drop = lambda: (optimizer.zero_grad(), torch.empty(100 * 50 + 50))  # noqa: E731
    assert memory.peak_bytes(drop, model, optimizer) == 2 * size + state


@pytest.mark.parametrize("build", [optim.AdamW8bit, torch.optim.AdamW])
def test_measuring_changes_no_bit(build: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    x = torch.randn(16, 64)
    runs = []
    for measured in (False, True):
        model_copy = copy.deepcopy(model)
        optimizer = build(model_copy.parameters(), lr=1e-2)

        def step(model_copy: nn.Module = model_copy, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model_copy(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            if measured:
                assert memory.peak_bytes(step, model_copy, optimizer) > 0
            else:
                step()
        runs.append(list(model_copy.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# What a forward pass keeps for its backward

N, WIDTH = 48, 64
ROWS = 4 * N * WIDTH  # bytes of a tensor of that shape


class Scale(torch.autograd.Function):
    """Keeps one tensor where autograd sees it and one where it does not."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x.new_ones(10))
        ctx.hidden = x.new_ones(1000)
        return 2 * x

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return 2 * g


CASES = {
    "linear: its input": (lambda x: nn.Linear(WIDTH, 3 * WIDTH)(x), ROWS),
    "exp: its output": (lambda x: x.exp(), ROWS),
    "two that keep one input": (lambda x: nn.functional.gelu(x) + x.square(), ROWS),
    "views of one storage": (lambda x: x[:, :8].square().sum() + x.t()[3:].square().sum(), ROWS),
    "a part keeps the whole storage": (lambda x: (x * 1)[:, 0].square(), ROWS),
    "input and output": (lambda x: nn.functional.gelu(x).exp(), 2 * ROWS),
    "one that is freed on the way": (lambda x: ((x + 1).square() + 1).square(), 2 * ROWS),
    "nothing": (lambda x: x + 1, 0),
    "a custom Function": (Scale.apply, 40),
    "layer norm: input, mean, inverse deviation": (lambda x: nn.LayerNorm(WIDTH)(x), ROWS + 8 * N),
    "autocast: the casts": (
        lambda x: torch.autocast("cpu", torch.bfloat16)(nn.Linear(WIDTH, WIDTH))(x),
        ROWS // 2 + 2 * WIDTH * WIDTH,
    ),
    "a product of parameters' transposes": (
        lambda x: torch.addmm(x, x, nn.Parameter(torch.ones(WIDTH, WIDTH)).t()),
        ROWS,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_saved_bytes(case: str) -> None:
    forward, expected = CASES[case]
    x = torch.randn(N, WIDTH, requires_grad=True)
    assert memory.saved_bytes(lambda: forward(x)) == expected


def test_saved_bytes_leaves_out_what_is_held() -> None:
    x = torch.randn(N, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    assert memory.saved_bytes(lambda: model(x)) == 2 * ROWS
    assert memory.saved_bytes(lambda: model(x), x) == ROWS
    # Where the graph hangs on a detached weight only the module tells that it is one.
    product = lambda: x.requires_grad_() @ model[0].weight.detach()  # noqa: E731
    assert memory.saved_bytes(product, x) == 4 * WIDTH * WIDTH
    assert memory.saved_bytes(product, x, model) == 0


def test_saved_bytes_of_no_graph() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(N, WIDTH)
    with torch.no_grad():
        assert memory.saved_bytes(lambda: model(x)) == 0
    assert memory.saved_bytes(lambda: None) == 0


def test_saved_bytes_of_a_checkpointed_part() -> None:
    x = torch.randn(N, WIDTH, requires_grad=True)
    part = nn.Sequential(*(nn.Linear(WIDTH, WIDTH), nn.Tanh()) * 3)
    again = lambda: torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)  # noqa: E731
    assert memory.saved_bytes(again) == ROWS
    assert memory.saved_bytes(lambda: part(x)) == 4 * ROWS


def test_counting_saved_bytes_changes_no_bit() -> None:
    x, model = torch.randn(N, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3))
    gradients, out = [], []
    for measured in (False, True):
        torch.manual_seed(0)
        forward = lambda: out.append(model(x).square().sum())  # noqa: E731
        memory.saved_bytes(forward) if measured else forward()
        model.zero_grad()
        out[-1].backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert torch.equal(*out)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.gpu
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_peak_on_cuda_leaves_out_what_others_hold() -> None:
    others = torch.zeros(1 << 20, device="cuda")
    x = torch.zeros(1 << 20, device="cuda")
    assert memory.peak_bytes(lambda: x + 1, x) == 2 * x.nbytes
    del others


def test_counting_keeps_nothing_that_backward_frees() -> None:
    """A part of the graph that has run is freed, though the rest of it lives on."""
    x = torch.ones(1000, requires_grad=True)
    kept: list[torch.Tensor] = []

    def forward() -> None:
        a = x.exp()
        kept.extend([a.sin().sum(), x.cos().sum()])

    memory.saved_bytes(forward)
    first, second = kept
    storage = StorageWeakRef(first.grad_fn.next_functions[0][0]._saved_self.untyped_storage())  # type: ignore[union-attr]
    assert not storage.expired()
    first.backward()
    assert storage.expired()
    second.backward()
