"""memkern.graphed, with a stand-in on the CPU for CUDA's graphs (tests/support/recorded_graphs.py)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkern
from tests.support.helpers import first_full
from tests.support.recorded_graphs import recorded

WIDTH, BATCH = 64, 32


def make(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    norm, up, down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(norm, up, nn.GELU(), nn.Dropout(0.1), down, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8))


@pytest.fixture
def on_cpu() -> Any:
    with recorded() as graphs:
        yield graphs


def inputs(seed: int = 0, rows: int = BATCH) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def losses(model: nn.Module, call: nn.Module, steps: int = 4) -> list[float]:
    """Of a loop with accumulation, whose gradients are zeroed in both ways."""
    optimizer = memkern.optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=0)
    torch.manual_seed(3)
    found = []
    for i in range(steps):
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        for half in range(2):
            loss = call(inputs(2 * i + half)).square().mean() / 2
            loss.backward()
            found.append(loss.item())
        optimizer.step()
    return found


MODES: dict[str, dict[str, Any]] = {
    "activations": {"activations": 3},
    "exact": {"saved_bits": "exact"},
    "8 bits": {"saved_bits": 8},
    "both": {"activations": 3, "saved_bits": 8},
    "randomized": {"linear": 0.5, "saved_bits": 8},
}


@pytest.mark.parametrize("mode", [None, *MODES])
def test_every_bit_of_a_training_loop(on_cpu: Any, mode: str | None) -> None:
    plain, model = make(), make()
    for each in (plain, model):
        if mode not in (None, "activations", "exact"):  # how BatchNorm's input is coded depends on values on a CPU
            each[5] = nn.Identity()
        if mode is not None:
            memkern.compress(each, **MODES[mode])
    before = torch.get_rng_state()
    graphed = memkern.graphed(model, (inputs(),))
    assert torch.equal(torch.get_rng_state(), before)
    assert losses(model, graphed) == losses(plain, plain)
    for (name, a), e in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, e), name
    assert len(on_cpu) == 2
    assert all(graph.calls for graph in on_cpu)


def test_codes_are_in_the_graph(on_cpu: Any) -> None:
    model = make()
    memkern.compress(model, saved_bits=8)
    memkern.graphed(model, (inputs(),))
    ops = [{func.name() for func, *_ in graph.calls} for graph in on_cpu]
    assert "memkern::quantize_with_norms" in ops[0]  # on a device, quantize_blockwise
    assert "memkern::few_bit_encode" in ops[0]


class Named(nn.Module):
    """Arguments by name, constants, a dictionary as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make()

    def forward(self, x: Tensor, *, scale: float = 1.0, target: Tensor | None = None) -> dict[str, Any]:
        y = self.inner(x) * scale
        return {"y": y, "loss": None if target is None else (y - target).square().mean(), "scale": scale}


def test_names_constants_and_structures(on_cpu: Any) -> None:
    plain, model = Named(), Named()
    graphed = memkern.graphed(model, (inputs(),), {"scale": 2.0, "target": torch.zeros(BATCH, 8)})
    target = torch.randn(BATCH, 8)
    results = []
    for call in (graphed, plain):
        torch.manual_seed(0)
        results.append(call(inputs(1), scale=2.0, target=target))
    actual, expected = results
    assert actual["scale"] == 2.0
    assert torch.equal(actual["loss"], expected["loss"])
    assert torch.equal(actual["y"], expected["y"])


def test_a_kept_loss_does_not_change(on_cpu: Any) -> None:
    model = Named()
    graphed = memkern.graphed(model, (inputs(),), {"target": torch.zeros(BATCH, 8)})
    kept = [graphed(inputs(i), target=torch.zeros(BATCH, 8))["loss"] for i in range(3)]
    assert len({x.item() for x in kept}) == 3


def test_gradients_of_inputs(on_cpu: Any) -> None:
    plain, model = make(), make()
    graphed = memkern.graphed(model, (inputs().requires_grad_(),))
    found = []
    for call in (graphed, plain):
        x = inputs(1).requires_grad_()
        torch.manual_seed(0)
        call(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def frozen(model: nn.Module) -> None:
    model[1].weight.requires_grad_(False)


def replaced(model: nn.Module) -> None:
    model[1].weight = nn.Parameter(torch.randn(4 * WIDTH, WIDTH))


def moved(model: nn.Module) -> None:
    model[1].weight.data = torch.randn(4 * WIDTH, WIDTH)


def new_statistics(model: nn.Module) -> None:
    model[5].running_mean = torch.ones(WIDTH)


@pytest.mark.parametrize("change", [frozen, replaced, moved, new_statistics])
def test_changed_weights_are_seen(on_cpu: Any, change: Any) -> None:
    model = make()
    graphed = memkern.graphed(model, (inputs(),))
    change(model)
    torch.manual_seed(0)
    expected = model(inputs(1))
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="runs without its graph: .* since the capture; capture again"):
        assert torch.equal(graphed(inputs(1)), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        graphed(inputs(1))


@pytest.mark.parametrize("x", [inputs(1, 7), inputs(1, 1), inputs(1).double().float().requires_grad_()])
def test_another_call_runs_the_module(on_cpu: Any, x: Tensor) -> None:
    """The last batch of an epoch. One row would be copied into all of the captured ones."""
    plain, model = make(), make()
    for each in (plain, model):
        each[5] = nn.Identity()
    graphed = memkern.graphed(model, (inputs(),))
    torch.manual_seed(0)
    expected = plain(x)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="shapes, dtypes, constants or structure"):
        actual = graphed(x)
    assert torch.equal(actual, expected)


def test_autocast_is_part_of_what_is_captured(on_cpu: Any) -> None:
    model = make()
    with torch.autocast("cpu", torch.bfloat16):
        graphed = memkern.graphed(model, (inputs(),))
        assert torch.is_autocast_cache_enabled()
        assert graphed(inputs(1)).dtype == torch.bfloat16
    with pytest.warns(UserWarning, match="autocast state"):
        assert graphed(inputs(1)).dtype == torch.float32


def test_evaluation_runs_the_module(on_cpu: Any) -> None:
    model = make()
    graphed = memkern.graphed(model, (inputs(),))
    graphed.eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert torch.equal(graphed(inputs(1)), model(inputs(1)))
        assert graphed(inputs(1, 5)).shape == (5, 8)
    graphed.train()
    model[3].eval()
    assert torch.equal(graphed(inputs(1)), model(inputs(1)))  # no dropout


def test_one_backward_pass_for_each_forward_pass(on_cpu: Any) -> None:
    graphed = memkern.graphed(make(), (inputs(),))
    first, second = graphed(inputs(1)), graphed(inputs(2))
    with pytest.raises(RuntimeError, match="of an earlier forward pass"):
        first.sum().backward()
    second.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="or the second one"):
        second.sum().backward()
    with torch.no_grad():
        third = graphed(inputs(3))
    assert not third.requires_grad


class Cached(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        return x * 2, object()


class Refusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        raise RuntimeError("no")


def test_a_failed_capture_leaves_the_module_as_it_was(on_cpu: Any) -> None:
    module, before = Refusing(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="no"):
        memkern.graphed(module, (inputs(),))
    assert module.seen == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_autocast_cache_enabled()


def hooked() -> nn.Module:
    model = make()
    model[1].weight.register_hook(lambda grad: grad * 2)
    return model


def offloading() -> nn.Module:
    model = make()
    memkern.compress(model, saved_bits="exact", offload=True)
    return model


@pytest.mark.parametrize(
    ("module", "args", "error", "match"),
    [
        (torch.relu, (inputs(),), TypeError, "module must be an nn.Module, got"),
        (make(), (object(),), TypeError, "sample_args must have tensors and constants alone, got object"),
        (Cached(), (inputs(),), TypeError, "must return tensors and constants alone, got object"),
        (hooked(), (inputs(),), ValueError, "must not have hooks on their gradients yet, got one on 1.weight"),
        (offloading(), (inputs(),), ValueError, "must not offload what it saves"),
        (make(), (inputs().to("meta"),), ValueError, "sample_args must have CPU tensors alone, got one on meta"),
        (
            make().to("meta"),
            (inputs(),),
            ValueError,
            "must have plain CPU tensors alone, got 0.weight, a Parameter on meta",
        ),
    ],
)
def test_refused(on_cpu: Any, module: Any, args: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        memkern.graphed(module, args)


def test_only_on_cuda() -> None:
    with pytest.raises(
        ValueError, match=r"module must have plain CUDA tensors alone, got 0\.weight, a Parameter on cpu"
    ):
        memkern.graphed(make(), (inputs(),))


@pytest.mark.full
@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("name", first_full(["GPT-2", "ViT", "Llama", "BERT"], 2))
def test_models_of_transformers(on_cpu: Any, name: str, bits: Any) -> None:
    pytest.importorskip("transformers")
    from tests.support import zoo

    plain, model, batch = zoo.build(name, 32), zoo.build(name, 32), zoo.batch(name, 32)
    for each in (plain, model):
        memkern.compress(each, saved_bits=bits)
    graphed = memkern.graphed(model, sample_kwargs=batch)
    for seed in range(2):
        for call in (plain, graphed):
            call.zero_grad()
            torch.manual_seed(seed)
            call(**batch).loss.backward()
        for (key, a), e in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (a.grad is None) == (e.grad is None), key
            assert e.grad is None or torch.equal(a.grad, e.grad), key
