"""checkpoint_blocks gives the gradients of a model without it; with bits=8 those of one whose block inputs are rounded
to codes.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import memkern
from memkern.quant.blockwise import dequantize_blockwise, quantize_blockwise


class Block(nn.Module):
    """A block that returns ``returns(output)``."""

    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.returns, self.runs = nn.Linear(32, 32), returns, 0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        self.runs += 1
        x = self.linear(x).tanh()
        return self.returns(x if scale is None else x * scale)


class Net(nn.Module):
    """Calls ``call(block, x)``, which returns the next block's input, for each of its blocks but the skipped ones."""

    def __init__(
        self,
        returns: Callable[[Tensor], Any],
        call: Callable[[Block, Tensor], Tensor],
        skipped: Any = (),
        depth: int = 5,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(returns) for _ in range(depth))
        self.call, self.skipped = call, skipped

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for index, block in enumerate(self.blocks):
            if index not in self.skipped:
                x = self.call(block, x)
                total = total + x.square().mean()  # of hidden states
        return x + total


class Output(NamedTuple):
    hidden: Tensor
    attention: Any = None


def identity(x: Any) -> Any:
    return x


def plainly(block: Block, x: Tensor) -> Tensor:
    return block(x)


# name: what a block returns, and how the model calls it (Net's arguments)
FORMS: dict[str, tuple[Any, Any]] = {
    "tensor": (identity, plainly),
    "tuple": (lambda x: (x,), lambda block, x: block(x)[0]),
    "tuple with None": (lambda x: (x, None), lambda block, x: block(x)[0]),
    "two tensors": (lambda x: (x, x + 1), lambda block, x: sum(block(x)) / 2),
    "named tuple": (Output, lambda block, x: block(x).hidden),
    "dict": (lambda x: {"hidden": x}, lambda block, x: block(x)["hidden"]),
    "between": (identity, lambda block, x: block(x) + 1),
    "by name": (identity, lambda block, x: block(x=x)),
    "keyword tensor": (identity, lambda block, x: block(x, scale=x.mean(-1, keepdim=True))),
    "both by name": (identity, lambda block, x: block(scale=x.mean(-1, keepdim=True), x=x)),
    "positions": (identity, lambda block, x: block(x, x.mean(-1, keepdim=True))),
}


X = torch.randn(64, 16, 32, generator=torch.Generator().manual_seed(1))


def run_and_gradients(model: nn.Module, x: Tensor = X) -> list[Tensor]:
    """The model's output, and the gradients of its input and of its parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in (x, *model.parameters()) if p.grad is not None)]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("every", [1, 2, 9])  # 9 is more than the model's 5 blocks
@pytest.mark.parametrize("form", FORMS)
def test_a_model_computes_as_without_checkpoints(form: str, every: int) -> None:
    plain, model = Net(*FORMS[form]), Net(*FORMS[form])
    memkern.checkpoint_blocks(model, every=every)
    with pytest.raises(RuntimeError):  # a forward pass that is interrupted leaves nothing behind
        model(X[..., :31])
    for skipped in ((), (0,), (1,), (4,), (0, 1, 2, 3, 4), (1, 3)):  # as LayerDrop and an early exit do
        plain.skipped = model.skipped = skipped
        assert_same(run_and_gradients(model), run_and_gradients(plain))
    for edited in (plain, model):
        edited.skipped = ()
        edited.blocks[1] = nn.Identity() if form in ("tensor", "between") else edited.blocks[0]
        del edited.blocks[3]
    assert_same(run_and_gradients(model), run_and_gradients(plain))


class Rounded(torch.autograd.Function):
    """Quantizes and dequantizes x, as a checkpoint with bits=8 does; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return dequantize_blockwise(*quantize_blockwise(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_codes_round_the_first_argument_alone(form: str, every: int) -> None:
    """The argument is given by position or by name, and its gradient reaches what is before the block."""
    model, rounded_by_hooks = Net(*FORMS[form]), Net(*FORMS[form])
    memkern.checkpoint_blocks(model, bits=8, every=every)

    def rounds(block: nn.Module, args: Any, kwargs: Any) -> Any:
        kwargs = {name: Rounded.apply(x) if name == "x" else x for name, x in kwargs.items()}
        return tuple(Rounded.apply(x) if i == 0 else x for i, x in enumerate(args)), kwargs

    for block in rounded_by_hooks.blocks[::every]:
        block.register_forward_pre_hook(rounds, with_kwargs=True)
    assert_same(run_and_gradients(model), run_and_gradients(rounded_by_hooks))
    assert [block.runs for block in model.blocks] == [2 if i % every == 0 else 1 for i in range(5)]
    model.skipped = rounded_by_hooks.skipped = (1, 3)
    assert_same(run_and_gradients(model), run_and_gradients(rounded_by_hooks))


def checkpointed_and_plain(dtype: torch.dtype, bits: int | None) -> tuple[nn.Module, nn.Module]:
    """A model with checkpoints, and one without."""
    model, plain = (Net(identity, plainly).to(dtype) for _ in range(2))
    memkern.checkpoint_blocks(model, bits=bits)
    return model, plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_of_half_precision_inputs_give_near_gradients(dtype: torch.dtype) -> None:
    runs = [run_and_gradients(model, X.to(dtype)) for model in checkpointed_and_plain(dtype, 8)]
    for actual, expected in zip(*runs, strict=True):
        assert actual.dtype == dtype
        assert (actual - expected).norm() < 0.1 * expected.norm()


def test_float64_is_exact_and_without_gradients_nothing_is_rounded() -> None:
    model, plain = checkpointed_and_plain(torch.float64, 8)
    assert torch.equal(model(X.double()), plain(X.double()))
    model, plain = checkpointed_and_plain(torch.float32, 8)
    assert not torch.equal(model(X), plain(X))
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 4}, "bits: 4 given; allowed: None, 8"),
        ({"every": 0}, "every: 0 given; allowed: a whole number, 1 or more"),
        ({"every": 2.0}, "every: 2.0 given; allowed: a whole number, 1 or more"),
        ({"blocks": "sqrt"}, "blocks: 'sqrt' given; allowed: 'blocks', with every=2"),
    ],
    ids=str,
)
def test_refused_options_change_nothing(options: Any, message: str) -> None:
    model = Net(identity, plainly)
    with pytest.raises(memkern.OptionError, match=message):
        memkern.checkpoint_blocks(model, **options)
    assert not any("forward" in vars(block) for block in model.blocks)


def test_hooks_see_what_a_block_returns() -> None:
    plain, model = Net(identity, plainly), Net(identity, plainly)
    memkern.checkpoint_blocks(model)
    outputs: list[list[Tensor]] = []
    for each in (plain, model):
        outputs.append([])
        for block in each.blocks:
            block.register_forward_hook(lambda _, args, out, to=outputs[-1]: to.append(out.detach()))
        each(X)
    assert_same(*outputs)


@pytest.mark.parametrize("bits", [None, 8])
def test_what_checkpoints_store_moves_under_save_on_cpu(bits: Any) -> None:
    """The inputs, or their codes and scales. A checkpoint holds nothing else that a block made."""
    model = Net(identity, plainly)
    memkern.checkpoint_blocks(model, bits=bits)
    expected = run_and_gradients(model)
    with torch.autograd.graph.save_on_cpu():
        assert_same(run_and_gradients(model), expected)

    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x.clone()

    def run(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x)
        return x

    alive: list[Any] = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: alive.append(weakref.ref(args[0])))
    with torch.autograd.graph.saved_tensors_hooks(pack, identity):
        out = run(X.clone().requires_grad_())
    block_bytes = X.nbytes if bits is None else X.numel() + X.numel() // 128 * 4  # codes, fp32 scales of 128 codes each
    assert sum(x.nbytes for x in packed) == 5 * block_bytes
    packed.clear()
    gc.collect()
    assert alive[0]() is None
    out.sum().backward()


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("form", ["positions", "keyword tensor"])
def test_arguments_that_change_in_place_are_noticed(form: str, bits: Any) -> None:
    """A block that runs again with what another block's call has made of its argument has other gradients."""
    scale = torch.ones(1, 32)

    def call(block: Block, x: Tensor) -> Tensor:
        out = block(x, scale) if form == "positions" else block(x, scale=scale)
        scale.mul_(0.5)
        return out

    model = Net(identity, call)
    memkern.checkpoint_blocks(model, bits=bits)
    with pytest.raises(RuntimeError, match="an argument of Block has been changed in place"):
        run_and_gradients(model)
    assert all(p.grad is None for p in model.blocks[0].parameters())


@pytest.mark.parametrize("was_called", [False, True])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_runs_its_own_blocks(duplicate: Callable[[nn.Module], nn.Module], every: int, was_called: bool) -> None:
    """A model whose weights are averaged over steps begins as a copy."""
    model = Net(identity, plainly)
    memkern.checkpoint_blocks(model, every=every)
    if was_called:
        model(X)
    before, copied = model(X), duplicate(model)
    assert torch.equal(copied(X), before)
    model.blocks[0](X.clone().requires_grad_() * 1.0)  # a forward pass that ends after one block
    assert torch.equal(duplicate(model)(X), before)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    out, *grads = run_and_gradients(copied)
    assert torch.equal(out, torch.zeros_like(before))
    assert len(grads) > 1
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model(X), before)
