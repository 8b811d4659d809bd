"""Compile every kernel for any target on a machine without a GPU, and say what the result needs.

``python -m dsv4_triton.aot sm90 attend_packed ...`` prints one JSON object a line; without names it takes every kernel.
Where there is no GPU, ``DSV4_TRITON_COMPILE_ONLY=1`` lets it be imported. It has to be a process of its own
(``compile_in_subprocess``): an interpreted process holds no compilable kernels.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4_triton import COMPILE_ONLY
from dsv4_triton.target import TARGETS, Target

ATTENTION_POINTERS = {
    "q": "*bf16", "out": "*bf16", "lse": "*fp32", "sink": "*fp32", "scale": "fp32", "index": "*i32", "lengths": "*i32",
    "extra_index": "*i32", "extra_lengths": "*i32", "partial": "*fp32", "cache": "*u8", "extra_cache": "*u8",
    "scores": "*fp32", "tops": "*fp32", "weights": "*bf16", "numbers": "*fp32", "counts": "*i32",
}  # fmt: skip
STORE_POINTERS = {"k": "*i16", "loc": "*i64", "mapping": "*i64", "pool": "*u8", "slots": "*i64", "out": "*bf16"}


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one target.

    Attributes:
        kernel, target: names.
        shared: bytes of shared memory, to be held against ``shared_limit``.
        matrix_instruction: ``wgmma``, ``tcgen05.mma``, ``mma.sync`` or ``mfma``; empty if there is none.
        instructions: of the machine code; None for AMD.
        registers, stack_bytes: a thread's, from the machine code; None for AMD. These kernels keep nothing on a stack,
            so what lies there are spilled registers.
    """

    kernel: str
    target: str
    shared: int
    shared_limit: int
    matrix_instruction: str
    registers: int | None
    stack_bytes: int | None
    instructions: int | None


def variants(target: Target) -> dict[str, tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Kernel, argument types, constexprs and launch options by variant name."""
    from dsv4_triton import attention, store
    from dsv4_triton.workload import COMBINE_HEADS

    split = attention.SPLIT_KEYS // target.block_n
    tiles = {"BLOCK_N": target.block_n, "SPLIT_BLOCKS": split}
    attend = {"ASM": target.packed_decode, "BLOCK_H": target.block_h, "PARTS": target.parts, **tiles}
    joint = {**tiles, "ALIGNED": True}
    launch = {"num_warps": target.num_warps, "num_stages": target.num_stages}
    bf16 = {**ATTENTION_POINTERS, "cache": "*bf16", "extra_cache": "*bf16"}
    rows = {"ROWS": target.store_rows}
    mapped = {**rows, "HARDWARE": target.hardware_fp8}
    return {
        "attend_packed": (attention.attend, ATTENTION_POINTERS, {**attend, "PACKED": True, "ALIGNED": True}, launch),
        "attend_unaligned": (
            attention.attend,
            ATTENTION_POINTERS,
            {**attend, "PACKED": True, "ALIGNED": False},
            launch,
        ),
        "attend_bf16": (attention.attend, bf16, {**attend, "PACKED": False, "ALIGNED": True}, launch),
        "combine": (
            attention.combine,
            ATTENTION_POINTERS,
            {**joint, "HEADS": COMBINE_HEADS},
            {"num_warps": 4},
        ),
        "store": (store._pack_and_store, STORE_POINTERS, {**mapped, "MAPPED": False, "SPARSE": True}, {"num_warps": 4}),
        "store_mapped": (
            store._pack_and_store,
            STORE_POINTERS,
            {**mapped, "MAPPED": True, "SPARSE": False},
            {"num_warps": 4},
        ),
        "unpack": (store._unpack, STORE_POINTERS, {**rows, "ASM": target.packed_decode}, {"num_warps": 4}),
        **(_hopper_variants() if target.name == "sm90" else {}),
    }


def _hopper_variants() -> dict[str, tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Rows of one split, and of several; few rows: both kernels for 64 and 128 heads, and every kind of the second."""
    from dsv4_triton.hopper import launch as hopper
    from dsv4_triton.hopper.few_rows import launch as few_rows

    found = {}
    for halves in (1, 2):
        heads, named = 64 * halves, {"HEAD_BLOCKS": halves, "SPLIT": False}
        score, stream = {**named, **few_rows.SCORE[halves]}, {**named, **few_rows.STREAM[halves]}
        found[f"hopper_score_{heads}"] = (
            few_rows.score_blocks, ATTENTION_POINTERS, score, few_rows.SCORE_OPTIONS,
        )  # fmt: skip
        found[f"hopper_score_once_{heads}"] = (
            few_rows.score_once, ATTENTION_POINTERS, {**named, **few_rows.ONCE}, few_rows.ONCE_OPTIONS,
        )  # fmt: skip
        found[f"hopper_stream_{heads}"] = (
            few_rows.add_stream, ATTENTION_POINTERS, stream, few_rows.STREAM_OPTIONS[halves],
        )  # fmt: skip
    for kind, constexprs in few_rows.ADD.items():
        options = few_rows.ADD_OPTIONS
        for name, split in ((f"hopper_add_{kind}", False), (f"hopper_add_{kind}_split", True)):
            found[name] = (few_rows.add_blocks, ATTENTION_POINTERS, {"SPLIT": split, **constexprs}, options)
    for name, split in (("hopper", False), ("hopper_split", True)):
        constexprs = {"SPLIT": split, "HEAD_BLOCKS": 1, "SPLIT_BLOCKS": hopper.SPLIT_BLOCKS, **hopper.REGISTERS}
        found[name] = (hopper.attend, ATTENTION_POINTERS, constexprs, hopper.OPTIONS)
    return found


def _gpu_target(name: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[2:]), 32)


def compile_kernel(name: str, target: Target, **launch: int) -> tuple[Compiled, Any]:
    """Compile one variant; ``launch`` overrides its launch options. Returns what it needs, and Triton's own object."""
    import triton
    from triton.compiler import ASTSource

    kernel, types, constexprs, options = variants(target)[name]
    special = {"magic": "i64", "extra_magic": "i64", "ratio_magic": "i64"}
    signature = {a: "constexpr" if a in constexprs else types.get(a, special.get(a, "i32")) for a in kernel.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, a in enumerate(kernel.arg_names)
        if signature[a].startswith("*") or a in ("k_stride", "out_stride")
    }
    gpu = _gpu_target(target.name)
    source: Any = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource
    compiled = triton.compile(
        source(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs),
        target=gpu,
        options={**options, "enable_fp_fusion": True, **launch},
    )
    code = compiled.asm.get("ptx") or compiled.asm.get("amdgcn", "")
    registers, stack, count = None, None, None
    if "cubin" in compiled.asm:
        registers, stack = _resources(compiled.asm["cubin"])
        count = len(opcodes(compiled.asm["cubin"]))
    found = next((x for x in ("wgmma", "tcgen05.mma", "mfma", "mma.sync") if x in code), "")
    shared = compiled.metadata.shared
    return Compiled(name, target.name, shared, target.shared_limit, found, registers, stack, count), compiled


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread, read by the object dumper of the Triton wheel."""
    from triton import knobs

    log = _dumped(cubin, knobs.nvidia.cuobjdump.path, "-res-usage")
    usage = re.search(r"REG:(\d+) STACK:(\d+)", log)
    if usage is None:
        raise RuntimeError(f"cuobjdump printed no resource usage:\n{log}")
    return int(usage.group(1)), int(usage.group(2))


def opcodes(cubin: bytes) -> list[str]:
    """Machine instructions in order, without operands and padding, read by the disassembler of the Triton wheel."""
    from triton import knobs

    log = _dumped(cubin, knobs.nvidia.nvdisasm.path, "-c")
    found: list[str] = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", log, re.MULTILINE)
    return [code for code in found if code != "NOP"]


def _dumped(cubin: bytes, tool: str, option: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return subprocess.run([tool, option, str(file)], check=True, capture_output=True, text=True).stdout


def compile_in_subprocess(target: str, *names: str) -> list[Compiled]:
    """Compile variants in a fresh process without interpreter and GPU; all variants if none are named.

    Raises RuntimeError with the compiler's output if one does not compile.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {COMPILE_ONLY: "1"}
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_triton.aot", target, *names], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"compiling {names or 'all kernels'} for {target} failed:\n{done.stderr[-4000:]}")
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def main(arguments: list[str]) -> None:
    target = TARGETS[arguments[0]]
    for name in arguments[1:] or variants(target):
        print(json.dumps(asdict(compile_kernel(name, target)[0])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
