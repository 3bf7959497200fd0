"""LAMB and LARS step as timm's do."""

import pytest

from tests.support import timm_optim
from tests.support.helpers import make_params, train
from tests.support.optimizers import cases

OF_TIMM = cases("of_timm")


@pytest.mark.parametrize("name", OF_TIMM)
def test_timm_moves_parameters_alike(name: str) -> None:
    spec, options = OF_TIMM[name]
    try:
        timm = timm_optim.load(spec.timm)
    except ModuleNotFoundError:
        pytest.skip("timm is not installed; its update is in tests/support/optimizers too")
    runs = []
    for make, class_options in ((spec.cls, {}), (timm, spec.timm_options)):
        params = make_params(seed=3)
        optimizer = make(params, **class_options | options)
        runs.append(train(optimizer, 50)["params"])
    for ours, theirs in zip(*runs, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
