"""The profiles in use. Not in them, because nothing reads it: ``NCCL_DETERMINISTIC``, ``NCCL_P2P_NET_DISABLE``.

``phantoms`` looks each name up in the library that should read it, so that such names are noticed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dsv4_matrix.environment.profile import Before, EnvVar, Mode, Profile

#: Single-GPU and CPU runs.
SUITE = Profile(
    "suite",
    (
        EnvVar(
            "PYTHONHASHSEED", "0", Mode.DEFAULT, Before.INTERPRETER, "CPython: salt of str and bytes hashes",
            pattern=r"\d{1,10}", matters=False, always_forward=True,
        ),
        EnvVar(
            "CUBLAS_WORKSPACE_CONFIG", ":16:8", Mode.FORCE, Before.CUDA, "cuBLAS: workspaces, as :KiB:count",
            library="libcublas.so*", pattern=r"(:\d+:\d+)+",
        ),
        EnvVar(
            "CUBLASLT_WORKSPACE_SIZE", "1", Mode.FORCE, Before.CUDA, "torch: KiB of cuBLASLt workspace",
            library="libtorch_cuda.so", pattern=r"\d+",
        ),
        EnvVar(
            "NVIDIA_TF32_OVERRIDE", "0", Mode.FORCE, Before.CUDA, "cuBLAS, cuDNN: TF32 off everywhere",
            library="libcublas.so*", pattern=r"[01]",
        ),
        EnvVar(
            "DSV4_INVARIANT_LOGPROBS", "1", Mode.DEFAULT, Before.CALL, "backends: decode takes log_softmax",
            pattern=r"[01]",
        ),
    ),
)  # fmt: skip


def _nccl(name: str, value: str, pattern: str = r"\d+") -> EnvVar:
    return EnvVar(name, value, Mode.FORCE, Before.NCCL, "NCCL", library="libnccl.so*", pattern=pattern)


#: Runs over several GPUs. Ring and tree are both fixed orders with different bits: agree on one, never mix.
NCCL = Profile(
    "nccl",
    (
        _nccl("NCCL_ALGO", "Ring", r"[A-Za-z:;,^]+"),
        _nccl("NCCL_PROTO", "Simple", r"[A-Za-z0-9:;,^]+"),
        _nccl("NCCL_LAUNCH_MODE", "GROUP", r"GROUP|PARALLEL"),
        _nccl("NCCL_COLLNET_ENABLE", "0"),
        _nccl("NCCL_NVLS_ENABLE", "0"),
        _nccl("NCCL_MIN_NCHANNELS", "1"),
        _nccl("NCCL_MAX_NCHANNELS", "1"),
        _nccl("NCCL_NTHREADS", "1"),
        _nccl("NCCL_SOCKET_NTHREADS", "1"),
    ),
)


def _sglang(name: str, value: str) -> EnvVar:
    reader = "sglang batch_invariant_ops, at import"
    return EnvVar(name, value, Mode.FORCE, Before.IMPORT, reader, pattern=r"[01]", always_forward=True)


#: Where SGLang's batch-invariant operators run in the process. Its fallback silently permits batch-variant products.
SGLANG = Profile(
    "sglang",
    (
        _sglang("SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM", "1"),
        _sglang("SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT", "0"),
    ),
)


def phantoms(variables: Iterable[EnvVar], library: Path) -> tuple[str, ...]:
    """Names that ``library`` does not hold as a string of its own, sorted: setting them does nothing there."""
    data = library.read_bytes()
    return tuple(sorted(v.name for v in variables if b"\0" + v.name.encode() + b"\0" not in data))
