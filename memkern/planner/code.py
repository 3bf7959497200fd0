"""A training loop with given techniques, as lines of Python."""

from __future__ import annotations

from collections.abc import Iterator

from ..options import Techniques

CHECKPOINTS = ("checkpointing", "checkpoint_bits", "checkpoint_every")


def training_loop(
    t: Techniques, loss: str, device: str, sample: str, devices: int = 1, tensor_parallel: int = 1
) -> str:
    """The lines of a training loop with these techniques.

    loss: the expression for the loss of ``batch``. sample: what a batch consists of, "sequence" or "example".
    """
    body = [f"batch = next(batches)  # {t.micro_batch} {sample}{'s' * (t.micro_batch > 1)}"]
    forward = _loss_lines(t, loss)
    if t.autocast:
        dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[t.autocast]
        forward = [f'with torch.autocast("{device}", {dtype}):', *_indented(forward)]
    body += forward
    scaled = t.precision == "fp16-mixed"
    if t.accumulation > 1:
        mean = f"(loss / {t.accumulation})"
        body.append(f"scaler.scale{mean}.backward()" if scaled else f"{mean}.backward()")
        body = [f"for _ in range({t.accumulation}):", *_indented(body)]
    else:
        backward = "scaler.scale(loss).backward()" if scaled else "loss.backward()"
        body.append(backward + ("  # takes the steps" if t.step_in_backward else ""))
    body += ["scaler.step(optimizer)", "scaler.update()"] if scaled else ["optimizer.step()"]
    body.append("optimizer.zero_grad()")
    set_up = ["import torch, memkern", "", *_model_lines(t)]
    if t.weights_on_host:
        set_up += _streaming_lines(t)
    if devices > 1:
        set_up += [
            f"# torchrun --nproc-per-node {devices}; blocks: the model's, such as model.model.layers",
            "for module in (*blocks, model):",
            "    torch.distributed.fsdp.fully_shard(module)",
        ]
    if tensor_parallel > 1:
        set_up += [
            f"# torchrun --nproc-per-node {tensor_parallel}; model: from transformers' from_pretrained, given",
            '# distributed_config=transformers.distributed.DistributedConfig(tp_plan="auto")',
        ]
    set_up.append(_optimizer_line(t))
    if scaled:
        set_up.append(f'scaler = torch.amp.GradScaler("{device}")')
    return "\n".join([*set_up, "for step in range(steps):", *_indented(body)])


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _model_lines(t: Techniques) -> Iterator[str]:
    if t.precision == "bf16":
        yield "model.to(torch.bfloat16)"
    if t.compile:
        names = ("compile", "saved_bits", "activation_bits", "memory_budget", "linear_share", *CHECKPOINTS)
        plain = Techniques()
        given = {name: getattr(t, name) for name in names if getattr(t, name) != getattr(plain, name)}
        options = [f"{name}={value!r}" for name, value in given.items()]
        yield f"memkern.apply(model, memkern.Techniques({', '.join(options)}))"
        yield from _loss_chunk_lines(t)
        return
    bits, share = t.activation_bits, t.linear_share
    options = [repr(bits)]
    options += [f"linear={share:g}"] if share is not None else []
    if bits or share is not None:
        yield f"memkern.compress(model, {', '.join(options)})"
    if t.checkpointing:
        own = f", bits={t.checkpoint_bits}" if t.checkpoint_bits else ""
        own += f", every={t.checkpoint_every}" if t.checkpoint_every > 1 else ""
        yield f"memkern.checkpoint_blocks(model{own})"
    yield from _loss_chunk_lines(t)


def _loss_chunk_lines(t: Techniques) -> Iterator[str]:
    if t.loss_chunk and not t.weights_on_host:
        yield (
            "loss_fn = memkern.nn.LinearCrossEntropy.from_linear("
            f"model.get_output_embeddings(), chunk_size={t.loss_chunk})"
        )


def _streaming_lines(t: Techniques) -> Iterator[str]:
    """The model is on the host. What is streamed is called in a forward pass, so a loss that reads weights is in it."""
    streamed = "model"
    if t.loss_chunk:
        streamed = "with_loss"
        yield from (
            "class WithLoss(torch.nn.Module):",
            "    def __init__(self, model):",
            "        super().__init__()",
            "        self.model, head = model, model.get_output_embeddings()",
            f"        self.loss = memkern.nn.LinearCrossEntropy.from_linear(head, chunk_size={t.loss_chunk})",
            "    def forward(self, batch):",
            '        hidden = self.model.base_model(batch["input_ids"], use_cache=False).last_hidden_state',
            '        return self.loss(hidden[:, :-1], batch["labels"][:, 1:])',
            "",
            "with_loss = WithLoss(model)",
        )
    precision = f'precision="{t.precision}", ' if t.precision != "fp32" else ""
    yield f'memkern.apply({streamed}, memkern.Techniques({precision}weights_on_host="{t.weights_on_host}"))'


def _optimizer_line(t: Techniques) -> str:
    params, own = "model.parameters()", ["lr=lr"]
    if t.optimizer_class == "Muon":
        params, own = "memkern.optim.muon_groups(model, lr=lr, adamw_lr=lr)", []
    options = ", ".join([*own, *(f"{name}={value!r}" for name, value in t.optimizer_options.items())])
    name = f"{'torch' if t.is_torch else 'memkern'}.optim.{t.optimizer_class}"
    if not t.is_torch:
        options += f", state_bits={t.state_bits}"
        options += f', master_weights="{t.master_weights}"' if t.master_weights else ""
    if t.step_in_backward:
        return f"optimizer = memkern.optim.StepInBackward({name}, {params}, {options})"
    if t.offload:
        if not t.is_torch:
            options += ", offload_gradients=True" + ("" if t.host_copies else ", host_dtype=None")
        return f"optimizer = memkern.optim.HostOffload({name}, {params}, {options})"
    return f"optimizer = {name}({params}, {options})"


def _loss_lines(t: Techniques, loss: str) -> list[str]:
    if not t.loss_chunk:
        return [f"loss = {loss}"]
    if t.weights_on_host:
        return ["loss = with_loss(batch)"]
    return [
        'hidden = model.base_model(batch["input_ids"], use_cache=False).last_hidden_state',
        'loss = loss_fn(hidden[:, :-1], batch["labels"][:, 1:])',
    ]
