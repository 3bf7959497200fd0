"""memkern.optim.Muon has torch.optim.Muon's bits; its AdamW groups, states, wrappers, errors, muon_groups."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memkern
from memkern import optim
from memkern.memory import optimizer_bytes
from memkern.optim import Muon, Muon8bit, muon_groups, muon_step, weights
from memkern.optim.dtensor import muon as dtensor_muon
from tests.support import sharded
from tests.support.helpers import assert_same, first_quick, name_of, needs_fma
from tests.support.offloaded import run

SHAPES = ((48, 48), (96, 40), (40, 96), (1, 130))


def parameters(shapes: Any = SHAPES, seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def train(optimizer: Any, params: list[nn.Parameter], steps: int, first: int = 0) -> list[Tensor]:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in params]


@needs_fma
@pytest.mark.parametrize("adjust_lr_fn", first_quick([None, "original", "match_rms_adamw"]))
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_has_torchs_bits(adjust_lr_fn: str | None, nesterov: bool) -> None:
    ours, theirs = parameters(), parameters()
    options: dict[str, Any] = {"lr": 0.02, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    # Norms are summed in fp64, in another order than torch's. From step 1000 on none is so near the middle between two
    # bf16 numbers that they round otherwise; at step 49 one is.
    params = train(Muon(ours, **options), ours, 60, first=1000)
    assert_same(params, train(torch.optim.Muon(theirs, **options), theirs, 60, first=1000))


def test_8_bit_states_move_parameters_within_3_percent_of_fp32_states() -> None:
    shapes = ((64, 128), (96, 64))
    ours, exact = parameters(shapes), parameters(shapes)
    start = [p.detach().clone() for p in ours]
    params = train(Muon8bit(ours, lr=0.02, min_8bit_size=0), ours, 50)
    expected = train(Muon(exact, lr=0.02), exact, 50)
    for x, y, before in zip(params, expected, start, strict=True):
        assert 0 < (x - y).norm() < 0.03 * (y - before).norm()


def mixed(cls: Any = Muon, **options: Any) -> tuple[Any, list[nn.Parameter], list[nn.Parameter]]:
    """An optimizer with a group of Muon and one of AdamW, Muon's matrices, AdamW's parameters."""
    matrices, others = parameters(), parameters(((60, 90), (700,)), seed=1)
    groups = [
        {"params": matrices},
        {"params": others, "algorithm": "adamw", "lr": 1e-3, "weight_decay": 0.01},
    ]
    return cls(groups, **{"lr": 0.02, "min_8bit_size": 0, **options}), matrices, others


@pytest.mark.parametrize("state_bits", [32, 8])
def test_groups_of_adamw_have_the_bits_of_adamw(state_bits: Any) -> None:
    optimizer, _, others = mixed(state_bits=32)
    optimizer.param_groups[1]["state_bits"] = state_bits
    expected = parameters(((60, 90), (700,)), seed=1)
    stepped_by_adamw = [*optimizer.param_groups[0]["params"], *others]
    separate = optim.AdamW(expected, lr=1e-3, weight_decay=0.01, state_bits=state_bits, min_8bit_size=0)
    for step in range(5):
        train(optimizer, stepped_by_adamw, 1, step)
        for p, q in zip(expected, others, strict=True):
            p.grad = q.grad
        separate.step()
    assert_same([*others], expected)
    assert_same([*map(dict, map(optimizer.state.get, others))], [*map(dict, map(separate.state.get, expected))])


def test_a_scaled_step_is_the_plain_one() -> None:
    optimizer, matrices, others = mixed(Muon8bit)
    params = [*matrices, *others]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain, *lists = mixed(Muon8bit)
    expected = [p for part in lists for p in part]
    for step in range(3):
        train(plain, expected, 1, step)
        scaler.scale(torch.ones(()))
        for p, q in zip(params, expected, strict=True):
            p.grad = q.grad * 8.0
        scaler.step(optimizer)
        scaler.update(8.0)
    assert_same([*map(Tensor.detach, params)], [*map(Tensor.detach, expected)])


@pytest.mark.parametrize("master_weights", ["bf16+16", "bf16+8"])
def test_bf16_weights_keep_what_they_round(master_weights: str) -> None:
    params = [nn.Parameter(p.detach().bfloat16()) for p in parameters()]
    exact = [nn.Parameter(p.detach().float()) for p in params]
    start = copies(exact)
    optimizer = Muon8bit(params, lr=1e-3, weight_decay=0.0, master_weights=master_weights, min_8bit_size=0)
    reference = Muon8bit(exact, lr=1e-3, weight_decay=0.0, min_8bit_size=0)
    for step in range(20):
        for i, (p, q) in enumerate(zip(params, exact, strict=True)):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * step + i)).bfloat16()
            q.grad = p.grad.float()
        optimizer.step(), reference.step()
    for p, q, x in zip(params, exact, start, strict=True):
        joined = weights.fp32_weight(p.detach(), optimizer.state[p])
        if master_weights == "bf16+16":
            assert_same(joined, q.detach())
        else:  # weights have 24 bits, stochastically rounded: off by less than a tenth of how far they moved
            assert (joined - q).norm() < 0.1 * (q - x).norm()


def test_a_batch_steps_as_its_matrices_alone() -> None:
    (stacked,) = parameters(((3, 40, 24),))
    single = [nn.Parameter(x.clone()) for x in stacked.detach()]
    ours, separate = Muon([stacked], lr=0.02), Muon(single, lr=0.02)
    for step in range(3):
        stacked.grad = torch.randn(stacked.shape, generator=torch.Generator().manual_seed(step))
        for p, g in zip(single, stacked.grad, strict=True):
            p.grad = g.clone()
        ours.step(), separate.step()
    assert_same(stacked.detach(), torch.stack([*single]).detach())


@pytest.mark.parametrize("shape", [(5, 16, 24), (2, 5, 16, 24)])
def test_a_large_batch_is_cut_to_buckets(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    together, parts = Muon(parameters([shape]), lr=0.02), Muon(parameters([shape]), lr=0.02)

    def batch_sizes(optimizer: Any) -> list[int]:
        recorded = mock.Mock(wraps=muon_step.orthogonalize)
        with monkeypatch.context() as patch:
            patch.setattr(muon_step, "is_one_by_one", lambda x: False)  # True on the CPU, which has no batches
            patch.setattr(muon_step, "orthogonalize", recorded)
            train(optimizer, optimizer.param_groups[0]["params"], 2)
        return [len(call.args[0]) for call in recorded.call_args_list]

    batches = 1 if len(shape) == 3 else shape[0]  # in each of two steps
    assert batch_sizes(together) == [5] * batches * 2
    monkeypatch.setattr(muon_step, "BUCKET_BYTES", 2 * 16 * 24 * 2)  # two bf16 matrices
    assert batch_sizes(parts) == [2, 2, 1] * batches * 2
    (p,), (expected,) = parts.param_groups[0]["params"], together.param_groups[0]["params"]
    # Batched products in bf16 may round otherwise.
    torch.testing.assert_close(p, expected, rtol=1e-2, atol=2e-3)


def buckets(numbers: Any, params: Any) -> list[list[int]]:
    """The buckets into which a step cuts the parameters with these numbers, as lists of numbers."""
    return [*muon_step.cut_into_buckets(numbers, params, dtensor_muon.bytes_of_update)]


@pytest.mark.parametrize(
    ("sizes", "dim", "adjust_lr_fn"),
    [((40, 16, 16), 0, "match_rms_adamw"), ((48, 48, 60), 1, None)],
    ids=["rows of a Linear", "columns of transformers' Conv1D"],
)
def test_parts_of_a_split_matrix_step_as_matrices(sizes: tuple[int, ...], dim: int, adjust_lr_fn: Any) -> None:
    """A matrix that joins several, as query, key and value, is orthogonalized part by part (``split``)."""
    single = parameters([(n, 40) if dim == 0 else (40, n) for n in sizes])
    joined = nn.Parameter(torch.cat([p.detach() for p in single], dim))
    ours = Muon([joined], lr=0.02, adjust_lr_fn=adjust_lr_fn, split=sizes)
    separate = Muon(single, lr=0.02, adjust_lr_fn=adjust_lr_fn)
    for step in range(3):
        joined.grad = torch.randn(joined.shape, generator=torch.Generator().manual_seed(step))
        for p, g in zip(single, joined.grad.split(sizes, dim), strict=True):
            p.grad = g.clone()
        ours.step(), separate.step()
    assert_same(joined.detach(), torch.cat([p.detach() for p in single], dim))


def test_buckets_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert buckets([0, 2, 3, 5], [torch.zeros(2, 3)] * 6) == [[0, 2, 3, 5]]
    unbucketed, matrices, others = mixed(Muon8bit)
    expected = train(unbucketed, [*matrices, *others], 3)
    monkeypatch.setattr(muon_step, "BUCKET_BYTES", 2 * 48 * 48 + 2 * 96 * 40)
    assert buckets([0, 1, 2, 3], matrices) == [[0, 1], [2, 3]]
    bucketed, matrices, others = mixed(Muon8bit)
    assert_same(train(bucketed, [*matrices, *others], 3), expected)
    monkeypatch.setattr(muon_step, "BUCKET_BYTES", 0)
    assert buckets([0, 1], matrices) == [[0], [1]]


@pytest.mark.parametrize("wrap", [optim.HostOffload, optim.StepInBackward], ids=name_of)
@pytest.mark.parametrize("cls", [Muon, Muon8bit], ids=name_of)
def test_wrappers_change_no_bit(wrap: Any, cls: Any) -> None:
    """A schedule sets lr and betas. Each algorithm keeps its own eps."""
    options = {"lr": 0.01, "min_8bit_size": 0}
    expected, plain, _ = run(lambda params: cls(sharded.muon_groups(params), **options))
    result, wrapped, _ = run(lambda params: wrap(cls, sharded.muon_groups(params), **options))
    assert_same(result, expected)
    for optimizer in (plain, getattr(wrapped, "inner", wrapped)):
        assert [g["eps"] for g in optimizer.param_groups] == [1e-7, 1e-8]  # Muon's default, AdamW's default


@pytest.mark.parametrize(
    ("kind", "options", "message"),  # kind: the parameter; options of Muon; the error's message
    [
        ("vector", {}, "must have two dimensions or more, got shape"),
        ("matrix", {"algorithm": "sgd"}, "algorithm must be one of"),
        ("matrix", {"ns_steps": 0}, "ns_steps must be a whole number from 1 to 99, got 0"),
        ("matrix", {"ns_steps": 100}, "ns_steps must be a whole number from 1 to 99, got 100"),
        ("matrix", {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three finite numbers"),
        ("matrix", {"momentum": 1.0}, "momentum must be from 0 to below 1, got 1.0"),
        ("matrix", {"adjust_lr_fn": "other"}, "adjust_lr_fn must be one of"),
        ("matrix", {"lr": -1.0}, "lr must be 0 or more"),
        ("matrix", {"weight_decay": -1.0}, "weight_decay must be 0 or more"),
        ("matrix", {"eps": 0.0}, "eps must be a finite number above 0"),
        ("matrix", {"state_bits": (8, 4)}, "state_bits must be 8 or 32, got"),
        ("complex", {}, "got torch.complex64"),
        ("matrix", {"split": (3, 3)}, r"split must have sizes that add up .* got \(3, 3\) for shape \(4, 5\)"),
        ("matrix", {"split": 2}, "split must be None or sizes above 0, got 2"),
        ("matrix", {"split": (4, 0)}, "split must be None or sizes above 0"),
        ("tall", {"split": (20, 4)}, r"same adjusted learning rate, .* with ratios 1, 2$"),
    ],
)
def test_bad_parameters_and_options_raise(kind: str, options: dict[str, Any], message: str) -> None:
    tensors = {
        "vector": torch.zeros(5),
        "matrix": torch.zeros(4, 5),
        "tall": torch.zeros(24, 5),
        "complex": torch.zeros(4, 5, dtype=torch.complex64),
    }
    with pytest.raises((ValueError, TypeError), match=message):
        Muon([nn.Parameter(tensors[kind])], **options)


def test_a_group_of_the_other_algorithm_needs_its_own_lr() -> None:
    matrix, vector = nn.Parameter(torch.zeros(4, 5)), nn.Parameter(torch.zeros(5))
    groups: list[dict[str, Any]] = [{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}]
    with pytest.raises(ValueError, match="lr must be given for a group with algorithm='adamw'"):
        Muon(copy.deepcopy(groups), lr=0.02)
    optimizer = Muon(copy.deepcopy(groups), lr=3e-4, adjust_lr_fn="match_rms_adamw")
    assert [(g["lr"], g["eps"]) for g in optimizer.param_groups] == [(3e-4, 1e-7), (3e-4, 1e-8)]
    groups[1]["lr"] = 1e-3
    optimizer = Muon(copy.deepcopy(groups), lr=0.02, eps=1e-6)
    assert [(g["lr"], g["eps"]) for g in optimizer.param_groups] == [(0.02, 1e-6), (1e-3, 1e-6)]


@pytest.mark.parametrize("entry", ["momentum_buffer_scale", "momentum_buffer", "step"])
def test_a_state_that_does_not_fit_changes_nothing(entry: str) -> None:
    optimizer, matrices, others = mixed(Muon8bit)
    params = [*matrices, *others]
    train(optimizer, params, 2)
    optimizer.state[matrices[-1]][entry] = torch.zeros(3)
    before = copy.deepcopy(([p.detach() for p in params], optimizer.state_dict()["state"]))
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises((ValueError, TypeError, RuntimeError), match="of parameter 3"):
        optimizer.step()
    assert_same(([p.detach() for p in params], optimizer.state_dict()["state"]), before)


def test_a_group_keeps_its_algorithm() -> None:
    optimizer, matrices, others = mixed()
    train(optimizer, [*matrices, *others], 1)
    saved = optimizer.state_dict()
    before = copy.deepcopy(optimizer.state_dict())
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others[:1]}, {"params": others[1:]}]
    other = Muon([groups[0], {"params": others, "algorithm": "adamw", "lr": 1e-3}], lr=0.02)
    other.param_groups[1]["algorithm"] = "adamw"
    saved["param_groups"][0]["algorithm"] = "adamw"
    with pytest.raises(ValueError, match="group 0 has algorithm 'adamw', and this optimizer's has 'muon'"):
        other.load_state_dict(saved)
    optimizer.param_groups[0]["algorithm"] = "adamw"
    with pytest.raises(ValueError, match="algorithm"):
        train(optimizer, [*matrices, *others], 1)
    optimizer.param_groups[0]["algorithm"] = "muon"
    assert_same(optimizer.state_dict()["state"], before["state"])


def test_bad_gradients_change_nothing() -> None:
    optimizer, matrices, others = mixed(Muon8bit)
    train(optimizer, [*matrices, *others], 2)
    state = copy.deepcopy(optimizer.state_dict())
    before = [p.detach().clone() for p in [*matrices, *others]]
    for p in [*matrices, *others]:
        p.grad = torch.ones_like(p)
    matrices[2].grad = torch.ones_like(matrices[2]).to_sparse()
    with pytest.raises(RuntimeError, match="dense gradients"):
        optimizer.step()
    assert_same([p.detach() for p in [*matrices, *others]], before)
    assert_same(optimizer.state_dict()["state"], state["state"])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_zero_gradient_leaves_its_matrix_alone(backend: str) -> None:
    params = parameters(((8, 12), (8, 12)))
    start = [p.detach().clone() for p in params]
    optimizer = Muon8bit(params, weight_decay=0.0, min_8bit_size=0)
    params[0].grad, params[1].grad = torch.zeros(8, 12), torch.ones(8, 12)
    with memkern.use_backend(backend):
        optimizer.step()
    assert torch.equal(params[0], start[0])
    assert not torch.equal(params[1], start[1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
@pytest.mark.parametrize(
    ("number", "max_grad_norm", "skips"),  # number: the index of the parameter whose gradient has the value
    [(1, None, True), (5, None, False), (1, 1.0, True), (5, 1.0, True)],
    ids=["matrix", "AdamW's", "matrix, clipped", "AdamW's, clipped"],
)
def test_a_step_that_would_spoil_a_matrix_is_skipped(
    number: int, max_grad_norm: float | None, skips: bool, scaled: bool, value: float
) -> None:
    """The whole step is skipped, as a GradScaler does. Later steps have the bits of a run without the skipped step."""
    optimizer, matrices, others = mixed(Muon8bit, max_grad_norm=max_grad_norm)
    plain, *lists = mixed(Muon8bit, max_grad_norm=max_grad_norm)
    params, expected = [*matrices, *others], [p for part in lists for p in part]
    train(optimizer, params, 1), train(plain, expected, 1)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=scaled)
    for p in params:
        p.grad = torch.ones_like(p)
    params[number].grad.view(-1)[3] = value  # type: ignore[union-attr]
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    if not (skips or scaled):
        assert all(p.isfinite().all() for p in matrices)
        assert not torch.equal(params[0], expected[0])
        return
    assert_same([*map(Tensor.detach, params)], [*map(Tensor.detach, expected)])
    assert_same(optimizer.state_dict()["state"], before)
    scaler.update(1.0) if scaled else None
    assert_same(train(optimizer, params, 1, 1), train(plain, expected, 1, 1))


def test_product_devices_orthogonalize_weights_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors, with meta as the device: it gets updates and their sums of squares; states stay on the host."""
    devices: list[list[str]] = []

    def record(updates: list[Tensor], sums: list[Tensor], groups: Any) -> None:
        devices.extend([u.device.type, x.device.type] for u, x in zip(updates, sums, strict=True))

    monkeypatch.setattr(muon_step, "orthogonalize_", record)
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(48, 32)) for _ in range(3)]
        optimizer = Muon8bit(params, min_8bit_size=0)
        optimizer.product_devices = dict.fromkeys(params[:2], torch.device("meta"))
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer.step()
        assert {x.device.type for p in params for x in optimizer.state[p].values()} == {"cpu"}
    assert devices == [["meta"] * 2, ["meta"] * 2, ["cpu"] * 2]


def test_offload_names_the_devices_of_products() -> None:
    (p,) = params = parameters(((8, 12),))
    optimizer: Any = optim.HostOffload(Muon8bit, params)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert [*optimizer.inner.product_devices.values()] == [p.device]


def test_offloaded_groups_have_the_options_that_they_were_given() -> None:
    groups: list[dict[str, Any]] = [
        {"params": parameters(((8, 12),))},
        {"params": parameters(((12,),)), "algorithm": "adamw"},
    ]
    with pytest.raises(ValueError, match="lr must be given for a group with algorithm='adamw'"):
        optim.HostOffload(Muon8bit, groups, lr=0.02)
    groups[1]["lr"] = 1e-3
    optimizer = optim.HostOffload(Muon8bit, groups, lr=0.02)
    assert [g["eps"] for g in optimizer.param_groups] == [1e-7, 1e-8]
    with pytest.raises(ValueError, match="lr must be given for a group with algorithm='adamw'"):
        optimizer.add_param_group({"params": parameters(((6,),)), "algorithm": "adamw"})
    assert len(optimizer.param_groups) == 2


# ---- muon_groups


class Net(nn.Module):
    """Parameters that muon_groups tells apart by their module, name or shape; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.positions = nn.Parameter(torch.zeros(1, 7, 16))
        self.experts = nn.Parameter(torch.zeros(4, 16, 32))
        self.conv = nn.Conv2d(3, 8, 3)
        self.pos_table = nn.Parameter(torch.zeros(9, 16))
        self.layers = nn.ModuleList([nn.ModuleDict({"output": nn.Linear(16, 16, bias=False)})])
        self.output = nn.Linear(16, 9, bias=False)
        self.up, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)
        self.lm_head = nn.Linear(16, 50, bias=False)
        self.lm_head.weight = self.embed.weight


def test_muon_groups_chooses_the_algorithm_and_decay_of_each_parameter() -> None:
    net = Net()
    groups = muon_groups(net, lr=0.02, adamw_lr=1e-3, block_size=64)
    assert {name: algorithm for name, (algorithm, _) in groups.reasons.items()} == {
        "positions": "adamw",
        "experts": "muon",
        "pos_table": "adamw",
        "layers.0.output.weight": "muon",
        "output.weight": "adamw",
        "embed.weight": "adamw",
        "conv.weight": "adamw",
        "conv.bias": "adamw",
        "up.weight": "muon",
        "up.bias": "adamw",
        "norm.weight": "adamw",
        "norm.bias": "adamw",
    }
    assert "adamw, an embedding: embed.weight" in str(groups)
    assert {(g["algorithm"], g["lr"], g["weight_decay"]) for g in groups} == {
        ("muon", 0.02, 0.1),
        ("adamw", 1e-3, 0.1),
        ("adamw", 1e-3, 0.0),
    }
    assert sum(len(g["params"]) for g in groups) == len([*net.parameters()])
    optimizer = Muon8bit(groups)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(p.isfinite().all() for p in net.parameters())


def test_muon_groups_splits_the_matrices_that_a_function_names() -> None:
    net = Net()
    groups = muon_groups(net, split=lambda name, p: (16, 16) if name == "up.weight" else None)
    assert [g["split"] for g in groups if any(p is net.up.weight for p in g["params"])] == [(16, 16)]
    assert [g for g in groups if "split" in g and g["algorithm"] == "adamw"] == []


def test_muon_groups_gives_adamw_what_a_function_names() -> None:
    groups = muon_groups(Net(), adamw=lambda name, p: name == "up.weight")
    assert groups.reasons["up.weight"] == ("adamw", "asked for")


@pytest.mark.parametrize(
    # sizes: ff, rows of the MLP's matrices; kv and q, of the projections to keys, values and queries. gib: the states'.
    ("sizes", "gib"),
    [
        ({"layers": 32, "width": 4096, "ff": 14336, "kv": 1024, "q": 4096, "vocab": 128256, "tied": False}, 8.7),
        ({"layers": 36, "width": 2560, "ff": 9728, "kv": 1024, "q": 4096, "vocab": 151936, "tied": True}, 4.2),
    ],
    ids=["Llama-3.1-8B", "Qwen3-4B"],
)
def test_bytes_of_states_of_language_models(sizes: dict[str, Any], gib: float) -> None:
    w, ff, kv, q = (sizes[key] for key in ("width", "ff", "kv", "q"))
    layer = [(q, w), (kv, w), (kv, w), (w, q), (ff, w), (ff, w), (w, ff)]
    matrices = [nn.Parameter(torch.empty(shape, device="meta")) for shape in layer * sizes["layers"]]
    tables = [nn.Parameter(torch.empty(sizes["vocab"], w, device="meta")) for _ in range(1 if sizes["tied"] else 2)]
    norms = [nn.Parameter(torch.empty(w, device="meta")) for _ in range(2 * sizes["layers"] + 1)]
    optimizer = Muon8bit([{"params": matrices}, {"params": [*tables, *norms], "algorithm": "adamw", "lr": 1e-3}])
    for p in (*matrices, *tables, *norms):
        p.grad = torch.empty_like(p)
    optimizer.step()
    assert optimizer_bytes(optimizer) / 2**30 == pytest.approx(gib, rel=0.01)
