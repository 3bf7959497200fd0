"""lab.studies.gpu_model: shares that follow from counts and bytes."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks need the [bench] extra")

from lab.studies import gpu_model
from lab.studies.gpu_model import Card
from memkern import reference
from memkern.fewbit.tables import LEVELS


def test_the_longer_of_two_times() -> None:
    card = Card("sm_90", multiprocessors=100, clock=1.0, bandwidth=1000)
    fits = gpu_model.ISSUED * 100 * gpu_model.LANES * 8 / card.copy  # instructions in the time of 8 bytes
    assert gpu_model.share_of_copy(card, 8, 0.5 * fits) == 1
    assert gpu_model.share_of_copy(card, 8, 2 * fits) == pytest.approx(0.5)
    fits = gpu_model.FP64["sm_90"] * 100 * 8 / card.copy
    assert gpu_model.share_of_copy(card, 8, 0, 4 * fits) == pytest.approx(0.25)


def test_squares_leave_fp64_units_time() -> None:
    """Two fp64 instructions for each square would take longer than memory where these are slow."""
    rows = gpu_model.shares()
    for card, kernel in (
        ("RTX 4090", "grad norm bf16"),
        ("RTX 5090", "grad norm bf16"),
        ("RTX 5090", "LAMB norms bf16"),
    ):
        assert rows[kernel][card] == 1
        fp64 = 4 * gpu_model.fp64_instructions(kernel, gpu_model.CARDS[card].arch)
        assert gpu_model.share_of_copy(gpu_model.CARDS[card], gpu_model.BYTES[kernel], 0, fp64) < 1


def test_a_pipe_may_take_the_longest() -> None:
    card = Card("sm_90", multiprocessors=100, clock=1.0, bandwidth=1000)
    slots = gpu_model.ISSUED * 100 * 8 / card.copy  # cycles of a multiprocessor in the time of 8 bytes
    for pipe, lanes in gpu_model.PIPES["sm_90"].items():
        assert gpu_model.share_of_copy(card, 8, 0, of_pipes={pipe: 0.5 * lanes * slots}) == 1
        assert gpu_model.share_of_copy(card, 8, 0, of_pipes={pipe: 2 * lanes * slots}) == pytest.approx(0.5)
    # 64 lanes for fp32 on sm_80 and for integers everywhere: half of what is issued.
    assert gpu_model.PIPES["sm_80"]["fma"] == gpu_model.PIPES["sm_90"]["alu"] == gpu_model.LANES / 2


def test_pipes_are_part_of_the_instructions() -> None:
    counts = gpu_model.record()["instructions per element"]
    for kernel in gpu_model.BYTES:
        for card in gpu_model.CARDS.values():
            found = gpu_model.pipes(kernel, card.arch)
            assert {*found} == {*gpu_model.PIPES[card.arch]}, kernel
            assert 0 < found["fma"] + found["alu"] + found["xu"] < counts[kernel][card.arch], kernel
            assert found["words"] > 0, kernel


def wavefronts(words: torch.Tensor, banks: int) -> float:
    """Of gathers (requests, lanes) from words of so many banks: the different words of the fullest one, on average."""
    fullest = []
    for row in words.tolist():
        of_bank = [word % banks for word in {*row}]
        fullest.append(max(map(of_bank.count, of_bank)))
    return sum(fullest) / len(fullest)


def test_bank_conflicts_of_gathers() -> None:
    """CONFLICTS, for values from N(0, 1): csrc/cuda/bf16_table.cuh and the pairs of levels of activation.cu."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randn(1000, 32, generator=generator).bfloat16().view(torch.int16).int()
    first, high = 0x3AFF, 0x40C0
    entry = 2 * ((bits & 0x7FFF).clamp(first, high) - first) + (bits < 0)
    assert wavefronts(entry, 32) == pytest.approx(gpu_model.CONFLICTS["GELU 3-bit forward bf16"], rel=0.05)

    table = LEVELS["gelu", 3]
    planes = reference.few_bit_encode(torch.randn(64_000, generator=generator), 3, *table[2:])[:, :8000]
    bit = (planes.int()[..., None] >> torch.arange(8) & 1).view(3, 1000, 32, 2)
    pair = sum(bit[p, ..., i] << 2 * p + i for p in range(3) for i in range(2))
    halves = [wavefronts(half, 16) for half in pair.split(16, 1)]  # 8 bytes a lane: half a warp at a time
    expected = gpu_model.CONFLICTS["GELU 3-bit backward bf16"]
    assert sum(halves) / 2 == pytest.approx(expected, rel=0.05)


def test_every_kernel_has_counts_for_every_card() -> None:
    for kernel, row in gpu_model.shares().items():
        assert {*row} == {*gpu_model.CARDS}, kernel
        assert all(0 < share <= 1 for share in row.values()), kernel


def test_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share by latency alone is what is in flight over the latency; ends in their order, around the one figure."""
    card = gpu_model.CARDS["H200"]
    for path in gpu_model.KERNELS | gpu_model.OTHERS:
        low, high = gpu_model.range_of_share(card, path)
        assert 0 < low <= high <= 1, path
        assert low <= gpu_model.shares()[path]["H200"], path
    monkeypatch.setattr(gpu_model, "LATENCIES", (1e-3, 1e-4))  # then latency limits
    flying = card.multiprocessors * gpu_model.bytes_in_flight(card, "grad norm bf16")  # 2 bytes read, none written
    ends = [flying / latency / (card.copy * 1e9) for latency in gpu_model.LATENCIES]
    assert gpu_model.range_of_share(card, "grad norm bf16") == pytest.approx(tuple(ends))


def test_share_of_parameters_in_doubt() -> None:
    """What docs/numerics.md says of bf16 parameters: changes that are 2^-20 apart, rounded to different ones."""
    generator = torch.Generator().manual_seed(0)
    p, change = torch.randn(2, 8192, 256, generator=generator, dtype=torch.float64)
    p = (p * 0.02).bfloat16().double()
    change *= 1e-3 * (0.1 / 1.9) ** 0.5  # lr m / sqrt(v) of random gradients
    less, more = ((p - change * (1 + off)).float().bfloat16() for off in (-(2**-20), 2**-20))
    share = float((less != more).any(1).double().mean())
    assert share == pytest.approx(0.011, rel=0.4)  # four standard deviations


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_model"])
    gpu_model.main()
    assert "AdamW bf16+8" in capsys.readouterr().out


def test_the_table_of_the_docs() -> None:
    page = Path(__file__).parents[2] / "docs" / "gpu-checks.md"
    found = [line for line in page.read_text().splitlines() if line.split(" | ")[0][2:] in gpu_model.BYTES]
    assert found == gpu_model.rows_for_docs()


# ---- tensors of middle size


def test_registers_limit_the_resident_blocks() -> None:
    assert gpu_model.resident_blocks("sm_90", 96) == 10
    assert gpu_model.resident_blocks("sm_90", 97) == 9  # 104 are given
    assert gpu_model.resident_blocks("sm_90", 30) == 32
    assert gpu_model.resident_blocks("sm_89", 30) == 24


def test_what_was_measured_is_in_the_range() -> None:
    """A quarter below it: the range has neither what mixed reads and writes cost nor the order of the accesses, and
    steps in bf16 took an eighth more instructions when they were measured."""
    for path, share in gpu_model.measured().items():
        low, high = gpu_model.range_of_share(gpu_model.CARDS["H200"], path)
        assert 0.75 * low < share, path
        # A tile of codes is 8 turns: thread blocks that begin have loads on their way that are not counted here.
        assert share < (1.4 if path == "power codes bf16" else 1.1) * high, path


@pytest.mark.parametrize("numel", [1, 10**4, 675_840, 675_841, *gpu_model.MIDDLE, 124_439_808, 10**9])
def test_tiles_fill_the_slots(numel: int) -> None:
    slots = 1320
    tile = gpu_model.tile_elements(numel, slots)
    assert tile % (gpu_model.THREADS * gpu_model.VECTOR) == 0
    assert 0 < tile <= gpu_model.TILE_ELEMENTS
    turns = -(-numel // (slots * gpu_model.TILE_ELEMENTS))  # that the fewest tiles take
    assert -(-numel // tile) <= turns * slots


def test_middle_sizes_lose_little() -> None:
    """Beside 2^28 elements; with tiles of one size 2^22 and 2^23 elements lose half and more."""
    card = gpu_model.CARDS["H200"]
    for path in gpu_model.KERNELS:
        shares = gpu_model.middle_shares(card, path)
        large = 2**28 * gpu_model.BYTES[path] / (card.copy * 1e9)
        large /= gpu_model.time_of_step(card, path, 2**28, gpu_model.TILE_ELEMENTS)
        if "norms" in path:  # 10 thread blocks run at once, over the tiles of the update, of which 8 do
            large *= gpu_model.AHEAD_BLOCKS / gpu_model.STEP_BLOCKS
        for numel, (fixed, even) in shares.items():
            # A tile begins with three loads, one after the other: 4.5 of the 10 microseconds of 2^22 elements.
            assert even >= (0.69 if numel < 2**24 else 0.87) * large, (path, numel)
            assert even >= 0.97 * fixed, (path, numel)
    fixed, even = gpu_model.middle_shares(card, "AdamW bf16")[2**22]
    assert fixed < 0.2 < 0.55 < even
