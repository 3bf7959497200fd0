"""memkern.quantize_saved beside the rest of torch: precisions, checkpointing, compile, DDP, LoRA, other hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import checkpoint

import memkern
from memkern import memory

from .helpers import WIDTH, Block, Model, error, gradients, ids, same

MOST = {"exact": 1e-6, 8: 0.02}


def check(model: nn.Module, forward: Callable[[], Tensor], bits: Any = 8, most: float | None = None) -> None:
    expected = gradients(model, forward)
    with memkern.quantize_saved(bits):
        actual = gradients(model, forward)
    assert error(actual, expected) <= (MOST[bits] if most is None else most)


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(bits: Any, dtype: torch.dtype) -> None:
    model = Model()

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype):
            return model(ids())

    check(model, forward, bits)


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pure_half_precision(bits: Any, dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    check(model, lambda: model(ids()), bits, most=0.03 if bits == 8 else None)


def test_autocast_open_during_the_backward_pass() -> None:
    model = Model()
    with torch.autocast("cpu", torch.bfloat16):
        check(model, lambda: model(ids()), "exact")


# ---- checkpointing


def _layers(model: Model, run: Callable[..., Tensor]) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        x = model.embed(ids())
        for layer in model.layers:
            x = run(layer, x)
        return model.head(x)

    return forward


def _selective(layer: nn.Module, x: Tensor) -> Tensor:
    def contexts() -> Any:
        ops = [torch.ops.aten.mm.default]
        return checkpoint.create_selective_checkpoint_contexts(ops)

    return checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


CHECKPOINTS = {
    "reentrant": lambda layer, x: checkpoint.checkpoint(layer, x, use_reentrant=True),
    "not reentrant": lambda layer, x: checkpoint.checkpoint(layer, x, use_reentrant=False),
    "selective": _selective,
}


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointing(kind: str, bits: Any) -> None:
    model = Model(3)
    forward = _layers(model, CHECKPOINTS[kind])
    check(model, forward, bits)
    if kind == "not reentrant":

        def packed() -> Tensor:
            with memkern.quantize_saved(bits):
                return forward()

        plain = memory.live_bytes_after(forward, model, ids())
        saved = memory.live_bytes_after(packed, model, ids())
        assert saved <= plain  # inputs of checkpoints are exact


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_a_compressed_layer_inside_of_a_checkpoint(kind: str) -> None:
    """A checkpoint saves nothing inside; where it counts what would be saved, both passes come to the same."""
    model = Model(3)
    forward = _layers(model, CHECKPOINTS[kind])
    expected = gradients(model, forward)
    memkern.compress(model, saved_bits={"layers.*": "exact"})
    assert error(gradients(model, forward), expected) < 1e-6
    memkern.compress(model, saved_bits={"layers.*": 8})
    assert error(gradients(model, forward), expected) < 0.02


# ---- torch.compile, torch.func


@pytest.mark.full
@pytest.mark.parametrize("bits", ["exact", 8])
def test_around_a_compiled_model(bits: Any) -> None:
    model = Model(1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    check(model, lambda: compiled(ids()), bits)


@pytest.mark.full
def test_a_compressed_model_compiles_and_says_nothing() -> None:
    """Inside of torch.compile the hooks do not open the context: what is saved is what the compiler saves."""
    torch._dynamo.reset()
    model = Model(1)
    expected = gradients(model, lambda: model(ids()))
    memkern.compress(model, saved_bits=8)
    compiled = torch.compile(model, backend="aot_eager")
    assert error(gradients(model, lambda: compiled(ids())), expected) < 1e-5
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_inside_of_a_compiled_function() -> None:
    """With fullgraph=True the compiler refuses it; otherwise it leaves the block to Python, and gradients are right."""
    torch._dynamo.reset()
    model = Model(1)
    expected = gradients(model, lambda: model(ids()))

    def forward() -> Tensor:
        with memkern.quantize_saved("exact"):
            return model(ids())

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(forward, fullgraph=True, backend="aot_eager")()
    torch._dynamo.reset()
    assert error(gradients(model, torch.compile(forward, backend="aot_eager")), expected) < 1e-5


def test_functional_transforms_refuse_hooks() -> None:
    x = torch.randn(8)
    with pytest.raises(RuntimeError, match="saved tensor hooks"), memkern.quantize_saved(8):
        torch.func.grad(lambda t: t.square().sum())(x)


def test_second_derivatives() -> None:
    x = torch.randn(32, WIDTH, requires_grad=True)
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def penalty() -> Tensor:
        (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        return grad

    check(layer, penalty, "exact")
    check(layer, penalty, 8)


# ---- training loops


def test_accumulation() -> None:
    model = Model()

    def both(bits: Any) -> dict[str, Tensor]:
        model.zero_grad()
        for seed in (1, 2):
            batch = torch.randint(0, 50, (2, 64), generator=torch.Generator().manual_seed(seed))
            with memkern.quantize_saved(bits) if bits else contextlib.nullcontext():
                loss = model(batch).square().mean()
            loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = both(None)
    assert same(both("exact"), expected)
    assert error(both(8), expected) < 0.02


class LoRA(nn.Module):
    """A frozen linear layer and a low-rank one beside it, as peft has it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(F.dropout(x, 0.1))) * 2


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("autocast", [False, True])
def test_lora(bits: Any, autocast: bool) -> None:
    model = Model().requires_grad_(False)
    for layer in model.layers:
        layer.qkv, layer.down = LoRA(layer.qkv), LoRA(layer.down)

    def forward() -> Tensor:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(ids())

    def packed() -> Tensor:
        with memkern.quantize_saved(bits):
            return forward()

    check(model, forward, bits)
    assert memory.live_bytes_after(packed, model) < 0.75 * memory.live_bytes_after(forward, model)


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("autocast", [False, True])
def test_tied_weights(bits: Any, autocast: bool) -> None:
    model = Model()
    model.head.weight = model.embed.weight

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(ids())

    check(model, forward, bits)


def _ddp(rank: int, path: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(1)
    parallel = nn.parallel.DistributedDataParallel(model)
    batch = torch.randint(0, 50, (2, 64), generator=torch.Generator().manual_seed(rank))
    expected = gradients(model, lambda: parallel(batch))
    memkern.compress(model, saved_bits=8)
    off = error(gradients(model, lambda: parallel(batch)), expected)
    memkern.restore(model)
    with memkern.quantize_saved("exact"):
        exact = same(gradients(model, lambda: parallel(batch)), expected)
    Path(f"{out}.{rank}").write_text(f"{off} {exact}")
    dist.destroy_process_group()


@pytest.mark.full
def test_ddp(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_ddp, (str(tmp_path / "store"), str(tmp_path / "out")), nprocs=2)
    for rank in range(2):
        off, exact = (tmp_path / f"out.{rank}").read_text().split()
        assert 0 < float(off) < 0.02
        assert exact == "True"


# ---- other hooks


def test_save_on_cpu_gets_the_codes() -> None:
    model = Model()
    expected = gradients(model, lambda: model(ids()))
    seen: list[Tensor] = []
    recorder = torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t.clone(), lambda t: t)
    with recorder, memkern.quantize_saved(8):
        actual = gradients(model, lambda: model(ids()))
    assert 0 < error(actual, expected) < 0.02
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    assert not parameters & {t.untyped_storage()._cdata for t in seen}
    assert sum(t.nbytes for t in seen if t.dtype == torch.int8) > 0.8 * memory.tensor_bytes(seen)
    with torch.autograd.graph.save_on_cpu(), memkern.quantize_saved(8):
        assert same(gradients(model, lambda: model(ids())), actual)
    with torch.autograd.graph.save_on_cpu(), memkern.quantize_saved("exact"):
        assert same(gradients(model, lambda: model(ids())), expected)


def test_contexts_in_contexts() -> None:
    model = Model()
    expected = gradients(model, lambda: model(ids()))
    with memkern.quantize_saved(8):
        with memkern.quantize_saved("exact"):
            assert same(gradients(model, lambda: model(ids())), expected)
        assert error(gradients(model, lambda: model(ids())), expected) > 0
    context = memkern.quantize_saved("exact")
    with context, context:
        assert same(gradients(model, lambda: model(ids())), expected)


def test_an_exact_part_is_not_made_of_codes() -> None:
    x = torch.randn(64, WIDTH, requires_grad=True)
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    seen: list[Tensor] = []
    with memkern.quantize_saved(8):
        h = first(x)
        y = h.cos()
        with memkern.quantize_saved("exact"):
            z = second(F.silu(h))
    z.register_hook(seen.append)
    weight = torch.autograd.grad((y.sum() * 0 + z.sum()), second.weight)[0]
    assert torch.allclose(weight, F.silu(first(x)).sum(0).expand_as(weight), rtol=1e-5)


class EagerAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)
        return self.o(F.dropout((q @ k.transpose(-1, -2) / 4 + mask).softmax(-1), 0.1) @ v)


@pytest.mark.parametrize("bits", ["exact", 8])
def test_eager_attention(bits: Any) -> None:
    model, x = EagerAttention(), torch.randn(1, 256, WIDTH)

    def forward() -> Tensor:
        torch.manual_seed(2)
        return model(x)

    def packed() -> Tensor:
        with memkern.quantize_saved(bits):
            return forward()

    check(model, forward, bits)
    share = memory.live_bytes_after(packed, model, x) / memory.live_bytes_after(forward, model, x)
    assert share < (0.2 if bits == 8 else 0.5)


def test_threads_of_data_parallel_style_do_not_mix() -> None:
    from concurrent.futures import ThreadPoolExecutor

    models = [Model(1) for _ in range(4)]
    expected = [gradients(model, lambda model=model: model(ids())) for model in models]

    def run(model: Model) -> dict[str, Tensor]:
        with memkern.quantize_saved("exact"):
            return gradients(model, lambda: model(ids()))

    with ThreadPoolExecutor(4) as pool:
        assert all(map(same, pool.map(run, models), expected))


def test_a_block_is_packed_whole_or_not_at_all_without_grad() -> None:
    block = Block()
    with memkern.quantize_saved(8), torch.no_grad():
        assert not block(torch.randn(1, 64, WIDTH)).requires_grad


# ---- frozen weights under autocast


class _LoRA(nn.Module):
    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("layer", ["Linear", "Conv1D"])
def test_copies_of_frozen_weights_are_not_saved(layer: str, bits: Any) -> None:
    width, rows = 128, 32
    if layer == "Conv1D":
        conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
        bases = [conv1d(width, width) for _ in range(3)]
    else:
        bases = [nn.Linear(width, width) for _ in range(3)]
    torch.manual_seed(0)
    model = nn.Sequential(*(_LoRA(base, width) for base in bases))
    x = torch.randn(rows, width)

    def forward(bits: Any) -> Tensor:
        saving = memkern.quantize_saved(bits) if bits else contextlib.nullcontext()
        with saving, torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    weights = 2 * width * width  # of the two layers whose input needs a gradient
    plain, ours = (memory.live_bytes_after(lambda b=b: forward(b), model, x) for b in (None, bits))
    assert ours <= plain - 2 * weights
    leaves = [p for p in model.parameters() if p.requires_grad]
    expected, actual = (torch.autograd.grad(forward(b), leaves) for b in (None, bits))
    assert all(
        (a - b).norm() <= (0 if bits == "exact" else 0.03) * b.norm() for a, b in zip(actual, expected, strict=True)
    )
    loss = forward(bits)
    with torch.no_grad():
        bases[-1].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
