"""Run as a program without interpreter and GPU: compiles the metadata kernels for a target, one JSON line each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import triton
from dsv4_triton import metadata_kernels, sparse_prefill
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

LONG = {"seq_lens", "req_pool_indices", "lens", "out_cache_loc", "mapping", "raw_out_loc", "request"}
SCALARS = {
    *("bs", "rows", "rows_per_request", "out_rows", "out_stride", "table_rows", "table_stride", "context"),
    *("mapping_size", "pages", "index_topk", "c4_width", "c128_width", "counted"),
    *("raw_stride", "width", "topk", "ratio", "swa_start"),
}
TILE = {"ROWS": 4, "COLUMNS": metadata_kernels.COLUMNS}
KERNELS = [
    *(
        (metadata_kernels._metadata_kernel, {"RAGGED": ragged, "COMPRESS": compress, "WINDOW": 128, **TILE})
        for ragged, compress in product((False, True), repeat=2)
    ),
    *((metadata_kernels._c4_selection_kernel, {"KEEP": keep, "PER_PAGE": 64, **TILE}) for keep in (False, True)),
    (sparse_prefill._combine_kernel, {"WINDOW": 128, **TILE}),
]


def argument_type(name: str) -> str:
    if name in SCALARS:
        return "i32"
    return "*i64" if name in LONG else "*i32"


def stack_bytes(cubin: bytes) -> int:
    """Bytes of stack a thread: where spilled registers go."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        printed = subprocess.run(tool, check=True, capture_output=True, text=True).stdout
    return int(re.search(r"STACK:(\d+)", printed).group(1))


name = sys.argv[1]
target = GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[2:]), 32)
for kernel, constants in KERNELS:
    signature = {arg: "constexpr" if arg in constants else argument_type(arg) for arg in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants),
        target=target,
        options={"num_warps": metadata_kernels.NUM_WARPS, "enable_fp_fusion": True},
    )
    stack = stack_bytes(compiled.asm["cubin"]) if "cubin" in compiled.asm else 0
    print(json.dumps({"kernel": kernel.fn.__name__, "shared": compiled.metadata.shared, "stack": stack}))
