"""All benchmarks run, absent peers are named, contenders take turns, and results become the documents' tables."""

import os
import sys
import threading

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks need the [bench] extra")
pytest.importorskip("matplotlib", reason="the benchmarks need the [bench] extra")

from benchmarks import harness, machine, report
from benchmarks.__main__ import main, topics
from benchmarks.bench_optim import gpt2_shapes
from tests.support import gradient_streams as streams  # which the last two tests test

PEERS = ("bitsandbytes", "torchao", "deepspeed", "timm")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The folder and the rows by topic of one quick run of all benchmarks. Peers, which would compile, are absent."""
    out = tmp_path_factory.mktemp("bench")
    torch.set_num_threads(1)  # as conftest.py does it for each test; this is before the first
    with pytest.MonkeyPatch.context() as patch:
        for peer in PEERS:
            for module in [name for name in sys.modules if name.split(".")[0] == peer]:
                patch.delitem(sys.modules, module)
            patch.setitem(sys.modules, peer, None)
        main(["--quick", "--out", str(out)])
    return out, {report.topic_of(path): report.read(path) for path in out.glob("*.csv")}


@pytest.mark.full
def test_every_topic_has_results_and_a_picture(results):
    out, rows = results
    assert sorted(rows) == topics()
    for path in out.glob("*.csv"):
        assert path.with_suffix(".png").stat().st_size > 0


@pytest.mark.full
def test_rows_carry_their_conditions_and_figures(results):
    _, rows = results
    for row in (row for topic in rows.values() for row in topic):
        assert tuple(row) == report.COLUMNS
        assert all(row[column] for column in report.PROVENANCE)
        if row["contender"].split()[0] in ("memkern", "torch"):
            assert not row["note"].startswith("absent"), row["note"]
            assert float(row["ms_p20"]) <= float(row["ms_median"]) <= float(row["ms_p80"])
            assert float(row["bytes_per_param"]) > 0
            assert float(row["copy_rate_gbps"]) > 0


@pytest.mark.full
def test_absent_peers_are_named_with_the_reason(results):
    _, rows = results
    absent = [row for topic in rows.values() for row in topic if row["contender"].lower().startswith(PEERS)]
    assert {row["contender"].split()[0].lower() for row in absent} == set(PEERS)
    for row in absent:
        assert row["note"].startswith("absent: ModuleNotFoundError")
        assert row["ms_median"] == row["ratio_to_memkern"] == ""


@pytest.mark.full
def test_bytes_of_an_adamw_step(results):
    _, rows = results
    one_tensor = {row["contender"]: row for row in rows["optim"] if row["case"] == "AdamW, one tensor"}
    for contender, moved, state in (  # bytes per parameter: read and written, and kept
        ("memkern AdamW8bit", 16.125, 2.0625),
        ("memkern AdamW", 28, 8),
        ("torch AdamW fused", 28, 8),
    ):
        assert float(one_tensor[contender]["bytes_per_param"]) == pytest.approx(moved, abs=0.01)
        assert float(one_tensor[contender]["state_bytes_per_param"]) == pytest.approx(state, abs=0.01)
    assert float(one_tensor["torch AdamW foreach"]["temp_bytes_per_param"]) >= 4


@pytest.mark.full
def test_readme_tables_come_from_the_results_and_are_stable(results, tmp_path):
    out, rows = results
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench:optim -->\nold\n<!-- /bench -->\nafter\n")
    arguments = ["table", "--page", str(readme), "--out", str(out)]
    main(arguments)
    first_fill = readme.read_text()
    main(arguments)
    assert readme.read_text() == first_fill
    assert first_fill.startswith("before\n<!-- bench:optim -->\n")
    assert first_fill.endswith("\n<!-- /bench -->\nafter\n")
    assert "old" not in first_fill
    figure = next(row for row in rows["optim"] if row["contender"] == "torch AdamW fused")["ms_median"]
    assert f"| {float(figure):.2f} |" in first_fill


@pytest.mark.full
def test_a_marker_may_name_cases(results, tmp_path):
    out, _ = results
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench:optim: Lion, one; Adam, one -->\n<!-- /bench -->")
    main(["table", "--page", str(readme), "--out", str(out)])
    assert readme.read_text().startswith("<!-- bench:optim: Lion, one; Adam, one -->\n")
    shown = [line for line in readme.read_text().splitlines() if line.startswith("| **")]
    assert [line.split(":")[0] for line in shown] == ["| **Adam, one tensor", "| **Lion, one tensor"]
    with pytest.raises(KeyError, match="no case of"):
        report.fill_markers("<!-- bench:optim: Nothing --><!-- /bench -->", {"optim": [*out.glob("optim_*.csv")]})


def test_a_marker_without_results_is_an_error():
    with pytest.raises(KeyError, match="--only nothing"):
        report.fill_markers("<!-- bench:nothing --><!-- /bench -->", {})


def test_times_of_two_machines_stand_beside_each_other(tmp_path):
    figures = {"case": "c", "numel": "1000000", "bytes_per_param": "16", "copy_rate_gbps": ""}
    for hardware, contenders in (
        ("One, 2 threads", {"ours": "1", "theirs": "2"}),
        ("Two", {"ours": "3", "absent": ""}),
    ):
        rows = [
            dict.fromkeys(report.COLUMNS, "") | figures | {"hardware": hardware, "contender": name, "ms_median": ms}
            for name, ms in contenders.items()
        ]
        report.append(tmp_path / f"optim_{hardware}.csv", rows)
    table = [line.split(" | ") for line in report.markdown(tmp_path.glob("*.csv")).splitlines()[3:]]  # after conditions
    shown = (1, 4, 7)  # the columns of bytes moved, and of each machine's time
    assert [table[0][i] for i in shown] == ["B/param moved", "One: ms", "Two: ms"]
    lines = {line[0]: [line[i] for i in shown] for line in table[3:]}  # after headings and the case
    assert lines == {
        "| ours": ["16.00", "1.00", "3.00"],
        "| theirs": ["16.00", "2.00", ""],
        "| absent": ["", "", "absent"],
    }
    page = report.fill_markers(
        "<!-- bench:optim: c; not theirs --><!-- /bench -->", {"optim": [*tmp_path.glob("*.csv")]}
    )
    assert "| ours |" in page
    assert "| theirs |" not in page


def test_only_the_last_run_of_a_case_is_shown(tmp_path):
    path = tmp_path / "optim_x.csv"
    for date, contenders in (("1", "ABC"), ("2", "AB")):
        new = [dict.fromkeys(report.COLUMNS, "") | {"date": date, "case": "c", "contender": c} for c in contenders]
        report.append(path, new)
    assert [(row["date"], row["contender"]) for row in report.latest(path)["c"]] == [("2", "A"), ("2", "B")]


def test_contenders_take_turns():
    calls = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in "ABC"}

    def time_call(call):
        call()
        return 1.0

    times = harness.take_turns(contenders, time_call, rounds=4, every={"A": 1, "B": 1, "C": 3})
    rounds = ["".join(calls[i:j]) for i, j in ((0, 3), (3, 5), (5, 7), (7, 10))]  # C runs in every third round
    assert ["".join(sorted(names)) for names in rounds] == ["ABC", "AB", "AB", "ABC"]
    assert rounds[0] != rounds[3]  # the order changes
    assert {name: len(seconds) for name, seconds in times.items()} == {"A": 4, "B": 4, "C": 2}


def test_the_frequency_is_read_while_the_device_is_busy(monkeypatch, tmp_path):
    calls = []
    smi = tmp_path / "nvidia-smi"  # of two GPUs; the first counts
    smi.write_text('#!/bin/sh\n[ "$1" = --query-gpu=clocks.sm ] && echo "1980 MHz" && echo "345 MHz"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert harness.Clock("cpu").of_multiprocessors(lambda: calls.append(1)) == "1980 MHz"
    assert len(calls) == harness.BUSY_CALLS
    smi.unlink()
    assert machine.gpu_field("clocks.sm") == "unknown"


def test_a_contender_that_fails_is_a_row():
    def broken():
        raise RuntimeError("no such kernel\nand a traceback")

    def contender(name, step):
        return harness.Contender(name, lambda: harness.Subject(step, lambda: 8))

    case = harness.Case("c", 1, [contender("memkern works", lambda: None), contender("torch broken", broken)])
    works, failed = harness.measure(case, harness.Clock("cpu"), rounds=5)
    assert works.ratio_to_memkern == 1
    assert failed.note == "absent: RuntimeError: no such kernel"
    assert failed.ms_median is None


def test_largest_temporary_counts_what_a_call_allocates():
    x = torch.ones(1000)
    assert harness.largest_temporary(lambda: x.zero_(), "cpu") == 0
    assert 8000 <= harness.largest_temporary(lambda: x.add(1).add(1).sum(), "cpu") <= 8200  # two tensors and a scalar


def test_largest_temporary_counts_what_another_thread_frees():
    def free_on_a_thread():
        for _ in range(3):
            tensors = [torch.ones(1000)]
            thread = threading.Thread(target=tensors.clear)  # not recorded by the profiler, like gloo's threads
            thread.start()
            thread.join()

    assert 4000 <= harness.largest_temporary(free_on_a_thread, "cpu") <= 4100


def test_gpt2_shapes_have_the_number_of_parameters():
    assert sum(torch.Size(shape).numel() for shape in gpt2_shapes(124_439_808)) == 124_439_808
    assert gpt2_shapes(124_439_808)[0] == (50257, 768)
    shapes = gpt2_shapes(2**24)
    assert len(shapes) == 148
    assert 2**24 - 256 < sum(torch.Size(shape).numel() for shape in shapes) <= 2**24


@pytest.mark.parametrize("name", streams.STREAMS)
def test_streams_repeat_and_have_their_shape(name):
    first, again = (list(streams.make(name, 3, seed=1)) for _ in range(2))
    assert len(first) == 3
    for a, b in zip(first, again, strict=True):
        assert a.shape == (32, 512)
        assert a.dtype is torch.float32
        assert torch.equal(a, b)


def test_fp32_adam_has_no_closed_loop_error():
    error = streams.closed_loop(torch.optim.Adam, streams.make("base", 50))
    assert error.mean_error < 1e-5
    assert error.last_error < 1e-5
    assert error.sqrt_v_ratio == pytest.approx(1, abs=1e-5)
