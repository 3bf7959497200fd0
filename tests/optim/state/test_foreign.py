"""Arguments of bitsandbytes' and apex' optimizers, and GlobalOptimManager, raise errors that say what to write."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from memkern import optim
from tests.support.helpers import OPTIMIZERS, make_params, name_of, train

# an argument of another library, what the error says to write
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"optim_bits": 8}, r"optim_bits \(bitsandbytes's\): write state_bits=8"),
    ({"optim_bits": 32}, "write state_bits=32"),
    ({"is_paged": True}, "states are not paged"),
    ({"percentile_clipping": 5}, "write max_grad_norm="),
    ({"block_wise": True}, "always block-wise"),
    ({"args": None}, "write its entries as arguments"),
    ({"max_unorm": 1.0}, "trust_clip=True"),
    ({"adam_w_mode": True}, r"adam_w_mode \(apex's\): take memkern.optim.AdamW for True"),
    ({"set_grad_none": True}, "zero_grad"),
    ({"use_nvlamb": True}, "always_adapt=True"),
    ({"eps_inside_sqrt": False}, "eps is added to the root"),
]


def argument_id(value: Any) -> str | None:
    return next(iter(value)) if isinstance(value, dict) else name_of(value)


@pytest.mark.feature("bitsandbytes", "arguments of its optimizers raise and name memkern's")
@pytest.mark.parametrize(
    ("build", "argument", "cure"),
    [*((optim.AdamW8bit, *case) for case in ARGUMENTS), *((build, *ARGUMENTS[0]) for build in OPTIMIZERS)],
    ids=argument_id,
)
def test_arguments_of_other_libraries_raise(build: type, argument: dict[str, Any], cure: str) -> None:
    with pytest.raises(TypeError, match=rf"memkern\.optim\.{build.__name__} has no argument .*{cure}"):
        build(make_params(), **argument)
    optimizer = build(make_params())
    with pytest.raises(TypeError, match=cure):
        optimizer.add_param_group({"params": make_params(), **argument})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("build", [b for b in OPTIMIZERS if "Adam" in b.__name__], ids=name_of)
def test_bias_correction_is_an_option_of_lamb_alone(build: type) -> None:
    with pytest.raises(TypeError, match="always have it"):
        build(make_params(), bias_correction=True)
    optim.LAMB(make_params(), bias_correction=False)


def test_memkerns_global_optim_manager_raises() -> None:
    from memkern.optim import GlobalOptimManager

    for use in (GlobalOptimManager, GlobalOptimManager.get_instance):
        with pytest.raises(TypeError, match=r"no GlobalOptimManager: .*'state_bits': 32.*memkern\.optim\.param_groups"):
            use()


@pytest.mark.feature("bitsandbytes", "GlobalOptimManager's options of a module raise and name groups")
def test_overrides_in_bitsandbytes_global_optim_manager_raise() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    embedding, layer = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 64)
    manager.register_module_override(embedding, "weight", {"optim_bits": 32})
    try:
        with pytest.raises(ValueError, match=r"options \{'optim_bits': 32\} for the weight of Embedding\(100, 64\)"):
            optim.AdamW8bit([*layer.parameters(), *embedding.parameters()])
        train(optim.AdamW8bit(layer.parameters()), 1)
    finally:
        manager.module_weight_config_triple.clear()
        gc.collect()
    optim.AdamW8bit(embedding.parameters())
