"""Training loops (training_saves.py) whose states are converted for other libraries, and back, at any moment."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis.stateful import precondition, rule
from torch import Tensor, nn

from memkern import optim
from tests.support.helpers import assert_same
from tests.support.training_loops import ERRORS, QUIET_ERROR, ROUNDING, SHAPES
from tests.support.training_saves import SavedLoop

ADAMS = ("Adam", "AdamW")
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class ExportedLoop(SavedLoop):
    """A loop that also exports states and fp32 weights, and compares them with the plain optimizer's."""

    @property
    def inner(self) -> Any:
        """memkern's own optimizer, which HostOffload has inside."""
        return getattr(self.optimizer, "inner", self.optimizer)

    def _entries(self) -> Any:
        return copy.deepcopy([[*map(dict, self.inner.state.values())], self._options()])

    def _options(self) -> list[dict[str, Any]]:
        return [{k: x for k, x in g.items() if k != "params"} for g in self.optimizer.param_groups]

    def _copied(self) -> Any:
        """An optimizer of the same class and groups, without states."""
        groups = [
            {**options, "params": [nn.Parameter(p.detach().clone()) for p in group["params"]]}
            for options, group in zip(self._options(), self.inner.param_groups, strict=True)
        ]
        return getattr(optim, self.name)(copy.deepcopy(groups), lr=1e-2, max_grad_norm=groups[0]["max_grad_norm"])

    # ---- what was exported

    def _compare_moments(self, exported: dict[str, Tensor], i: int) -> None:
        """Compares the exported moments of weight ``i`` with the plain optimizer's moments."""
        plain = self.plain.state[self.refs[i]]
        for name in MOMENTS:
            if name not in exported:
                continue
            actual, expected = exported[name].float(), plain[name].float()
            if name == "exp_avg_sq":
                actual, expected = actual.sqrt(), expected.sqrt()
            if not expected.isfinite().all():
                continue
            quiet = i in self.quiet and self.errors[i] > ERRORS[32]
            allowed = (QUIET_ERROR if quiet else self.errors[i]) * float(expected.abs().mean()) + 1e-7
            error = float((actual - expected).abs().mean())
            assert error <= allowed, f"{name} of w{i}: off by {error:.3g}, allowed {allowed:.3g}"

    def _compare_all(self, states: dict[int, Any], members: list[int]) -> None:
        """``states``: by the positions of parameters in the groups; ``members``: the numbers of the weights there."""
        stepped = {k for k, i in enumerate(members) if self.plain.state.get(self.refs[i])}
        assert stepped <= {*states}
        for k, state in states.items():
            if k in stepped:
                self._compare_moments(state, members[k])
            else:  # a step that was skipped
                assert all(float(x.abs().max()) == 0 for x in state.values())

    @property
    def _order(self) -> list[int]:
        return [i for group in self.members for i in group]

    # ---- exports

    @precondition(lambda self: self.name in ADAMS)
    @rule()
    def export_to_torch(self) -> None:
        before = self._entries()
        exported = optim.to_torch_state_dict(self.inner)
        assert_same(self._entries(), before)
        self._compare_all(exported["state"], self._order)
        loaded = self._copied()
        loaded.load_state_dict(optim.from_torch_state_dict(loaded, exported))
        self._compare_all(optim.to_torch_state_dict(loaded)["state"], self._order)

    @rule()
    def export_fp32_weights(self) -> None:
        before = self._entries()
        exported = optim.to_fp32_state_dict(self.model, self.optimizer)
        assert_same(self._entries(), before)
        for i in range(len(SHAPES)):
            p, x = self.model.weight(i).detach(), exported[f"w{i}"]
            if p.dtype == torch.float16 and x.dtype == torch.float16:
                continue  # only HostOffload keeps fp32 weights of fp16 ones
            assert x.dtype == torch.float32
            finite = p.isfinite() & x.isfinite()
            error = (x - p.float())[finite].abs()
            allowed = ROUNDING[p.dtype] * (x[finite].abs() + torch.finfo(p.dtype).smallest_normal)
            assert bool((error <= allowed).all()), f"w{i}: fp32 weight of another model"
