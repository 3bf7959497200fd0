"""Training loops (training_loops.py) whose optimizers have schedulers, and are copied, saved and loaded."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any
from unittest.mock import patch

import torch
from hypothesis.stateful import initialize, precondition, rule
from hypothesis.strategies import booleans, sampled_from
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.support.schedulers import SCHEDULERS
from tests.support.training_loops import Holder, Loop

SCHEDULED = ("lr", "betas", "momentum")  # the options that schedulers write


class SavedLoop(Loop):
    """The plain optimizer has a scheduler of the same kind, and follows each copy and load."""

    schedulers: tuple[Any, Any] | None
    """The scheduler of the optimizer, and the scheduler of the plain optimizer."""

    @initialize()
    def begin_runs(self) -> None:
        self.schedulers, self.scheduled, self.saved = None, "", None

    # ---- schedulers

    @rule(name=sampled_from([*SCHEDULERS]))
    def schedule(self, name: str) -> None:
        self.scheduled = name
        self.schedulers = SCHEDULERS[name](self.optimizer), SCHEDULERS[name](self.plain)
        self._compare_options()

    def _compare(self, before: list[tuple[Tensor, Tensor]]) -> None:
        super()._compare(before)
        if self.schedulers is None:
            return
        ours, plain = (self._scheduler_stepped(scheduler) for scheduler in self.schedulers)
        assert ours == plain
        self._compare_options()
        if ours is not None:
            self.schedulers = None

    def _scheduler_stepped(self, scheduler: Any) -> str | None:
        try:
            scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
        except ValueError as error:  # OneCycleLR after its last step
            return str(error)
        return None

    def _compare_options(self) -> None:
        for group, plain in zip(self.optimizer.param_groups, self.plain.param_groups, strict=True):
            for key in SCHEDULED:
                if key in group and key in plain:
                    assert group[key] == plain[key], f"{key} is {group[key]}, the plain optimizer's {plain[key]}"

    # ---- copies, saves, loads

    @rule(method=sampled_from(["deepcopy", "pickle"]))
    def copy_everything(self, method: str) -> None:
        scheduler, plain_scheduler = self.schedulers or (None, None)
        originals = self.model, self.optimizer, scheduler
        if self.wrapper == "late":
            return  # its queues are functions
        self.model, self.optimizer, scheduler = (
            copy.deepcopy(originals) if method == "deepcopy" else pickle.loads(pickle.dumps(originals))
        )
        self.schedulers = None if scheduler is None else (scheduler, plain_scheduler)
        self._compile()

    @rule()
    def save(self) -> None:
        if not all(p.is_contiguous() for p in self.model.parameters()):
            return  # a state of another memory format is refused, with the way out
        blob = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), blob)
        attributes = {name: getattr(self, name) for name in ("members", "errors", "budgets", "scheduled")}
        refs = [ref.detach().clone() for ref in self.refs]
        norm = self.optimizer.param_groups[0]["max_grad_norm"]
        options = [
            {key: g[key] for key in ("state_bits", "master_weights", "stochastic_rounding")}
            for g in self.optimizer.param_groups
        ]
        schedulers = None if self.schedulers is None else [s.state_dict() for s in self.schedulers]
        plain_run = attributes, refs, self.plain.state_dict(), schedulers, options, norm
        self.saved = blob.getvalue(), copy.deepcopy(plain_run)

    @precondition(lambda self: self.saved is not None)
    @rule(fresh=booleans(), bits=sampled_from([None, None, 8, 32]))
    def resume(self, fresh: bool, bits: Any) -> None:
        blob, plain_run = self.saved
        attributes, refs, plain, schedulers, options, norm = copy.deepcopy(plain_run)
        weights, state = torch.load(io.BytesIO(blob), weights_only=True)
        vars(self).update(attributes)
        if fresh or not self.is_unwrapped:
            self.model = Holder(self.time, weights["w0"].dtype)
        else:
            self.model.to(weights["w0"].dtype)
            for p in self.model.parameters():  # else the state is refused: it is of another memory format
                p.data = p.data.contiguous()
        self.model.load_state_dict(weights)
        self.options["max_grad_norm"] = norm
        for key in options[0]:
            self.options.pop(key, None)
        self.optimizer = self._resumed(options, bits)
        with torch.no_grad():
            for ref, x in zip(self.refs, refs, strict=True):
                ref.copy_(x)
        for group, members in zip(self.plain.param_groups, self.members, strict=True):
            group["params"] = [self.refs[i] for i in members]
        self.schedulers = None
        if schedulers is not None:  # made before the states are loaded, as they write lr
            new_scheduler = SCHEDULERS[self.scheduled]
            self.schedulers = new_scheduler(self.optimizer), new_scheduler(self.plain)
            for scheduler, saved in zip(self.schedulers, schedulers, strict=True):
                scheduler.load_state_dict(saved)
        self.optimizer.load_state_dict(state)
        self.plain.load_state_dict(plain)
        for k in range(2):
            self._note_group_storage(k)
        self._compile()

    def _resumed(self, options: list[dict[str, Any]], bits: Any) -> Any:
        """An optimizer of the saved groups' own options, but for state_bits where others are given."""
        new_groups = self._groups
        changes = {} if bits is None else {"state_bits": bits}

        def saved_groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
            return [{**group, **saved, **changes} for group, saved in zip(new_groups(params), options, strict=True)]

        with patch.object(self, "_groups", saved_groups):
            return self._new_optimizer()
