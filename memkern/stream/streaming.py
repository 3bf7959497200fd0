"""Keeps weights on the host: fully_shard with CPUOffloadPolicy by block, for one process and for several.

With one process torch's ``fully_shard`` prefetches no weights, and it never tells when a block's gradients are on their
way to the host. This module adds both, by hooks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils._pytree import tree_leaves

from ..blocks.block_lists import block_lists
from ..optim.arrivals import Arrivals
from ..optim.offload import pinned
from ..techniques.options import OptionError, not_allowed
from .prefetch import Group, Prefetch, owners

WITHOUT_BLOCKS = "None for a model without a list of like blocks"


def check(model: nn.Module) -> None:
    """Raises OptionError for a model whose weights cannot be streamed. Changes nothing."""
    for name, module in model.named_modules():
        why = None
        if hasattr(module, "set_requires_gradient_sync"):
            why = "is sharded by fully_shard already"
        elif getattr(module, "max_norm", None) is not None and isinstance(module, nn.Embedding):
            why = "has max_norm, which writes weights in the forward pass"
        if why is not None:
            raise OptionError("weights_on_host", f"'layers' given; allowed: None, as {name or 'the model'} {why}")
    if not any(True for _ in block_lists(model)):
        raise not_allowed("weights_on_host", "layers", WITHOUT_BLOCKS)
    for name, p in model.named_parameters():
        why = None
        if p.is_meta:
            why = "is on the meta device"
        elif not p.dim() or not p.is_contiguous():
            why = f"{'is not contiguous' if p.dim() else 'has no dimension'}, which fully_shard does not take"
        if why is not None:
            raise OptionError("weights_on_host", f"'layers' given; allowed: None, as {name} {why}")
    earlier: set[Tensor] = set()  # parameters of the groups before
    for module, params in _params_of_groups(model):
        dtypes = {p.dtype for p in params if p.requires_grad}
        why = None
        if len(dtypes) > 1:
            why = f"are in {', '.join(sorted(map(str, dtypes)))}: fully_shard needs one dtype"
        elif not earlier.isdisjoint(params):
            why = "belong to another block, or to the model itself, too: fully_shard needs them in one place"
        if why is not None:
            text = f"'layers' given; allowed: None, as parameters of {type(module).__name__} {why}"
            raise OptionError("weights_on_host", text)
        earlier.update(params)


def _modules_of_groups(model: nn.Module) -> list[nn.Module]:
    """The modules that are parameter groups of their own beside the model, in the order of the forward pass.

    An embedding or a head that the model names (get_input_embeddings, get_output_embeddings) is a group, unless
    another module has its weight, too. All else outside the blocks belongs to the model itself.
    """
    blocks = [block for blocks in block_lists(model) for block in blocks]
    first: list[nn.Module] = []
    last: list[nn.Module] = []
    inside = {module for block in blocks for module in block.modules()}
    named = next((m for m in model.modules() if hasattr(m, "get_output_embeddings")), None)
    for method, modules in (("get_input_embeddings", first), ("get_output_embeddings", last)):
        module: Any = None
        with contextlib.suppress(NotImplementedError, AttributeError):
            module = getattr(named, method)()
        if isinstance(module, nn.Module) and module not in inside and not _is_shared(module, model):
            modules.append(module)
    return [*first, *blocks, *last]


def _needs_no_weights(module: nn.Module) -> bool:
    """Whether a module's backward pass reads no weights."""
    return isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward


def _is_shared(module: nn.Module, model: nn.Module) -> bool:
    """Whether a parameter of a module is another module's, too."""
    own = {*module.parameters()}
    others = {*model.modules()} - {*module.modules()}
    return any(p in own for other in others for p in other.parameters(recurse=False))


def _params_of_groups(model: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """The module of each group, the model last, and its parameters."""
    groups = _modules_of_groups(model)
    for module in (*groups, model):
        yield module, [p for owner in owners(module, {*groups}) for p in owner.parameters(recurse=False)]


def process_group() -> None:
    """Makes a process group of this process alone, unless there is one; it ends with the process.

    Raises:
        RuntimeError: torchrun has started several processes, whose group is to be made first.
    """
    if dist.is_initialized():
        return
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise RuntimeError(f"this is one of {world} processes: call torch.distributed.init_process_group() first")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(end_process_group, dist.group.WORLD)


def end_process_group(group: Any) -> None:
    """Ends a process group that :func:`process_group` has made, if it is there still."""
    if dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()


def pins(device: torch.device, pin_memory: bool) -> bool:
    """Whether the host's memory is to be pinned: not where the device is the CPU, as nothing is copied then."""
    return pin_memory and device.type != "cpu"


def _shard_bytes(p: Tensor, world: int) -> int:
    """The bytes of this rank's shard."""
    rows = p.shape[0] if p.dim() else 1
    rows_per_rank = -(-rows // world)
    own_rows = max(0, min(rows_per_rank, rows - dist.get_rank() * rows_per_rank))
    return own_rows * (p.nbytes // max(rows, 1))


def _empty_host_cache() -> None:
    """Frees the pinned memory that ``fully_shard`` has allocated tensor by tensor, and that torch's allocator keeps."""
    for module, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        if hasattr(module, name):
            getattr(module, name)()
            return


@torch.no_grad()
def _move(group: Group, slabs: pinned.Slabs) -> None:
    """Moves a group's shards, as ``fully_shard`` has made them, into slabs."""
    for p in group.params:
        p._local_tensor = slabs.copy_of(p._local_tensor)  # type: ignore[attr-defined]
    for owner in group.owners:
        owner.load_state_dict({}, strict=False)  # a hook of fully_shard then takes over the new shards


def stream(model: nn.Module, device: torch.device, *, pin_memory: bool = True) -> None:
    """Keeps a model's weights on the host: ``fully_shard`` with CPUOffloadPolicy of its blocks and of itself, in place.

    Args:
        device: where the weights of a block go while it runs. The model may be on the host or there.
        pin_memory: whether the weights on the host are pinned, where the device is not the CPU: all bytes of the
            weights, in slabs of a GiB (:class:`.pinned.Slabs`), and the gradients that are on the host, each
            rounded up to a power of two by torch's allocator. Without it the copies are slower, and do not overlap.

    Raises:
        OptionError: the model cannot be streamed. Nothing is changed then.
        RuntimeError: the host gives no more pinned memory. The model is to be built anew.
    """
    check(model)
    process_group()
    if device.type != "cpu" and device.index is not None:
        torch.get_device_module(device).set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    pinned_memory = pins(device, pin_memory)
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=pinned_memory)}
    groups = _modules_of_groups(model)
    modules = {*groups}
    sizes = [_shard_bytes(p, mesh.size()) for p in model.parameters()] if pinned_memory else []
    try:
        slabs = pinned.Slabs(sizes)
        for module in groups:
            # The last group's weights stay on the device after the forward pass: the backward pass begins with them.
            fully_shard(module, reshard_after_forward=module is not groups[-1], **options)
            if pinned_memory:
                _move(Group(module, modules), slabs)
        fully_shard(model, **options)
        if pinned_memory:
            _move(Group(model, modules), slabs)
            _empty_host_cache()
    except RuntimeError as error:
        if not pinned_memory:
            raise
        raise RuntimeError(
            f"the weights, {sum(sizes) / 2**30:.1f} GiB, could not be moved to pinned memory of the host ({error}): "
            "raise the limit of locked memory (ulimit -l, or the container's memlock), or give pin_memory=False, with "
            "which copies are slower and do not overlap; the model is to be built anew"
        ) from error
    for module in groups:
        if _needs_no_weights(module):
            module.set_unshard_in_backward(False)  # type: ignore[operator]
    StreamedModel(model, groups, device)


class StreamedModel:
    """A model whose weights are on the host: its parameter groups, and hooks that begin copies and wait for them."""

    def __init__(self, model: Any, groups: list[Any], device: torch.device, streams: Any = None) -> None:
        self.model, self.device = model, device
        self._name = type(model).__name__.removeprefix("FSDP")  # for errors
        self._in_forward = False  # whether a forward pass of the model has begun and not ended
        self.streams = streams or torch.get_device_module(device)
        modules = {*groups}
        self.groups = [Group(module, modules, not _needs_no_weights(module)) for module in groups]
        self.root = Group(model, modules)
        all_groups = self.all_groups = (*self.groups, self.root)
        self.down = self.streams.Stream(device)  # of gradients' copies to the host
        self.prefetch = Prefetch(device, self.streams)
        self.arrivals = Arrivals(lambda: [p for group in all_groups for p in group.params], self.down.record_event)
        for group in self.groups:
            self._hook(group)
        self._hook_root()
        if device.type != "cpu":
            for group in self.all_groups:
                self._copy_down(group)

    def _copy_down(self, group: Group) -> None:
        """Makes ``fully_shard`` copy a group's gradients to the host in ``down``, so that the copies' end is known."""
        group.module.set_all_reduce_hook(lambda gradients: gradients.record_stream(self.down), stream=self.down)

    # ---- hooks

    def _hook(self, group: Group) -> None:
        """Hooks that copy a group's weights before its passes, and note when copies of its gradients have begun."""
        places: list[tuple[list[Group], int]] = []  # one item: what the last call of Prefetch.before_forward returned

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if _is_backward():
                return  # a checkpoint runs the module again, whose weights are there for its backward pass
            if not self._in_forward:
                raise RuntimeError(
                    f"a {type(module).__name__} was called outside of the forward pass of the {self._name} that "
                    "memkern.apply was given, and whose weights are on the host: call that one, or apply the "
                    "techniques to a module whose forward has all that reads weights, the loss in chunks too"
                )
            places[:] = [self.prefetch.before_forward(group)]
            if torch.is_grad_enabled():
                for x in _with_gradient((args, kwargs)):
                    # When x has its gradient, fully_shard has begun the copies of the group's gradients.
                    x.register_hook(lambda _: self.arrivals.arrived(group.params))
                    break

        def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            if _is_backward():
                return
            order, place = places[-1]
            for x in _with_gradient(out):
                x.register_hook(lambda _: self._begin_backward(order, place))

        group.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        group.module.register_forward_hook(after, with_kwargs=True)

    def _hook_root(self) -> None:
        """Hooks at the beginning and the end of the whole model's forward pass."""

        def before(module: nn.Module, args: Any) -> None:
            if _is_backward():
                return
            sharded = (p for group in self.all_groups if not group.is_unsharded for p in group.params)
            backward_was_interrupted = self.arrivals.reset(sharded)
            forward_was_interrupted = self._in_forward
            if backward_was_interrupted or (forward_was_interrupted and hasattr(self.model, "reset_iter_state")):
                self._forget()
            elif forward_was_interrupted:
                self.model.state_dict()  # in a torch without reset_iter_state this brings the shards back
            self._in_forward = True
            self._reshard()
            self.prefetch.begin_forward()
            for group in self.all_groups:
                group.note_params()
                self.arrivals.follow(group.params)

        def after(module: nn.Module, args: Any, out: Any) -> None:
            if _is_backward():
                return
            self._in_forward = False
            self.prefetch.end_forward()
            if not torch.is_grad_enabled():
                self._reshard()
            for x in _with_gradient(out):
                x.register_hook(lambda _: self.arrivals.hold(self.root.params))

        for group in self.all_groups:
            self.arrivals.follow(group.params)
        self.model.register_forward_pre_hook(before, prepend=True)
        self.model.register_forward_hook(after)

    def _reshard(self) -> None:
        """Frees the weights on the device. The next pass copies them anew, as a step on the host may change them."""
        for group in self.all_groups:
            group.module.reshard()

    def _forget(self) -> None:
        """Forgets a backward pass that was interrupted, with the gradients that it left on the device."""
        if not hasattr(self.model, "reset_iter_state"):
            raise RuntimeError(
                "a backward pass of this model was interrupted, and fully_shard of this torch cannot forget it: build "
                "the model again, or use torch 2.13 or newer"
            )
        gradients = [(p, p.grad) for group in self.all_groups for p in group.params]
        for group in self.all_groups:
            group.forget_gradients()
        self.model.reset_iter_state()
        for p, gradient in gradients:
            p.grad = gradient  # of earlier passes: reset_iter_state of torch 2.15 frees it, too

    def _begin_backward(self, order: list[Group], place: int) -> None:
        """To be called before a group's backward pass."""
        self.prefetch.before_backward(order, place)
        self.arrivals.hold(order[place].params)


def _is_backward() -> bool:
    """Whether a backward pass is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def _with_gradient(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested arguments or results that get a gradient."""
    return (x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.requires_grad)
