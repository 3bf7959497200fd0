"""Training loops (training_saves.py) whose states are converted for other libraries, and back, at any moment."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis.stateful import precondition, rule
from torch import Tensor, nn

from memkern import optim
from tests.support.helpers import assert_same
from tests.support.training_loops import ERRORS, QUIET_ERROR, SHAPES, WRITTEN
from tests.support.training_saves import SavedLoop

ADAMS = ("Adam", "AdamW")
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class ExportedLoop(SavedLoop):
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
            {**own, "params": [nn.Parameter(p.detach().clone()) for p in group["params"]]}
            for own, group in zip(self._options(), self.inner.param_groups, strict=True)
        ]
        return getattr(optim, self.name)(copy.deepcopy(groups), lr=1e-2, max_grad_norm=groups[0]["max_grad_norm"])

    # ---- what was exported

    def _compare_moments(self, found: dict[str, Tensor], i: int) -> None:
        """Floats of a parameter's state, and the plain optimizer's."""
        plain = self.plain.state[self.refs[i]]
        for name in MOMENTS:
            if name not in found:
                continue
            x, y = (each[name].float() for each in (found, plain))
            if name == "exp_avg_sq":
                x, y = x.sqrt(), y.sqrt()
            if not y.isfinite().all():
                continue
            error = self.errors[i]
            error = QUIET_ERROR if i in self.quiet and error > ERRORS[32] else error
            off, allowed = float((x - y).abs().mean()), error * float(y.abs().mean()) + 1e-7
            assert off <= allowed, f"{name} of w{i}: off by {off:.3g}, allowed {allowed:.3g}"

    def _compare_all(self, found: dict[Any, Any], members: list[int]) -> None:
        """``found``: states by the numbers of parameters in the groups; ``members``: which those are."""
        stepped = {k for k, i in enumerate(members) if self.plain.state.get(self.refs[i])}
        assert stepped <= {*found}
        for k, values in found.items():
            if k in stepped:
                self._compare_moments(values, members[k])
            else:  # a step that was skipped
                assert all(float(x.abs().max()) == 0 for x in values.values())

    @property
    def _order(self) -> list[int]:
        return [i for own in self.members for i in own]

    # ---- exports

    @precondition(lambda self: self.name in ADAMS)
    @rule()
    def export_to_torch(self) -> None:
        before = self._entries()
        found = optim.to_torch_state_dict(self.inner)
        assert_same(self._entries(), before)
        self._compare_all(found["state"], self._order)
        loaded = self._copied()
        loaded.load_state_dict(optim.from_torch_state_dict(loaded, found))
        self._compare_all(optim.to_torch_state_dict(loaded)["state"], self._order)

    @rule()
    def export_fp32_weights(self) -> None:
        before = self._entries()
        found = optim.to_fp32_state_dict(self.model, self.optimizer)
        assert_same(self._entries(), before)
        for i in range(len(SHAPES)):
            p, x = self.model.weight(i).detach(), found[f"w{i}"]
            if p.dtype == torch.float16 and x.dtype == torch.float16:
                continue  # only HostOffload keeps more of these
            assert x.dtype == torch.float32
            seen = p.isfinite() & x.isfinite()
            off = (x - p.float())[seen].abs()
            allowed = WRITTEN[p.dtype] * (x[seen].abs() + torch.finfo(p.dtype).smallest_normal)
            assert bool((off <= allowed).all()), f"w{i}: fp32 weight of another model"
