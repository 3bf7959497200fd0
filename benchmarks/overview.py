"""The README's tables and picture, and tables of docs/choosing.md, compiled.md and benchmarks.md, from the results.

``python -m benchmarks table`` writes them.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from . import RESULTS, machine, report
from .plot import OTHERS, OURS

PICTURE = machine.ROOT / "docs" / "assets" / "time-and-peak.png"
XL_PARAMETERS = 1_557_611_200  # the number of GPT-2-XL's parameters
FP32_ADAMW_BYTES = 16  # bytes of a parameter: 4 each for its weight, gradient and two moments
# topic, case, contender of memkern, peer: the usual comparisons, and the cases in which memkern loses
TIMES = (
    ("optim", "AdamW, one tensor", "memkern AdamW8bit", "torch AdamW fused"),
    ("optim", "AdamW, one bf16 tensor", "memkern AdamW8bit", "torch AdamW fused"),
    ("optim", "AdamW, one tensor", "memkern AdamW8bit", "bitsandbytes AdamW8bit"),
    ("optim", "AdamW, one tensor", "memkern AdamW8bit", "torchao AdamW8bit"),
    ("layerwise", "LAMB, 148 tensors like GPT-2's", "memkern LAMB8bit", "timm Lamb"),
    ("layerwise", "LAMB, 148 tensors like GPT-2's", "memkern LAMB8bit", "torch AdamW fused"),
    ("layerwise", "LARS, one tensor", "memkern LARS8bit", "torch SGD fused"),
    ("activation", "GELU, fp32", "memkern GELU, 3 bits", "torch GELU"),
    ("activation", "tanh-GELU, bf16", "memkern GELU, 3 bits", "torch GELU"),
    ("activation", "GELU, fp32, small", "memkern GELU, 3 bits", "torch GELU"),
)
PROCESSORS = {"amd-epyc": "AMD EPYC", "intel": "Intel Xeon"}  # by a part of the results file's name: the processor
# ways of saving less, the modes of gpu-models.csv and gpu-compiled.csv: the words for those of the plots
WAYS = {
    "torch": "torch",
    "checkpointing": "checkpoints of every block",
    "compress": "`compress(model)`",
    "half checkpointed": "checkpoints of every other block",
    "torch.compile": "torch.compile",
    "memkern.compile, 8 bits": "`memkern.compile(model, saved_bits=8)`",
    "memkern.compile, exact": "`memkern.compile(model)`",
    "torch.compile, budget 0.5": "torch.compile, `activation_memory_budget = 0.5`",
}

Rows = dict[tuple[str, ...], report.Row]


def _last(name: str, *columns: str) -> Rows:
    """The last row of each case of a results file, by the columns that name it."""
    return {tuple(row[column] for column in columns): row for row in report.read(RESULTS / name)}


def _topic(topic: str) -> dict[str, Rows]:
    """The last run of each case and contender of a topic, by processor."""
    by_processor: dict[str, Rows] = {}
    for path in sorted(RESULTS.glob(f"{topic}_*.csv")):
        processor = next(title for part, title in PROCESSORS.items() if part in path.stem)
        cases = report.latest(path)
        by_processor[processor] = {(case, row["contender"]): row for case, rows in cases.items() for row in rows}
    return by_processor


def _state(rows: Rows, case: str, contender: str) -> float:
    return float(rows[case, contender]["state_bytes_per_param"])


def savings() -> Iterator[tuple[str, str, float, list[tuple[str, float]]]]:
    """Each quantity, its unit, its figure before, and (how, figure after) for each way to reduce it."""
    rows = next(iter(_topic("optim").values()))
    adam, lion = "AdamW, one tensor", "Lion, one tensor"
    yield (
        "optimizer state of AdamW",
        "bytes per parameter",
        _state(rows, adam, "torch AdamW fused"),
        [("`AdamW8bit`", _state(rows, adam, "memkern AdamW8bit"))],
    )
    yield (
        "optimizer state of Lion",
        "bytes per parameter",
        _state(rows, lion, "memkern Lion"),
        [("`Lion8bit`", _state(rows, lion, "memkern Lion8bit"))],
    )
    block = _last("saved-bytes.csv", "width", "way")
    kb = {way: float(row["bytes_per_token"]) / 1000 for (width, way), row in block.items() if width == "768"}
    yield (
        "saved for the backward pass, GPT-2 block (width 768, fp32)",
        "kB per token",
        kb["as it is (gelu_new)"],
        [
            ("torch's fused GELU in it", kb["torch's fused tanh-GELU"]),
            ("`compress(model)`", kb["compress, 3 bits"]),
        ],
    )
    compiled = _last("saved-compiled.csv", "model", "precision", "mode")
    for model, precision in (("GPT-2", "fp32"), ("Llama", "fp32"), ("Llama", "bf16 autocast")):
        by_mode = {mode: compiled[model, precision, mode] for mode in COMPILED_MODES}
        kilobytes = {mode: float(row["saved_per_token"]) / 1000 for mode, row in by_mode.items()}
        yield (
            f"saved for the backward pass, {model}-like model (4 layers, {precision})",
            "kB per token",
            kilobytes["compiled"] / float(by_mode["compiled"]["share"]),  # eager torch's: share = compiled / eager
            [
                ("torch.compile", kilobytes["compiled"]),
                ("`memkern.compile(model)`", kilobytes["exact"]),
                ("`memkern.compile(model, saved_bits=8)`", kilobytes["8"]),
            ],
        )
    if (RESULTS / "gpt2-xl.csv").exists():
        run = _last("gpt2-xl.csv", "run").get(("xl-9GiB",))
        if run:
            yield (
                "GPT-2-XL, peak of the process (before: weights, gradients and states alone)",
                "GiB",
                XL_PARAMETERS * FP32_ADAMW_BYTES / 2**30,
                [("`train --fit 9GiB`", float(run["peak_rss_gib"]))],
            )


def saves_table() -> str:
    rows = []
    for quantity, unit, before, ways in savings():
        for i, (how, after) in enumerate(ways):
            digits = ".2f" if before < 30 else ".1f"
            cells = [f"{quantity}: {unit}", f"{before:{digits}}"] if i == 0 else ["", ""]
            rows.append([*cells, f"{after:{digits}}", how])
    return report.table(["", "before", "after", "by"], "lrrl", rows)


def speed_table() -> str:
    """memkern's times over a peer's times, by processor; below 1 memkern is faster."""
    topics = {topic: _topic(topic) for topic, *_ in TIMES}
    rows = [
        [
            *(ours.removeprefix("memkern "), peer, case),
            *(_ratio(topics[topic].get(name, {}), case, ours, peer) for name in PROCESSORS.values()),
        ]
        for topic, case, ours, peer in TIMES
    ]
    return _speed_columns("2 threads: time of", rows)


def _speed_columns(head: str, rows: list[list[str]]) -> str:
    """The table without the columns of processors that have no figure."""
    heads = [head, "over that of", "case", *PROCESSORS.values()]
    shown = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    lines = [[line[i] for i in shown] for line in (heads, *rows)]
    return report.table(lines[0], "lll" + "r" * (len(shown) - 3), lines[1:])


def _ratio(rows: Rows, case: str, ours: str, peer: str) -> str:
    """memkern's time over the peer's; empty where one of the two was not measured."""
    mine, theirs = rows.get((case, ours)), rows.get((case, peer))
    if not mine or not theirs or not theirs["ms_median"]:
        return ""
    ratio = float(mine["ms_median"]) / float(theirs["ms_median"])
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.3f}"


def models_table() -> str:
    """Saved bytes and errors of gradients over all models of saved-models.csv: the median, and the worst."""
    rows = _last("saved-models.csv", "model", "precision", "tokens", "mode")
    heads = ["", "precision"]
    for name in ("saved bytes left", "peak of a step", "gradient error"):
        heads += [f"{name}: median", "worst"]
    lines = []
    for precision in ("fp32", "bf16 autocast", "bf16"):
        selected = {case: row for case, row in rows.items() if case[1] == precision and case[3] == "compress"}
        cells = [WAYS["compress"], precision]
        for figure in ("share", "peak_share", "gradient_error"):
            cells += _median_and_worst({case: float(row[figure]) for case, row in selected.items()}, figure)
        lines.append(cells)
    return report.table(heads, "ll" + "rl" * 3, lines)


def _median_and_worst(values: dict[tuple[str, ...], float], figure: str) -> tuple[str, str]:
    worst_case = max(values, key=values.__getitem__)
    median, worst, model = statistics.median(values.values()), values[worst_case], worst_case[0]
    if figure != "gradient_error":
        return f"{median:.2f}", f"{worst:.2f} ({model})"
    if worst < 1e-5:
        return "0 %", "rounding" if worst else "0 %"
    return f"{100 * median:.1f} %", f"{100 * worst:.1f} % ({model})"


def wheels_table() -> str:
    """Each wheel's size, and what it ran with: wheels.csv, of lab/wheels.py."""
    rows = _last("wheels.csv", "wheel", "python", "torch")
    heads = ["wheel", "MB", "of", "Python", "torch", "backend", "equal to the reference", ""]
    lines = []
    for (wheel, python, torch), row in sorted(rows.items()):
        tag = "-".join(wheel.removesuffix(".whl").split("-")[2:])
        size = f"{int(row['bytes']) / 1e6:.2f}"
        equal = f"{row['equal']} of {row['cases']}" if row["cases"] else ""
        lines.append([f"`{tag}`", size, row["date"][:10], python, torch, row["backend"], equal, row["outcome"]])
    return report.table(heads, "lrllllrl", lines)


HEADLINE = "headline_nvidia-h200.csv"
# case, contender of memkern, peer
GPU_TIMES = (
    ("AdamW8bit, one tensor, bf16", "memkern AdamW8bit", "torch AdamW fused"),
    ("AdamW8bit, one tensor, fp32", "memkern AdamW8bit", "torch AdamW fused"),
    ("AdamW8bit, one tensor, bf16", "memkern AdamW8bit", "bitsandbytes AdamW8bit"),
    ("AdamW8bit, one tensor, bf16", "memkern AdamW8bit", "flashoptim AdamW"),
    ("LAMB8bit, one tensor, bf16", "memkern LAMB8bit", "torch AdamW fused"),
    ("LARS8bit, one tensor, bf16", "memkern LARS8bit", "torch SGD fused"),
    ("GELU, bf16", "memkern GELU, 3 bits", "torch GELU"),
    ("GELU, fp32", "memkern GELU, 3 bits", "torch GELU"),
)
SETTINGS = {"flashoptim AdamW": "flashoptim FlashAdamW, `master_weight_bits=24`"}


def gpu_table() -> str:
    """memkern's times on a GPU over a peer's, and the share of the copy bandwidth: `make gpu`'s headline."""
    by_run = _last(HEADLINE, "case", "date", "contender")  # all rows of a run have the same date
    hardware = next(iter(by_run.values()))["hardware"]
    heads = [f"{hardware}: time of", "over that of", "case", "ratio", "ms", "share of copy bandwidth"]
    lines = []
    for case, ours, peer in GPU_TIMES:
        last = max(date for name, date, contender in by_run if (name, contender) == (case, peer))
        rows: Rows = {(case, contender): by_run[case, last, contender] for contender in (ours, peer)}
        mine = rows[case, ours]
        figures = f"{float(mine['ms_median']):.2f}", f"{float(mine['copy_share']):.2f}"
        ratio = _ratio(rows, case, ours, peer)
        lines.append([ours.removeprefix("memkern "), SETTINGS.get(peer, peer), case, ratio, *figures])
    return report.table(heads, "lllrrr", lines)


# modes of saved-compiled.csv: torch.compile, and memkern.compile by its saved_bits
COMPILED_MODES = ("compiled", "exact", "8")
GPU_BYTES = ("saved_mib", "peak_mib")


def gpu_models_table(name: str = "gpu-models.csv") -> str:
    """Whole models on a GPU: `make gpu`'s models (or compiled ones), with times and bytes over torch's."""
    rows = _last(name, "model", "precision", "mode")
    heads = ["", "", "ms of a step", "over torch's", "of which kernels", "saved", "peak", "gradient error"]
    lines = []
    for (model, precision, mode), row in rows.items():
        if not row["ms"]:  # it failed
            continue
        torchs = rows[model, precision, "torch"]
        title, memory = "", [f"{float(row[column]) / float(torchs[column]):.2f}" for column in GPU_BYTES]
        if mode == "torch":
            title = f"{model}, {row['sequences']} x {int(row['tokens']):,} tokens, {precision}"
            memory = [f"{float(row[column]):,.0f} MiB" for column in GPU_BYTES]
        if model.startswith("small"):
            memory = ["", ""]
        error = f"{100 * float(row['gradient_error']):.1f} %" if row["gradient_error"] else ""
        ms = float(row["ms"])
        times = f"{ms:.1f}", f"{ms / float(torchs['ms']):.2f}", f"{float(row['kernels_ms']):.1f}"
        lines.append([title, WAYS.get(mode, mode), *times, *memory, error])
    return report.table(heads, "llrrrrrr", lines)


def _compiled_rows(precisions: Iterable[str]) -> Rows:
    """The rows of the models that have been counted in these precisions and no others."""
    rows = _last("saved-compiled.csv", "model", "precision", "mode")
    counted: dict[str, set[str]] = {}
    for model, precision, _ in rows:
        counted.setdefault(model, set()).add(precision)
    return {key: row for key, row in rows.items() if counted[key[0]] == {*precisions}}


def _compiled_cells(rows: Rows, models: Iterable[str], precision: str) -> list[str]:
    """Medians over models: by mode the share of torch's saved bytes, and the error of gradients with codes."""
    by_mode = {mode: [rows[model, precision, mode] for model in models] for mode in COMPILED_MODES}
    shares = [statistics.median(float(row["share"]) for row in by_mode[mode]) for mode in COMPILED_MODES]
    error = statistics.median(float(row["gradient_error"]) for row in by_mode["8"])
    return [*(f"{share:.3f}" for share in shares), f"{100 * error:.1f} %"]


def compiled_table() -> str:
    """What compiled models save over torch without a compiler (lab.studies.saved_compiled)."""
    shown = {"fp32": "fp32", "bf16 autocast": "autocast", "bf16": "bf16"}
    rows = _compiled_rows(shown)
    heads = [head for name in shown.values() for head in (f"{name}: compiled", "exact", "8 bits", "error")]
    models = list(dict.fromkeys(key[0] for key in rows))
    groups = {model: [model] for model in models} | {"median": models}
    lines = [[title, *(x for p in shown for x in _compiled_cells(rows, group, p))] for title, group in groups.items()]
    return report.table(["", *heads], "l" + "r" * len(heads), lines)


def compiled_nets_table() -> str:
    """What compiled models save, for those that have been counted in fp32 alone."""
    rows = _compiled_rows(["fp32"])
    lines = [[model, *_compiled_cells(rows, [model], "fp32")] for model in dict.fromkeys(key[0] for key in rows)]
    return report.table(["fp32", "compiled", "exact", "8 bits", "error"], "lrrrr", lines)


def compiled_blocks_table() -> str:
    """Models compiled block by block, beside the whole model (lab.studies.compiled_steps --blocks)."""
    rows = _last("compiled-steps.csv", "model", "mode", "budget")
    lines = []
    for model in dict.fromkeys(model for model, mode, _ in rows if mode.startswith("blocks")):
        name = model  # only the first of a model's rows has its name
        for bits in ("torch", "exact", "8"):
            for mode in (bits, f"blocks, {bits}"):
                row = rows[model, mode, ""]
                words = {"torch": "torch.compile", "exact": '`"exact"`', "8": "8 bits"}[bits]
                columns = ("first_ratio", "time_ratio", "saved_share", "peak_share")
                cells = [f"{float(row[column]):.2f}" for column in columns]
                lines.append([name, f"{words}, {'blocks' if mode != bits else 'whole'}", *cells])
                name = ""
    heads = ["over torch.compile of the whole", "", "first step", "time", "saved", "peak"]
    return report.table(heads, "llrrrr", lines)


Points = dict[str, dict[str, tuple[float, float, float]]]
"""By model and way of saving less: the time of a step, its peak, and what is saved, each over torch's own."""
# (mode, budget) of lab.studies.compiled_steps --ways, in compiled-steps.csv: the key in WAYS
WAY_OF_COMPILED_STEP = {
    ("eager", ""): "torch",
    ("checkpointing", ""): "checkpointing",
    ("torch", ""): "torch.compile",
    ("blocks, 8", ""): "memkern.compile, 8 bits",
    ("blocks, exact", ""): "memkern.compile, exact",
    ("torch", "0.5"): "torch.compile, budget 0.5",
    ("half checkpointed", ""): "half checkpointed",
    ("compress", ""): "compress",
}


def gpu_points() -> Points:
    """The points of the models in gpu-compiled.csv, from their rows there and in gpu-models.csv.

    Left out are small models, whose steps take the CPU's time (lab/gpu/models.py).
    """
    points: Points = {}
    for name in ("gpu-compiled.csv", "gpu-models.csv"):
        rows = _last(name, "model", "precision", "mode")
        for (model, precision, mode), row in rows.items():
            title = f"{model}, {precision}"
            is_shown = mode in WAYS and row["ms"] and not model.startswith("small")
            if is_shown and (name == "gpu-compiled.csv" or title in points):
                torchs = rows[model, precision, "torch"]
                time, peak, saved = (float(row[x]) / float(torchs[x]) for x in ("ms", "peak_mib", "saved_mib"))
                points.setdefault(title, {}).setdefault(mode, (time, peak, saved))
    return points


def cpu_points() -> Points:
    """The points of models on a CPU that have a row with checkpoints."""
    rows = _last("compiled-steps.csv", "model", "precision", "mode", "budget")
    points: Points = {}
    for model, precision in dict.fromkeys((key[0], key[1]) for key in rows if key[2] == "checkpointing"):
        torchs = rows[model, precision, "eager", ""]
        for (way, budget), mode in WAY_OF_COMPILED_STEP.items():
            row = rows[model, precision, way, budget]
            time, peak, saved = (
                float(row[x]) / float(torchs[x]) for x in ("time_ratio", "peak_per_token", "saved_per_token")
            )
            points.setdefault(f"{model}, {precision}", {})[mode] = time, peak, saved
    return points


def ways_table(models: Points) -> str:
    """The points of a row of the picture."""
    modes = dict.fromkeys(mode for points in models.values() for mode in points)
    lines = []
    for mode in modes:
        cells = [" / ".join(f"{share:.2f}" for share in p[mode]) if mode in p else "" for p in models.values()]
        lines.append([WAYS[mode], *cells])
    return report.table(["over torch: time / peak / saved", *models], "l" + "r" * len(models), lines)


TABLES: dict[str, Callable[[], str]] = {
    "compiled_blocks": compiled_blocks_table,
    "saves": saves_table,
    "gpu": gpu_table,
    "gpu_models": gpu_models_table,
    "gpu_ways": lambda: ways_table(gpu_points()),
    "cpu_ways": lambda: ways_table(cpu_points()),
    "gpu_compiled": lambda: gpu_models_table("gpu-compiled.csv"),
    "compiled": compiled_table,
    "compiled_nets": compiled_nets_table,
    "speed": speed_table,
    "models": models_table,
    "wheels": wheels_table,
}


def fill(page: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """The text with each `<!-- table:NAME -->` ... `<!-- /table -->` holding that table."""

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- table:{match[1]} -->\n{tables[match[1]]()}\n<!-- /table -->"

    return re.sub(r"<!-- table:(\w+) -->.*?<!-- /table -->", replaced, page, flags=re.DOTALL)


def draw(path: Path = PICTURE) -> Path:
    """The time of a step against its peak, a point for each way of saving less, on a GPU and on a CPU."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    machines = {"H200": gpu_points(), "one CPU thread": cpu_points()}
    modes = list(dict.fromkeys(mode for models in machines.values() for points in models.values() for mode in points))
    columns = max(map(len, machines.values()))
    size = 4.2 * columns, 3.6 * len(machines)
    figure, grid = plt.subplots(len(machines), columns, figsize=size, layout="constrained", sharex=True, squeeze=False)
    for row, (machine_name, models) in zip(grid, machines.items(), strict=True):
        for axes in row[len(models) :]:
            axes.set_axis_off()
        row[0].set_ylabel("time of a step over torch's")
        for axes, (model, points) in zip(row, models.items(), strict=False):
            for mode, (time, peak, _) in points.items():
                ours = mode.startswith(("memkern", "compress"))
                label = WAYS[mode].replace("`", "")
                axes.plot(peak, time, "osDv^P*X"[modes.index(mode)], color=OURS if ours else OTHERS, label=label)
            axes.set_title(f"{machine_name}: {model}", fontsize=10)
            axes.set_xlim(0, 1.15)
            axes.set_ylim(0, 1.5)
            axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("peak of a step over torch's")
    handles = {line.get_label(): line for axes in grid.flat for line in axes.lines}
    figure.legend(handles.values(), handles, fontsize=8, frameon=False, loc="outside lower center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
