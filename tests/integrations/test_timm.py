"""memkern's optimizers in timm's registry: made by create_optimizer_v2, with groups and layer decay."""

from __future__ import annotations

from typing import Any
from unittest import TestCase

import pytest
import torch

from memkern import optim
from tests.support import timm_factory
from tests.support.helpers import assert_same

timm_factory.load()
timm = pytest.importorskip("timm.optim")

from memkern.integrations import names  # noqa: E402
from memkern.integrations.timm import register  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def registered() -> list[str]:
    return register()


class Net(torch.nn.Module):
    """Two layers that timm's layer decay tells apart, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
        self.norm, self.head = torch.nn.LayerNorm(64), torch.nn.Linear(64, 10)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^stem", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(self.norm(x))


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for seed in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


NAMES = [name for name in names.optimizers() if "muon" not in name]
EIGHT_BIT = [name for name in NAMES if name.endswith("8bit")]


@pytest.mark.feature("timm", '`create_optimizer_v2(model, "memkern_adamw8bit")` and the others, with groups')
@pytest.mark.parametrize("name", [*(f"memkern_{n}" for n in EIGHT_BIT), *(f"memkern{n}" for n in NAMES)])
def test_the_factory_makes_them_with_groups(name: str) -> None:
    model = Net()
    optimizer = timm.create_optimizer_v2(model, name, lr=1e-3, weight_decay=0.05)
    assert type(optimizer) is names.optimizer(name.removeprefix("memkern").removeprefix("_"))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.05]
    assert all(p.dim() == 1 for p in optimizer.param_groups[0]["params"])
    model_by_hand = Net()
    groups = timm.param_groups_weight_decay(model_by_hand, 0.05)
    options = {"momentum": 0.9} if "sgd" in name else {}  # timm's default
    by_hand = type(optimizer)(groups, lr=1e-3, **options)
    assert_same(trained(model, optimizer), trained(model_by_hand, by_hand))


@pytest.mark.feature("timm", "layer decay")
def test_layer_decay_is_that_of_groups_made_by_hand() -> None:
    model, model_by_hand = Net(), Net()
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "block_size": 64}
    optimizer = timm.create_optimizer_v2(model, "memkern_adamw8bit", weight_decay=0.05, layer_decay=0.5, **options)
    scales = {group["lr_scale"] for group in optimizer.param_groups}
    assert len(scales) > 2
    assert {group["block_size"] for group in optimizer.param_groups} == {64}
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}
    groups = timm.param_groups_layer_decay(model_by_hand, weight_decay=0.05, layer_decay=0.5)
    by_hand = optim.AdamW8bit(groups, **options)
    for group in (*optimizer.param_groups, *by_hand.param_groups):
        group["lr"] *= group["lr_scale"]  # what timm's schedulers do
    assert_same(trained(model, optimizer), trained(model_by_hand, by_hand))


def test_registering_again_says_nothing(registered: list[str]) -> None:
    with TestCase().assertNoLogs(level="WARNING"):
        assert register() == registered
    assert {*timm.list_optimizers("memkern*")} <= {*registered}
    assert not any("muon" in name for name in registered)  # its groups are not timm's
    assert timm.get_optimizer_info("memkern_lamb8bit").opt_class is optim.LAMB8bit
    assert type(timm.create_optimizer_v2(Net(), "lookahead_memkernlion8bit", lr=1e-3)).__name__ == "Lookahead"


def test_a_name_that_timm_has_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "optimizers", lambda: {"lion8bit": optim.Lion8bit, "rprop8bit": optim.AdamW8bit})
    from timm.optim._optim_factory import default_registry

    default_registry.register(timm.OptimInfo(name="rprop8bit", opt_class=torch.optim.SGD))
    with pytest.raises(ValueError, match="timm has an optimizer rprop8bit of its own"):
        register()
    assert "memkernrprop8bit" not in timm.list_optimizers()
