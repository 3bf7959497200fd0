"""memkern.functional.swiglu and geglu, and the gated units that compress makes of models' MLPs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memkern
from memkern import functional, memory
from memkern.swap import gated

KINDS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "swiglu": (functional.swiglu, F.silu),
    "geglu": (functional.geglu, F.gelu),
    "geglu tanh": (
        lambda *t: functional.geglu(*t, approximate="tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("joined", [True, False])
def test_bits_of_torch(kind: str, dtype: torch.dtype, joined: bool) -> None:
    ours, act = KINDS[kind]
    both = torch.randn(33, 2 * 17, requires_grad=True)
    weight = torch.randn(33, 17)
    results = []
    for function in (
        lambda g, u: act(g) * u,
        lambda g, u: ours(torch.cat((g, u), -1)) if joined else ours(g, u),
    ):
        gate, up = both.to(dtype).chunk(2, -1)
        y = function(gate, up)
        results += [y, *torch.autograd.grad((y * weight).sum(), both)]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


def test_bytes() -> None:
    both, up, down = torch.randn(256, 128), nn.Linear(128, 128), nn.Linear(64, 64)

    def saved(forward: Callable[[Tensor], Tensor]) -> float:
        return memory.saved_bytes(lambda: down(forward(up(both))), up, down, both) / (256 * 64)

    assert saved(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]) == 16
    assert saved(functional.swiglu) == 12  # gate, up, and down's input
    with torch.no_grad():
        assert memory.saved_bytes(lambda: functional.swiglu(both)) == 0

    def compressed() -> Tensor:
        with memkern.quantize_saved(8):
            return down(functional.swiglu(up(both)))

    assert memory.saved_bytes(compressed, up, down, both) / (256 * 64) == 2 * (1 + 4 / 128)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind: str) -> None:
    ours, _ = KINDS[kind]
    gate, up = (torch.randn(2, 3, dtype=torch.double, requires_grad=True) for _ in range(2))
    torch.autograd.gradcheck(ours, (gate, up))
    torch.autograd.gradgradcheck(ours, (torch.cat((gate, up), -1).detach().requires_grad_(),))
    for frozen in (0, 1):
        pair = [gate, up]
        pair[frozen] = pair[frozen].detach()
        torch.autograd.gradcheck(ours, tuple(pair))


def test_one_graph() -> None:
    x = torch.randn(8, 64, requires_grad=True)
    compiled = torch.compile(functional.swiglu, fullgraph=True, backend="aot_eager")
    a = torch.autograd.grad(compiled(x).sum(), x)[0]
    assert torch.equal(a, torch.autograd.grad(functional.swiglu(x).sum(), x)[0])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: functional.swiglu(torch.ones(2, 3)), ValueError, r"an even number; got \(2, 3\)"),
        (lambda: functional.swiglu(torch.ones(())), ValueError, "gate must hold"),
        (
            lambda: functional.geglu(torch.ones(2), torch.ones(3)),
            ValueError,
            "up must have the shape of gate",
        ),
        (lambda: functional.swiglu(torch.ones(2), torch.ones(2).half()), TypeError, "up must have the dtype"),
        (lambda: functional.geglu(torch.ones(2), approximate="x"), ValueError, "approximate must be"),
    ],
)
def test_bad_input(call: Callable[[], Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# ---- in models


class Phi3MLP(nn.Module):
    """As transformers writes it."""

    def __init__(self, act: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 8 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)
        self.activation_fn = act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class Other(Phi3MLP):
    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


def run(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))]


@pytest.mark.parametrize(
    "act",
    [
        nn.SiLU,
        pytest.param(nn.GELU, marks=pytest.mark.full),
        pytest.param(lambda: nn.GELU("tanh"), marks=pytest.mark.full),
    ],
)
def test_a_phi3_mlp_becomes_gated(act: Any) -> None:
    model, x = Phi3MLP(act()), torch.randn(2, 64, 32)
    expected = run(model, x)
    report = memkern.compress(model, example=x)
    assert [(swap.was, swap.before, swap.after) for swap in report.swapped] == [("Phi3MLP", 12, 8)]
    assert report.after.total < report.before.total
    assert report.bytes_per_token == 4 * 4 * 32
    assert type(model.activation_fn) is type(act())
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, run(other, x), expected))
    assert not memkern.compress(model).swapped
    assert memkern.restore(model) == 1
    assert type(model) is Phi3MLP
    assert all(map(torch.equal, run(model, x), expected))


def test_where_the_rules_see_through_it_stays() -> None:
    model = Phi3MLP(nn.SiLU())
    memkern.compress(model)
    assert type(model) is not Phi3MLP
    memkern.compress(model, saved_bits=8)
    assert (type(model), type(model.activation_fn)) == (Phi3MLP, nn.SiLU)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_finding_a_gated_unit_runs_and_changes_nothing(device: str) -> None:
    model, called = Phi3MLP(nn.SiLU()).to(device), []
    for child in (model.gate_up_proj, model.down_proj):
        child.register_forward_hook(lambda *_: called.append(1))
    before = {name: copy.copy(value) for name, value in vars(model).items()}
    assert gated.find_gated_unit(Phi3MLP, model) is not None
    assert vars(model) == before
    assert not called


class Clamped(Phi3MLP):
    """Differs from the unit on large inputs alone."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up.clamp(-7, 7) * self.activation_fn(gate.clamp(max=7)))


class WithDropout(Phi3MLP):
    """Differs from the unit in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.dropout(up * self.activation_fn(gate), 0.5, self.training))


class InHalf(Phi3MLP):
    """Rounds otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj((up.bfloat16() * self.activation_fn(gate.bfloat16())).to(x.dtype))


class WithHook(Phi3MLP):
    """Its activation is not called plainly."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__(act)
        act.register_forward_hook(lambda module, args, y: 2 * y)


class OfTanh(Phi3MLP):
    def __init__(self, act: nn.Module) -> None:
        super().__init__(nn.Tanh())


@pytest.mark.parametrize("cls", [Other, Clamped, WithDropout, InHalf, WithHook, OfTanh])
def test_what_only_looks_like_it_is_left_alone(cls: type[Phi3MLP]) -> None:
    """Also where every probe gives the same, as the weights are 0 when it is compressed."""
    model = cls(nn.SiLU())
    state = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        nn.init.zeros_(p)
    memkern.compress(model.eval())
    assert type(model) is cls
    model.load_state_dict(state)
    x, results = 20 * torch.randn(2, 64, 32), []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(model.train()(x))
        memkern.restore(model)
    assert torch.equal(*results)


@pytest.mark.full
def test_mixtral_s_experts() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    batch = {"input_ids": torch.randint(0, 50, (1, 128)), "use_cache": False}

    def grads() -> list[Tensor]:
        model.zero_grad()
        model(**batch).logits.square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = grads()
    report = memkern.compress(model, example=batch)
    assert [swap.was for swap in report.swapped] == ["MixtralExperts"]
    assert report.after.total < report.before.total
    assert all(map(torch.equal, grads(), expected))
    assert memkern.restore(model) == 1
    assert all(map(torch.equal, grads(), expected))
