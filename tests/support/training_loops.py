"""A training loop of random steps and edits, beside the same loop of a plain optimizer in fp32.

The machine is hypothesis' (test_loops.py runs it). Every step's gradients are given, so that the two sides
do not drift apart: what is compared after a step is its update, and with ``master_weights`` the sum of the updates
since something else has written the weights.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.strategies import booleans, integers, just, lists, one_of, sampled_from
from torch import Tensor, nn
from torch.nn.utils import prune

from memkern import optim
from tests.support import training_edits
from tests.support.late_transfers import LateHostOffload

SHAPES = ((64, 128), (24, 50), (40,), (8, 6, 3, 3), (1, 1000))
PLAIN: dict[str, tuple[type, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam": (torch.optim.Adam, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Lion": (optim.Lion, {}),
    "LAMB": (optim.LAMB, {}),
    "LARS": (optim.LARS, {}),
    "Muon": (optim.Muon, {}),
}
"""By the name of memkern's class: the class that it is compared with (torch's, else memkern's own with fp32 states),
and options of both.
"""
ERRORS = {32: 1e-3, 8: 0.3}
"""The largest error of an update by state_bits: its mean over a tensor, in shares of the mean update. (Lion's updates
are signs: 0.3 is 15 % of them.) One element's error may be 30 times as large a share of the largest update.
"""
MUON_ERRORS = {32: 0.05, 8: 0.5}
"""ERRORS for Muon's matrices: small singular values, which rounding changes most, count as much as large ones."""
QUIET_ERROR = 1.0
"""ERRORS for codes after sparse gradients. An element whose moments are far below its block's largest is stored as
zero or as the smallest code and takes too small a step, and most elements may be such: LAMB and Adam missed 0.38 and
0.56 of an update with 8 bits, and nothing with 32.
"""
# Ways to wrap the optimizer in HostOffload or StepInBackward (:meth:`Loop._new_optimizer`); "" leaves it as it is.
WRAPPERS = ["", "", "", "host", "host gradients", "late", "backward", "device", "device backward"]
# Options that both optimizers have.
SHARED_OPTIONS = ("lr", "weight_decay", "betas", "momentum", "maximize")
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""The largest relative change of a weight when it is written in a dtype."""
seeds = integers(0, 2**16)
numbers = integers(0, len(SHAPES) - 1)


class Holder(nn.Module):
    """A model of weights alone: w0, w1, ... of SHAPES."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for i, shape in enumerate(SHAPES):
            w = torch.randn(shape, generator=generator)
            self.register_parameter(f"w{i}", nn.Parameter(w.to(dtype)))

    def weight(self, i: int) -> nn.Parameter:
        return self._parameters[f"w{i}"]  # type: ignore[return-value]


class Loop(RuleBasedStateMachine):
    """memkern's optimizer of ``model``, and ``plain`` of the fp32 weights ``refs``."""

    compilers: tuple[str, ...] = ()
    """torch.compile's backends, of which each loop takes one. They compile for seconds: only long tests set them."""
    compiled_calls = 0
    """Compiled graphs that ran, in all loops."""

    # ---- beginning

    @initialize(
        name=sampled_from([*PLAIN]),
        dtype=sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        bits=sampled_from([8, 8, 32]),
        weights=sampled_from([None, "bf16+16", "bf16+8", "stochastic"]),
        wrapper=sampled_from(WRAPPERS),
        seed=seeds,
        compiler=integers(0, 7),
    )
    def begin(
        self, name: str, dtype: torch.dtype, bits: Any, weights: Any, wrapper: str, seed: int, compiler: int
    ) -> None:
        self.name, self.wrapper, self.time = name, wrapper, 0  # time: steps so far
        self.generator = torch.Generator().manual_seed(seed)
        self.model = Holder(seed, dtype)
        self.members = [[0, 1, 3], [2, 4]] if name == "Muon" else [[0, 1, 2], [3, 4]]
        self.refs = [nn.Parameter(self.model.weight(i).detach().float().clone()) for i in range(len(SHAPES))]
        options = {"lr": 1e-2, "weight_decay": 0.0, **PLAIN[name][1]}
        self.plain = PLAIN[name][0](self._groups(self.refs), **options)
        memkern_options: dict[str, Any] = {"state_bits": bits, "min_8bit_size": 512}
        if dtype == torch.bfloat16:
            memkern_options |= {"stochastic_rounding": True} if weights == "stochastic" else {"master_weights": weights}
        self.options = options | memkern_options
        self.optimizer = self._new_optimizer()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10**6)
        self.errors = [self.error_of(i, bits) for i in range(len(SHAPES))]
        self.quiet: set[int] = set()  # the tensors that have had sparse gradients
        self.budgets = [(0.0, 0.0)] * len(SHAPES)  # the mean and the largest error allowed since a weight was written
        self.gradients = self._directions()
        self.saved: Any = None
        self.snapshot = copy.deepcopy(self.model.state_dict())
        self.compiler = self.compilers[compiler % len(self.compilers)] if self.compilers and self.is_unwrapped else ""
        self._compile()

    def _compile(self) -> None:
        """Compiles the step of the current optimizer anew."""
        if not self.compiler:
            return
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 100  # beyond it a step that has often changed runs uncompiled

        def counted(graph: Any, inputs: Any) -> Any:
            run = torch._dynamo.lookup_backend(self.compiler)(graph, inputs)

            def call(*args: Any) -> Any:
                type(self).compiled_calls += 1
                return run(*args)

            return call

        self.compiled = torch.compile(self.optimizer.step, backend=counted)

    def _groups(self, params: Any) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = [{"params": [params[i] for i in group]} for group in self.members]
        if self.name == "Muon":
            groups[1] |= {"algorithm": "adamw", "lr": 1e-2}
        return groups

    def _new_optimizer(self, **changes: Any) -> Any:
        cls, options = getattr(optim, self.name), {**self.options, **changes}
        groups = self._groups([self.model.weight(i) for i in range(len(SHAPES))])
        if self.wrapper == "backward":
            return optim.StepInBackward(cls, groups, **options)
        if self.wrapper:
            on_device = "device" in self.wrapper
            wrapper = LateHostOffload if on_device or self.wrapper == "late" else optim.HostOffload
            mode: dict[str, Any] = {"offload_gradients": self.wrapper in ("host gradients", "late")}
            if on_device:
                mode = {"step_on": "device", "step_in_backward": "backward" in self.wrapper}
            return wrapper(cls, groups, **mode, **options)
        return cls(groups, **options)

    def _directions(self) -> list[Tensor]:
        """A part of the gradients that is the same at each step, so that moments are not noise alone."""
        return [torch.randn(s, generator=self.generator) * 10.0 ** (i - 3) for i, s in enumerate(SHAPES)]

    # ---- what is there

    @property
    def is_unwrapped(self) -> bool:
        """Whether the optimizer is memkern's own class: groups may be edited in every way."""
        return self.wrapper == ""

    def group_of(self, i: int) -> Any:
        return self.optimizer.param_groups[next(k for k, group in enumerate(self.members) if i in group)]

    def error_of(self, i: int, bits: Any) -> float:
        """The error of an update with states of these bits."""
        return (MUON_ERRORS if self.name == "Muon" and i in self.members[0] else ERRORS)[bits]

    def is_kept(self, i: int) -> bool:
        """Whether more than the parameter is kept of its weight: masters, errors, the host's fp32 weights."""
        if self.group_of(i).get("master_weights"):
            return True
        hosted = self.wrapper in ("host", "host gradients", "late") and self.model.weight(i).element_size() < 4
        return hosted and not self.group_of(i).get("stochastic_rounding")

    @torch.no_grad()
    def copy_to_plain(self, i: int) -> None:
        """Copies a weight to the plain loop after something other than a step has written it."""
        p, ref = self.model.weight(i).detach(), self.refs[i]
        assert p.shape == ref.shape
        unit = ROUNDING[p.dtype]
        ref.copy_(p)
        finite = ref[ref.isfinite()].abs()
        if finite.numel():
            self.budgets[i] = float(finite.mean()) * unit, float(finite.max()) * unit

    # ---- a step

    @rule(
        kinds=lists(
            sampled_from(["drift", "drift", "drift", "noise", "none", "zero", "sparse", "large"]),
            min_size=len(SHAPES),
            max_size=len(SHAPES),
        ),
        count=integers(1, 4),
        micro=integers(1, 3),
        clip=sampled_from([None, None, None, 0.1]),
        scaled=sampled_from(["", "", "", "scaled", "infinite"]),
        compiled=booleans(),
    )
    def step(
        self,
        kinds: list[str],
        count: int,
        micro: int,
        clip: float | None,
        scaled: str,
        compiled: bool,
    ) -> None:
        if "backward" in self.wrapper:
            micro = 1
        if "backward" in self.wrapper or self.wrapper in ("host gradients", "late"):
            clip, scaled = None, ""
        if scaled and any(p.dtype == torch.float16 for p in self.model.parameters()):
            clip = None  # torch refuses to unscale fp16 gradients
        self.step_is_compiled = compiled and bool(self.compiler) and not scaled
        for _ in range(count):
            self._one_step(kinds, micro, clip, scaled)

    def _one_step(self, kinds: list[str], micro: int, clip: Any, scaled: str) -> None:
        before = self._prepare()
        totals: list[Any] = [None] * len(SHAPES)
        on_host: list[Any] = [None] * len(SHAPES)  # sums of gradients in the parameter's dtype, as HostOffload has them
        scale = self.scaler.get_scale() if scaled else 1.0
        for _ in range(micro):
            loss = torch.zeros(())
            for i, kind in enumerate(kinds):
                if (g := self._gradient(i, kind)) is not None:
                    if kind == "sparse":
                        self.quiet.add(i)
                    p = self.model.weight(i)
                    g = g.to(p.dtype)
                    totals[i] = g.float() + (0.0 if totals[i] is None else totals[i])
                    on_host[i] = g if on_host[i] is None else on_host[i] + g
                    if scaled == "infinite":
                        g = g + torch.inf
                    loss = loss + (p * g).float().sum()
            if loss.requires_grad:
                (self.scaler.scale(loss) if scaled else loss).backward()
        if all(total is None for total in totals):
            return
        for ref, total in zip(self.refs, totals, strict=True):
            ref.grad = total
        if micro > 1 and any(p.dtype != torch.float32 for p in self.model.parameters()):
            for i, ref in enumerate(self.refs):  # how micro-batches are added up is not what is compared here
                g = self.model.weight(i).grad
                if self.wrapper in ("host gradients", "late"):
                    g = on_host[i]
                elif g is not None:
                    g = g / scale
                if g is not None and scaled != "infinite":
                    assert (g.float() - ref.grad).abs().mean() <= 0.02 * ref.grad.abs().mean() + 1e-6
                    ref.grad = g.float()
        self._step_both(clip, scaled)
        self.time += 1
        if scaled == "infinite":
            self._assert_unchanged(before)
            self.scaler.update(4.0)
        else:
            self._compare(before)

    @torch.no_grad()
    def _prepare(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of weights before a step: memkern's and the plain one, which first becomes equal if no more is kept."""
        for i, ref in enumerate(self.refs):
            p = self.model.weight(i)
            p.grad = ref.grad = None
            if not self.is_kept(i):
                self.copy_to_plain(i)
        return [(self.model.weight(i).detach().clone(), ref.detach().clone()) for i, ref in enumerate(self.refs)]

    def _gradient(self, i: int, kind: str) -> Tensor | None:
        if kind == "none":
            return None
        noise = torch.randn(SHAPES[i], generator=self.generator) * 10.0 ** (i - 3)
        if kind == "zero":
            return noise * 0
        if kind == "sparse":
            return noise * (torch.rand(SHAPES[i], generator=self.generator) < 0.1)
        if kind == "large":
            return noise * 10
        return noise if kind == "noise" else noise + self.gradients[i]

    def _step_both(self, clip: float | None, scaled: str) -> None:
        if clip is not None:
            if scaled:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            nn.utils.clip_grad_norm_(self.refs, clip)
            for i, ref in enumerate(self.refs):  # clipping has rounded half-precision gradients
                p = self.model.weight(i)
                if p.grad is not None and p.element_size() < 4 and p.grad.isfinite().all():
                    assert (p.grad.float() - ref.grad).abs().mean() <= 0.02 * ref.grad.abs().mean() + 1e-6
                    ref.grad = p.grad.float()
        if scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.step_is_compiled:
            before = [p.detach().clone() for p in self.model.parameters()]
            try:
                self.compiled()
            except (RuntimeError, AssertionError):
                # A layout has changed, for which TorchDynamo has no guard: the op or Inductor's code refuses it.
                assert all(map(torch.equal, self.model.parameters(), before))
                self._compile()
                self.compiled()
        else:
            self.optimizer.step()
        if scaled == "infinite":
            return
        norm = self.optimizer.param_groups[0].get("max_grad_norm")
        if norm is not None:
            nn.utils.clip_grad_norm_(self.refs, norm)
        self.plain.step()

    def _assert_unchanged(self, before: list[tuple[Tensor, Tensor]]) -> None:
        for i, (p, _) in enumerate(before):
            assert torch.equal(self.model.weight(i).detach(), p), f"w{i}: an infinite gradient was stepped"

    def _compare(self, before: list[tuple[Tensor, Tensor]]) -> None:
        for i, (ref, (_, start)) in enumerate(zip(self.refs, before, strict=True)):
            group, p = self.group_of(i), self.model.weight(i).detach().float()
            if ref.grad is None:
                assert torch.equal(p, before[i][0].float()), f"w{i}: stepped without a gradient"
                continue
            finite = ref.detach().isfinite()
            assert p[finite].isfinite().all(), f"w{i}: not finite where the plain step is"
            error, update = (p - ref.detach())[finite].abs(), (ref.detach() - start)[finite].abs()
            if not error.numel():
                continue
            share = self.errors[i]
            if i in self.quiet and share > self.error_of(i, 32):
                share = QUIET_ERROR
            unit, size = ROUNDING[self.model.weight(i).dtype], ref.detach()[finite].abs()
            mean, largest = self.budgets[i]
            if group.get("master_weights") == "bf16+8":
                mean, largest = mean + float(size.mean()) * 2.0**-15, largest + float(size.max()) * 2.0**-15
            mean, largest = mean + share * float(update.mean()), largest + 30 * share * float(update.max())
            self.budgets[i] = mean, largest
            allowed = mean + float(size.mean()) * unit + 1e-7
            assert float(error.mean()) <= allowed, f"w{i}: off by {float(error.mean()):.3g}, allowed {allowed:.3g}"
            allowed = largest + float(size.max()) * unit + 1e-7
            assert float(error.max()) <= allowed, f"w{i}: one off by {float(error.max()):.3g}, allowed {allowed:.3g}"

    # ---- edits of weights

    @rule(i=numbers, edit=sampled_from([*training_edits.VALUES]), seed=seeds)
    def edit_values(self, i: int, edit: str, seed: int) -> None:
        training_edits.VALUES[edit](self.model.weight(i), seed)
        self.copy_to_plain(i)

    @rule(i=numbers, edit=sampled_from([*training_edits.STORAGE]))
    def edit_storage(self, i: int, edit: str) -> None:
        """Moves a weight's values in memory. States must follow them."""
        training_edits.STORAGE[edit](self.model.weight(i))

    @rule(i=numbers, seed=seeds)
    def swap_in_and_out(self, i: int, seed: int) -> None:
        """Averaged weights for an evaluation, and back."""
        p = self.model.weight(i)
        before = p.detach().clone()
        with torch.no_grad():
            p.copy_(torch.randn_like(p) * 0.1)
            p.copy_(before)

    @rule()
    def take_snapshot(self) -> None:
        self.snapshot = copy.deepcopy(self.model.state_dict())

    @rule()
    def load_weights(self) -> None:
        snapshot = {k: x.to(self.model.weight(0).dtype) for k, x in copy.deepcopy(self.snapshot).items()}
        self.model.load_state_dict(snapshot)
        for i in range(len(SHAPES)):
            self.copy_to_plain(i)

    @rule(i=numbers)
    def prune_weight(self, i: int) -> None:
        self.model.weight(i).data = self.model.weight(i).data.contiguous()  # torch's function makes views
        prune.l1_unstructured(self.model, f"w{i}", amount=0.3)
        prune.remove(self.model, f"w{i}")
        self.copy_to_plain(i)

    @precondition(lambda self: self.is_unwrapped)
    @rule(dtype=sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    def cast(self, dtype: torch.dtype) -> None:
        if any(g["master_weights"] or g["stochastic_rounding"] for g in self.optimizer.param_groups):
            return
        self.model.to(dtype)
        for i in range(len(SHAPES)):
            self.copy_to_plain(i)

    # ---- groups and options

    @precondition(lambda self: self.is_unwrapped)
    @rule(i=numbers, in_place=booleans())
    def replace_parameter(self, i: int, in_place: bool) -> None:
        old = self.model.weight(i)
        new = nn.Parameter(old.detach().clone(memory_format=torch.preserve_format))
        self.model._parameters[f"w{i}"] = new
        group = self.group_of(i)
        params = [new if p is old else p for p in group["params"]]
        if in_place:
            group["params"][:] = params
        else:
            group["params"] = params

    @precondition(lambda self: self.is_unwrapped and self.name != "Muon")  # Muon's two groups have different states
    @rule(i=numbers)
    def move_between_groups(self, i: int) -> None:
        k = next(k for k, group in enumerate(self.members) if i in group)
        if len(self.members[k]) == 1:
            return
        p, ref = self.model.weight(i), self.refs[i]
        was_kept = self.is_kept(i)
        # Compares the groups with the last step's: a parameter that was replaced and is moved now would be unknown.
        self.optimizer.state_dict()
        for groups, x in ((self.optimizer.param_groups, p), (self.plain.param_groups, ref)):
            groups[k]["params"] = [q for q in groups[k]["params"] if q is not x]
            groups[1 - k]["params"] = [*groups[1 - k]["params"], x]
        self.members[k].remove(i)
        self.members[1 - k].append(i)
        self.optimizer.state_dict()  # compares the groups again, before the next edit of them
        self._note_storage(i, was_kept)

    @rule(k=integers(0, 1), change=sampled_from(training_edits.OPTIONS))
    def change_option(self, k: int, change: tuple[str, Any]) -> None:
        name, value = change
        group = self.optimizer.param_groups[k]
        if name not in group:
            return
        group[name] = value
        if name in SHARED_OPTIONS:
            self.plain.param_groups[k][name] = value
        self._note_group_storage(k)

    def _note_group_storage(self, k: int) -> None:
        for i in self.members[k]:
            self._note_storage(i, self.is_kept(i))

    def _note_storage(self, i: int, was_kept: bool) -> None:
        """Raises the allowed error, which never falls: moments that were rounded to fewer bits keep that error."""
        self.errors[i] = max(self.errors[i], self.error_of(i, self.group_of(i)["state_bits"]))
        if self.is_kept(i) and not was_kept:
            self.copy_to_plain(i)

    @precondition(lambda self: self.is_unwrapped and self.model.weight(0).dtype == torch.bfloat16)
    @rule(k=integers(0, 1), weights=sampled_from([None, "bf16+16", "bf16+8", "stochastic"]))
    def change_weights(self, k: int, weights: str | None) -> None:
        if any(self.model.weight(i).dtype != torch.bfloat16 for i in self.members[k]):
            return
        kept_before = [self.is_kept(i) for i in self.members[k]]
        stochastic = weights == "stochastic"
        change = {"stochastic_rounding": stochastic, "master_weights": None if stochastic else weights}
        self.optimizer.param_groups[k].update(change)
        for i, was_kept in zip(self.members[k], kept_before, strict=True):
            if was_kept and self.is_kept(i):  # kept in another way, of which one may have 24 bits
                mean, largest = self.budgets[i]
                size = self.refs[i].detach().abs()
                self.budgets[i] = mean + float(size.mean()) * 2.0**-15, largest + float(size.max()) * 2.0**-15
            self._note_storage(i, was_kept)

    @precondition(lambda self: "backward" not in self.wrapper)
    @rule(norm=one_of(just(None), sampled_from([0.05, 1.0])))
    def change_norm(self, norm: float | None) -> None:
        for group in self.optimizer.param_groups:
            group["max_grad_norm"] = norm
