"""Fake tensors take values from constants, or assumed ones, for models whose shapes depend on data."""

from collections.abc import Callable, Iterator

import pytest
import torch

from memkern.planner.fake_mode import FakeMode
from memkern.planner.values import LARGEST, Values


@pytest.fixture
def scores() -> Iterator[torch.Tensor]:
    """A tensor without known values, as a router's scores are, inside of the modes that follow values."""
    mode = FakeMode()
    values = Values(mode)
    with mode, mode.inside(values.around):
        x = torch.zeros(6, 4)
        values.forget(x)
        yield x


def test_masks_select_by_known_values(scores: torch.Tensor) -> None:
    """A mask made of token ids selects as many elements as match; one made of scores selects all."""
    ids = torch.tensor([3, 1, 3, 0, 2, 3])
    assert scores[ids == 3].shape == (3, 4)
    assert [x.tolist() for x in torch.where(ids == 3)] == [[0, 2, 5]]
    assert ids.repeat_interleave(ids).shape == (12,)
    assert scores[scores > 0].shape == (24,)
    assert (scores > 0).nonzero().shape == (24, 2)


def test_checks_pass_and_sums_have_no_value(scores: torch.Tensor) -> None:
    assert not (scores > 0).any()
    assert (scores > 0).all()
    assert scores.isnan().sum() == 0
    assert not scores[0, 0] > 0
    for number in (scores.sum(), torch.zeros(LARGEST + 1, dtype=torch.long)[0]):
        with pytest.raises(Exception, match="local_scalar_dense"):
            number.item()


# Writes of values that are unknown, into sizes whose values are known.
UNKNOWN_WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "all": lambda sizes, unknown: sizes.copy_(unknown),
    "by a known mask": lambda sizes, unknown: sizes.__setitem__(torch.arange(4) > 2, unknown.sum()),
    "by an unknown mask": lambda sizes, unknown: sizes.__setitem__(unknown > 0, 7),
    "fill": lambda sizes, unknown: sizes.masked_fill_(unknown > 0, 7),
    "scatter": lambda sizes, unknown: sizes.scatter_(0, unknown, 7),
}


@pytest.mark.parametrize("write", UNKNOWN_WRITES)
def test_writes_in_place_reach_views(scores: torch.Tensor, write: str) -> None:
    sizes = torch.zeros(4, dtype=torch.long)
    last = sizes[2:]
    sizes[3] = 5
    assert last.tolist() == [0, 5]
    UNKNOWN_WRITES[write](sizes, scores.sum(0).long())
    for x in (sizes, last):
        with pytest.raises(Exception, match="local_scalar_dense"):
            x[0].item()


def through_a_view_of_other_strides(unknown: torch.Tensor) -> torch.Tensor:
    """zeros_like has the strides of its argument, and its values have not: they cannot be viewed alike."""
    x = torch.zeros_like(unknown.t(), dtype=torch.long)
    x.t().view(-1).fill_(unknown.sum().long())
    return x


def through_a_large_view(unknown: torch.Tensor) -> torch.Tensor:
    x = torch.arange(6)
    x.expand(LARGEST, 6)[0].copy_(unknown[:, 0])
    return x


def into_one_element(unknown: torch.Tensor) -> torch.Tensor:
    """FakeTensorMode has values of its own of such constants."""
    x = torch.tensor([3])
    x[unknown[0, :1] > 0] = 7
    return x


@pytest.mark.parametrize("write", [through_a_view_of_other_strides, through_a_large_view, into_one_element])
def test_writes_where_values_are_not_followed_reach_all_views(
    scores: torch.Tensor, write: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = write(scores)
    with pytest.raises(Exception, match="local_scalar_dense"):
        x.flatten()[0].item()


def test_a_constant_of_the_model_stays_as_it_is(scores: torch.Tensor) -> None:
    ids = torch.arange(4)
    constant = torch.ops.aten.alias(ids)
    constant.add_(1)
    assert constant.tolist() == [1, 2, 3, 4]


def test_a_router_sends_tokens_to_all_experts(scores: torch.Tensor) -> None:
    chosen = scores.topk(2, dim=-1).indices
    assert chosen.tolist() == [[0, 1], [2, 3]] * 3
    assert torch.bincount(chosen.flatten()).tolist() == [3, 3, 3, 3]
    assert scores.argmax(-1).tolist() == scores.max(-1).indices.tolist() == [0, 1, 2, 3, 0, 1]
    assert scores.max(1, keepdim=True).indices.flatten().tolist() == [0, 1, 2, 3, 0, 1]
    assert scores.sort(-1, descending=True).indices.tolist() == [[0, 1, 2, 3]] * 6
