"""A plan predicts bytes by category: optimizer states, gradients of a step in backward, states on the host."""

import torch

import memkern
from memkern.planner.prediction import CATEGORIES, MARGIN
from memkern.techniques.options import Techniques
from tests.support.planned_models import DEPTH, WIDTH, Stack, predictor_of


def test_categories_add_up_and_are_as_counted() -> None:
    predictor = predictor_of(Stack(), torch.zeros(2, WIDTH))
    count = DEPTH * (8 * WIDTH * WIDTH + 5 * WIDTH)  # a block: two matrices of 4 * WIDTH**2 elements, and their biases
    static_bytes = predictor.static_bytes(Techniques(state_bits=8))
    assert static_bytes.count == count
    assert static_bytes.parameters == static_bytes.gradients == 4 * count
    assert 2 * count < static_bytes.optimizer < 2.2 * count
    prediction = predictor.predict(Techniques(micro_batch=100))
    assert tuple(prediction.categories) == CATEGORIES
    assert prediction.peak == sum(prediction.categories.values()) == max(prediction.phases.values())
    # Two fp32 moments, and an fp32 step counter for each of a block's four tensors.
    assert prediction.categories["optimizer"] == 8 * count + 4 * 4 * DEPTH
    for master, size in ((None, 0), ("bf16+16", 2), ("bf16+8", 1)):
        half = predictor.static_bytes(Techniques(precision="bf16", master_weights=master))
        assert (half.parameters, half.errors) == (2 * count, size * count)


def test_the_batch_is_there_throughout_the_step() -> None:
    predictor = predictor_of(torch.nn.Linear(4096, 1), torch.zeros(2, 4096))
    one, many = (predictor.predict(Techniques(micro_batch=size)).phases for size in (1, 1001))
    assert all(many[phase] - one[phase] >= 1000 * 4 * 4096 for phase in many)


def test_torchs_optimizers_step_all_parameters_of_a_gpu_together() -> None:
    on_gpu, on_cpu = (predictor_of(Stack(), torch.zeros(2, WIDTH), device) for device in ("cuda", "cpu"))
    techniques = Techniques(optimizer="torch-adamw")
    sizes = on_gpu.static_bytes(techniques)
    assert sizes.step_temporaries >= sizes.parameters > 2 * on_cpu.static_bytes(techniques).step_temporaries


def test_bytes_of_muons_momentum() -> None:
    predictor = predictor_of(Stack(), torch.zeros(2, WIDTH))
    static_bytes = predictor.static_bytes(Techniques(optimizer="muon", state_bits=8))
    matrices, vectors = DEPTH * 8 * WIDTH * WIDTH, DEPTH * 5 * WIDTH
    assert static_bytes.count == matrices + vectors
    counters = 4 * 4 * DEPTH  # an fp32 step counter for each of a block's four tensors
    momentum = matrices + matrices // 128 * 4  # a byte per element, and an fp32 scale for each block of 128
    assert static_bytes.optimizer == momentum + 8 * vectors + counters
    # The updates in bf16, and what the products of a matrix take.
    assert 2 * matrices < static_bytes.step_temporaries < 2 * matrices + 10 * 2 * 4 * WIDTH * WIDTH
    plan = memkern.plan(
        Stack(), memory="4GiB", inputs=torch.zeros(2, WIDTH), device="cpu", techniques={"optimizer": "muon"}
    )
    assert "make_optimizer(memkern.optim.muon_groups(model, lr=lr, adamw_lr=lr), techniques" in str(plan)


def test_a_step_in_backward_frees_gradients_and_accumulation_holds_them() -> None:
    predictor = predictor_of(Stack(), torch.zeros(2, WIDTH))
    static_bytes = predictor.static_bytes(Techniques())
    plain, in_backward, accumulating = (
        predictor.predict(Techniques(**changes)) for changes in ({}, {"step_in_backward": True}, {"accumulation": 4})
    )
    margin = 1 + MARGIN["cpu"]  # predicted temporaries over the temporaries that were counted
    assert plain.phases["step"] - plain.phases["begin"] == int(margin * static_bytes.gradients)
    assert in_backward.categories["gradients"] <= 2 * static_bytes.largest_gradient
    assert accumulating.categories["gradients"] >= static_bytes.gradients
    growth = accumulating.phases["forward"] - plain.phases["forward"]
    assert abs(growth - margin * static_bytes.gradients) <= 1


def test_offload_leaves_the_gpu_without_states() -> None:
    predictor = predictor_of(Stack(), torch.zeros(2, WIDTH), "cuda")
    on_device, on_host = predictor.predict(Techniques()), predictor.predict(Techniques(offload="cpu"))
    assert on_host.categories["optimizer"] == 0
    assert on_host.host >= on_device.categories["optimizer"] > 0
    assert on_host.seconds > on_device.seconds
    offloaded = {"precision": "bf16", "offload": "cpu"}
    count = predictor.static_bytes(Techniques()).count
    states = predictor.predict(Techniques(offload="device"))
    assert states.categories["optimizer"] == on_device.categories["optimizer"]  # all states fit in one bucket
    assert on_device.categories["optimizer"] <= states.host <= 1.03 * on_device.categories["optimizer"] + 1
    assert on_device.seconds < states.seconds
    copied, in_codes = (predictor.predict(Techniques(**offloaded, master_weights=m)).host for m in (None, "bf16+8"))
    # On the host, fp32 copies of the weights take 4 bytes each; bf16 weights with their errors take 2 + 1.
    assert copied - in_codes == (4 - 2 - 1) * count
