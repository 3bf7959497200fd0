"""What tune.py builds and times: settings, each a list of macros of csrc/cuda/tile.cuh or of memkern.triton.launch's
constants."""

from __future__ import annotations

from typing import NamedTuple

DEFAULT = "default"


class Setting(NamedTuple):
    kind: str  # of SOURCES: libraries of these; triton
    name: str
    values: dict[str, int]


SOURCES = {
    "steps": ("adam", "lion", "lamb", "lars", "grad_norm", "tensor_table"),
    "codes": ("blockwise",),
    "gelu": ("activation",),
}
TIMED = {
    "steps": ("adam_tiles<1, 0>", "lion_tiles<1, 0>", "lamb_norm_tiles<1, 0>", "lamb_tiles<1, 0>"),
    "codes": ("quantize_whole<1, 1>", "dequantize_whole<1, 1>"),
    "gelu": (
        "forward_by_planes<0, 0, 3>",
        "encode_vectors<0>",
        "forward_by_table<0, 3>",
        "multiply_by_levels<0, 3>",
        "multiply_by_levels<1, 3>",
    ),
}
SETTINGS = (
    Setting("steps", DEFAULT, {}),
    Setting("steps", "runs of 1 tile", {"RUN_TILES": 1}),
    Setting("steps", "runs of 32 tiles", {"RUN_TILES": 32}),
    Setting("steps", "2 copies ahead", {"COPIES_AHEAD": 2}),
    Setting("steps", "4 copies ahead", {"COPIES_AHEAD": 4}),
    Setting("steps", "tiles of one size", {"EVEN_TILES": 0}),
    Setting("steps", "tiles up to 2^16", {"TILE_ELEMENTS": 2**16}),
    Setting("steps", "128 threads", {"THREADS": 128}),
    Setting("steps", "512 threads for one moment", {"STEP_THREADS": 512}),
    Setting("steps", "640 threads for all", {"AHEAD_THREADS": 640}),
    Setting("codes", DEFAULT, {}),
    Setting("codes", "4 vectors of a thread", {"CODEC_VECTORS": 4}),
    Setting("codes", "16 vectors of a thread", {"CODEC_VECTORS": 16}),
    Setting("codes", "1280 resident threads", {"CODEC_THREADS": 1280}),
    Setting("gelu", DEFAULT, {}),
    Setting("gelu", "128 threads", {"THREADS": 128}),
    Setting("gelu", "1024 resident threads", {"RESIDENT_THREADS": 1024}),
    Setting("gelu", "table for 512 threads", {"TABLE_THREADS": 512}),
    Setting("triton", DEFAULT, {}),
    Setting("triton", "3 stages", {"STAGES": 3}),
    Setting("triton", "3 stages, 16 tiles of a program", {"STAGES": 3, "TILES": 16}),
    Setting("triton", "4 stages", {"STAGES": 4}),
    Setting("triton", "2 warps, tile 512", {"num_warps": 2, "TILE": 512}),
    Setting("triton", "8 warps, tile 2048", {"num_warps": 8, "TILE": 2048}),
    Setting("triton", "8 warps", {"num_warps": 8}),
    Setting("triton", "4 tiles of a program", {"TILES": 4}),
    Setting("triton", "16 tiles of a program", {"TILES": 16}),
)
