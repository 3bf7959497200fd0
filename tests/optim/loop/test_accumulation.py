"""memkern.optim.accumulate: bf16 gradients of micro-batches, added with stochastic rounding."""

import gc
import warnings
from weakref import ref

import pytest
import torch

from memkern import optim
from memkern.optim import accumulation
from memkern.optim.accumulation import ERROR_DTYPE, add_
from tests.support.helpers import assert_same, like, over_layouts, tensor

BF16 = torch.bfloat16


def summed(model: torch.nn.Module, x: torch.Tensor, micro_batches: int) -> list[torch.Tensor]:
    model.zero_grad()
    for part in x.chunk(micro_batches):
        model(part).square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("storage", ERROR_DTYPE)
def test_small_gradients_are_not_lost(storage: str) -> None:
    p = torch.nn.Parameter(torch.zeros(64, 128, dtype=BF16))
    model = torch.nn.ParameterList([p])
    handle = optim.accumulate(model, storage)
    p.sum().backward()
    for _ in range(200):
        (p.sum() * 2**-10).backward()
    assert abs(p.grad.double().mean().item() - (1 + 200 * 2**-10)) < 5e-3
    handle.remove()
    before = p.grad.clone()
    for _ in range(200):
        (p.sum() * 2**-10).backward()
    assert_same(p.grad, before)  # to the nearest they are


@pytest.mark.parametrize(("storage", "limit"), [("stochastic", 0.02), ("bf16+8", 2e-3), ("bf16+16", 2e-3)])
def test_runs_repeat_and_sums_are_close(storage: str, limit: float) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16)).to(BF16)
    x = torch.randn(256, 32).to(BF16)
    exact = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
    for part in x.chunk(64):
        for total, g in zip(exact, summed(model, part, 1), strict=True):
            total += g
    with optim.accumulate(model, storage):
        first = summed(model, x, 64)
    with optim.accumulate(model, storage) as handle:
        handle.restart(0)  # else it goes on
        assert_same(summed(model, x, 64), first)
    plain = summed(model, x, 64)
    for total, ours, theirs in zip(exact, first, plain, strict=True):
        error = [((g.float() - total).norm() / total.norm()).item() for g in (ours, theirs)]
        assert error[0] < limit  # the sum itself is bf16: half a unit in the last place is 2^-9
        assert error[0] < 2 * error[1]


@pytest.mark.parametrize("storage", ERROR_DTYPE)
def test_a_sum_that_is_zeroed_through_its_data(storage: str) -> None:
    """Which no version tells: the error that is left belongs to no sum of 0."""
    p = torch.nn.Parameter(torch.zeros(64, 128, dtype=BF16))
    with optim.accumulate(torch.nn.ParameterList([p]), storage):
        for step in range(5):
            (p * like(p, step)).sum().backward()
        p.grad.data.zero_()
        (p * 0.5).sum().backward()
    assert_same(p.grad, torch.full_like(p, 0.5))


def test_what_does_not_accumulate_is_left_alone() -> None:
    model = torch.nn.Linear(8, 8).to(BF16)
    other = torch.nn.Linear(8, 8)
    both = torch.nn.Sequential(model, other)
    x = torch.ones(4, 8, dtype=BF16)
    with optim.accumulate(both):
        loss = model(x).square().sum()
        (g,) = torch.autograd.grad(loss, [model.weight], retain_graph=True)
        assert model.weight.grad is None
        loss.backward(retain_graph=True)
        assert_same(model.weight.grad, g)  # the first is taken as it is
        kept = model.weight.grad
        torch.autograd.grad(loss, [model.weight], retain_graph=True)
        assert model.weight.grad is kept
        loss.backward()
        assert model.weight.grad is kept  # in place
        model.zero_grad(set_to_none=False)
        model(x).square().sum().backward()
        assert_same(model.weight.grad, g)
    assert other.weight.grad is None


@over_layouts
def test_every_layout(layout: str) -> None:
    total, x = tensor(layout, BF16), like(tensor(layout), 1)
    exact = total.float() + x
    add_(total, x, "stochastic", 7)
    assert total.stride() == tensor(layout, BF16).stride()
    below, above = exact.abs() * (1 - 2**-7) - 1e-38, exact.abs() * (1 + 2**-7) + 1e-38
    assert ((total.abs().float() >= below) & (total.abs().float() <= above)).all()


@over_layouts
@pytest.mark.parametrize("storage", ERROR_DTYPE)
def test_pieces_have_the_bits_of_the_whole(layout: str, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def added(piece: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        monkeypatch.setattr(accumulation, "PIECE", piece)
        total, x = tensor(layout, BF16), like(tensor(layout), 1)
        dtype = ERROR_DTYPE[storage]
        error = None if dtype is None else torch.ones_like(total, dtype=dtype)
        add_(total, x, storage, 7, error)
        return total, error

    assert_same(added(1), added(2**30))


def test_a_count_repeats_the_random_bits() -> None:
    p = torch.nn.Parameter(torch.zeros(300, dtype=BF16))
    handle = optim.accumulate(torch.nn.ParameterList([p]))
    found = []
    for count in (5, 6, 5):
        p.grad = None
        handle.restart(count)
        for scale in (1, 2**-10):
            (p.sum() * scale).backward()
        found.append(p.grad)
    assert_same(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_what_is_not_finite() -> None:
    total, x = torch.zeros(6, dtype=BF16), torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, 0.0, -0.0])
    add_(total, x, "stochastic", 1)
    assert total[:2].tolist() == [torch.inf, -torch.inf]
    assert total[2].isnan()
    assert total[3] > 2.9e38
    assert (total[4:] == 0).all()


def test_a_sum_that_something_else_changed_goes_on_from_there() -> None:
    p = torch.nn.Parameter(torch.zeros(64, dtype=BF16))
    with optim.accumulate(torch.nn.ParameterList([p]), "bf16+16"):
        p.sum().backward()
        (p.sum() * 2**-10).backward()  # kept beside the sum, which is still 1
        assert (p.grad == 1).all()
        p.grad.mul_(0.5)
        (p.sum() * (2**-9 - 2**-11)).backward()  # with what was kept, halved, a tie, which rounds up
        assert (p.grad == 0.5 + 2**-8).all()
        p.grad = None
        p.sum().backward()
        (p.sum() * (2**-8 - 2**-10)).backward()  # a new sum has no error
        assert (p.grad == 1).all()


def test_errors() -> None:
    with pytest.raises(ValueError, match="storage must be one of 'stochastic', 'bf16\\+8', 'bf16\\+16', got 'fp32'"):
        optim.accumulate(torch.nn.Linear(2, 2).to(BF16), "fp32")
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        optim.accumulate([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model has no bfloat16 parameter that requires a gradient"):
        optim.accumulate(torch.nn.Linear(2, 2))
    frozen = torch.nn.Linear(2, 2).to(BF16).requires_grad_(False)
    with pytest.raises(ValueError, match="no bfloat16 parameter"):
        optim.accumulate(frozen)


def test_a_block_per_step_goes_on_counting() -> None:
    """Else each step would round every element the same way."""
    p = torch.nn.Parameter(torch.zeros(64, 128, dtype=torch.bfloat16))
    model = torch.nn.Module()
    model.register_parameter("p", p)
    g = torch.full((64, 128), 1 + 2**-7, dtype=torch.bfloat16) * 2**-3
    total = torch.zeros(64, 128, dtype=torch.float64)
    for _ in range(100):
        p.grad = None
        with optim.accumulate(model):
            for _ in range(3):
                (p * g).sum().backward()
        assert p.grad is not None
        total += p.grad.double()
    off = (total / (300 * g.double()) - 1).abs()
    assert off.max() < 2e-3  # of one rounding, 2^-9, that is the same at each step: 1.6e-3 in the mean, 4e-3 at most


def test_host_offload_with_offloaded_gradients_raises() -> None:
    model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    optimizer = optim.HostOffload(optim.AdamW8bit, model.parameters(), offload_gradients=True)
    with optim.accumulate(model):
        model(x).sum().backward()
        with pytest.raises(RuntimeError, match="leave offload_gradients False"):
            model(x).sum().backward()
    optimizer.zero_grad()
    for _ in range(2):
        model(x).sum().backward()
    optimizer.step()


def test_swapped_parameters_lose_no_gradient() -> None:
    model = torch.nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    for _ in range(2):
        with optim.accumulate(model):
            for _ in range(3):
                model.weight.sum().backward()
        assert torch.equal(model.weight.grad, torch.full_like(model.weight, 3.0))
        model.weight.grad = None
        torch.utils.swap_tensors(model.weight, torch.nn.Parameter(model.weight.detach().clone()))


def test_a_dropped_handle_is_named_and_forgotten() -> None:
    """A parameter with the address of one that is gone is another one."""
    model = torch.nn.Linear(4, 4).bfloat16()
    with pytest.warns(UserWarning, match="handle = accumulate"):
        optim.accumulate(model)
    assert not accumulation.is_active(model.weight)
    handle = optim.accumulate(model)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert accumulation.is_active(model.weight)
    gone = ref(handle)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del handle
        gc.collect()
    assert gone() is None
    assert not accumulation.is_active(model.weight)
