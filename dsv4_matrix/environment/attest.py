"""What a worker finds itself in: variables, interpreter, libraries and switches, as one frozen value with a hash.

Two runs are compared only if they agree in everything that may matter; what must not matter (hash seed, number of
workers, device index) is told too, since the gate changes it on purpose.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4_matrix.environment.launch import RECORD
from dsv4_matrix.environment.profile import Profile
from dsv4_matrix.shard.driver import served_cuda

UNSET = "(unset)"

#: Variables that choose kernels or how they are compiled, by prefix; the others say where things lie.
_KERNELS, _PLACES = ("TRITON_", "DSV4_"), ("DSV4_MATRIX_", "TRITON_CACHE_", "TRITON_HOME", "TRITON_DUMP_")
#: Release of NVIDIA's kernel module; the driver's own call tells only which CUDA it serves.
_MODULE = Path("/sys/module/nvidia/version")


@dataclass(frozen=True)
class Attestation:
    """Sorted (name, value) pairs; values are text.

    Attributes:
        must_match: results may depend on these.
        may_differ: results must not depend on these.
        faults: what is not as the launcher decided, or makes the run prove nothing.
    """

    must_match: tuple[tuple[str, str], ...]
    may_differ: tuple[tuple[str, str], ...]
    faults: tuple[str, ...]

    def sha256(self) -> str:
        """Hash of what must match, for the report's header."""
        return hashlib.sha256(_encode(self.must_match)).hexdigest()

    def to_json(self) -> str:
        return _encode(asdict(self)).decode("ascii")

    @classmethod
    def from_json(cls, text: str) -> Attestation:
        """ValueError if ``text`` is not what ``to_json`` writes."""
        value = json.loads(text)
        if not isinstance(value, dict) or value.keys() != {"must_match", "may_differ", "faults"}:
            raise ValueError("attestation: expected must_match, may_differ and faults")
        must, may = (tuple((str(n), str(v)) for n, v in value[key]) for key in ("must_match", "may_differ"))
        return cls(must, may, tuple(str(fault) for fault in value["faults"]))


def attest(
    profiles: Sequence[Profile],
    environ: Mapping[str, str] | None = None,
    *,
    modules: Mapping[str, Any] | None = None,
    early: Iterable[str] = (),
) -> Attestation:
    """Observe this process.

    Args:
        profiles: whose variables are looked at.
        environ: by default ``os.environ``.
        modules: by default ``sys.modules``; torch and triton are looked at only if they are loaded.
        early: modules that were imported before this project got control, such as torch by a conftest.
    """
    environ = os.environ if environ is None else environ
    modules = sys.modules if modules is None else modules
    must: dict[str, str] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "TRITON_INTERPRET": environ.get("TRITON_INTERPRET", UNSET),
        **{n: v for n, v in environ.items() if n.startswith(_KERNELS) and not n.startswith(_PLACES)},
    }
    may: dict[str, str] = {
        "hash_randomization": str(sys.flags.hash_randomization),
        "CUDA_VISIBLE_DEVICES": environ.get("CUDA_VISIBLE_DEVICES", UNSET),
    }
    for profile in profiles:
        for variable in profile.variables:
            observed = environ.get(variable.name, UNSET)
            (must if variable.matters else may)[variable.name] = observed
    faults = _drift(environ)
    if "torch" in modules:
        must.update(_torch_facts(modules["torch"]))
        try:
            must["driver"] = _driver(modules["torch"])
        except (OSError, RuntimeError) as error:
            faults.append(f"the GPU's driver cannot be told: {error}")
    if "triton" in modules:
        must["triton"] = str(modules["triton"].__version__)
    faults += [f"{name} was imported before the environment was checked" for name in early]
    return Attestation(tuple(sorted(must.items())), tuple(sorted(may.items())), tuple(faults))


def disagreements(left: Attestation, right: Attestation) -> tuple[str, ...]:
    """Why two runs cannot be compared, one sentence each; empty if they can."""
    a, b = dict(left.must_match), dict(right.must_match)
    names = sorted(a.keys() | b.keys())
    unlike = [
        f"{name} is {a.get(name, UNSET)} in one run and {b.get(name, UNSET)} in the other"
        for name in names
        if a.get(name, UNSET) != b.get(name, UNSET)
    ]
    return (*unlike, *left.faults, *(fault for fault in right.faults if fault not in left.faults))


def _drift(environ: Mapping[str, str]) -> list[str]:
    """Differences between what the launcher decided and what is observed."""
    told = environ.get(RECORD)
    if told is None:
        return ["the environment was not prepared; start the run with dsv4-matrix"]
    record = json.loads(told)
    changed = [
        f"{setting['name']} was set to {setting['value']} by {setting['profile']} and is now "
        f"{environ.get(setting['name'], UNSET)}"
        for setting in record["settings"]
        if environ.get(setting["name"]) != setting["value"]
    ]
    return [*changed, *(f"not deterministic: {reason}" for reason in record["not_deterministic"])]


def _torch_facts(torch: Any) -> dict[str, str]:
    """Versions, device model and arithmetic switches of the loaded torch."""
    facts = {
        "torch": str(torch.__version__),
        "torch.cuda": str(torch.version.cuda),
        "torch.matmul_tf32": str(torch.backends.cuda.matmul.allow_tf32),
        "torch.cudnn_tf32": str(torch.backends.cudnn.allow_tf32),
        "torch.cudnn_benchmark": str(torch.backends.cudnn.benchmark),
        "torch.cudnn_deterministic": str(torch.backends.cudnn.deterministic),
        "torch.deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "torch.threads": str(torch.get_num_threads()),  # inputs are drawn on the CPU, the GPU's too
    }
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["device"] = f"{device.name} sm_{device.major}{device.minor} {device.multi_processor_count} SMs"
    else:
        facts["device"] = "cpu"
    return facts


def _driver(torch: Any) -> str:
    """``580.65.06, CUDA 13000``: the kernel module's release where Linux tells it, and the driver's own word.

    Not by torch, whose call for it has moved, nor by nvidia-smi, which a container need not have. torch has loaded
    libcuda by this name already where a GPU is in use. OSError or RuntimeError if the driver does not answer.
    """
    if not torch.cuda.is_available():
        return "none"
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    try:
        release = f"{_MODULE.read_text('ascii').strip()}, "
    except (OSError, UnicodeDecodeError):
        release = ""
    return f"{release}CUDA {served_cuda()}"


def _encode(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")
