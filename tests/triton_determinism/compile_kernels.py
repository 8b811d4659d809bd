"""Compiles the determinism kernels for a target without a GPU and prints what their assembly holds, as JSON."""

from __future__ import annotations

import json
import os
import re
import sys

os.environ["DSV4_TRITON_COMPILE_ONLY"] = "1"
os.environ.pop("TRITON_INTERPRET", None)

import triton
from dsv4_triton import chain_kernels, coins, logprobs, seeded_sample
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    "seeds": "*i64", "positions": "*i64", "lengths": "*i64", "columns": "*i64", "reject": "*fp32", "final": "*fp32",
    "tokens": "*i64", "target": "*fp32", "draft": "*fp32", "predict": "*i32", "accept_index": "*i32", "counts": "*i32",
    "target_tokens": "*i32", "logprobs": "*fp32", "logits": "*bf16", "temperatures": "*fp32", "values": "*bf16",
    "threshold_single": "fp32", "threshold_acc": "fp32", "stride": "i64",
}  # fmt: skip
FUSED = re.compile(r"(@%\w+ )?(fma|mad)\.\S*f32|v_(pk_)?fma\w*_f32|v_mad\w*_f32|v_(pk_)?fmac\w*_f32")
CHAIN = {"SLOTS": 8, "UNROLL": 8, "WHOLE": 0}
KERNELS = {
    "coins": (coins._coin_kernel, {"BLOCK": 8, "HASH": coins.murmur3, "COIN": coins.coin}, "*fp32"),
    "hash": (coins._hash_kernel, {"BLOCK": 1024}, "*u32"),
    "classic": (chain_kernels.sampling_kernel, {"CLASSIC": True, **CHAIN}, "*i32"),
    "target-only": (chain_kernels.sampling_kernel, {"CLASSIC": False, **CHAIN}, "*i32"),
    "greedy": (chain_kernels.greedy_kernel, {"SLOTS": 8}, "*i32"),
    "argmax": (chain_kernels.argmax_kernel, {"BLOCK": 1024}, "*i32"),
    "sample": (seeded_sample._sample_kernel, {"BLOCK": 1024}, "*i32"),
    "log-softmax": (logprobs._log_softmax_kernel, {"HAS_TEMPERATURE": True, "ONE_TOKEN": False}, "*fp32"),
    "log-softmax-without-temperature": (
        logprobs._log_softmax_kernel,
        {"HAS_TEMPERATURE": False, "ONE_TOKEN": False},
        "*fp32",
    ),
    "token-logprobs": (logprobs._log_softmax_kernel, {"HAS_TEMPERATURE": True, "ONE_TOKEN": True}, "*fp32"),
}


def compiled(name, target, fusion=False):
    kernel, constants, out = KERNELS[name]
    types = {**POINTERS, "out": out}
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(arg),): value for arg, value in constants.items()},
    )
    return triton.compile(source, target=target, options={"enable_fp_fusion": fusion})


def facts(assembly, target):
    text = assembly["amdgcn"] if target.startswith("gfx") else assembly["ptx"]
    instructions = [line.strip() for line in text.splitlines() if re.match(r"\s+[a-z@]", line)]
    return {
        "instructions": len(instructions),
        "fused": sum(bool(FUSED.match(line)) for line in instructions),
        # without a rounding mode, ptxas is free to contract it
        "contractible": sum(bool(re.match(r"(@%\w+ )?(add|sub|mul)\.f32", line)) for line in instructions),
        "fp64_divisions": sum(line.startswith("div.rn.f64") for line in instructions),
        "clamps": sum("0f3F7FFFFF" in line for line in instructions),
    }


def main(target):
    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[2:]), 32)
    told = {name: facts(compiled(name, gpu).asm, target) for name in KERNELS}
    told["log-softmax-fused"] = facts(compiled("log-softmax-without-temperature", gpu, fusion=True).asm, target)
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
