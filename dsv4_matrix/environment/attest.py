"""What a worker finds itself in: variables, interpreter, libraries and switches, as one frozen value with a hash.

Two runs are compared only if they agree in everything that may matter; what must not matter (hash seed, number of
workers, device index) is told too, since the gate changes it on purpose.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dsv4_matrix.environment.launch import RECORD
from dsv4_matrix.environment.profile import Profile

UNSET = "(unset)"


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
    }
    may: dict[str, str] = {
        "hash_randomization": str(sys.flags.hash_randomization),
        "CUDA_VISIBLE_DEVICES": environ.get("CUDA_VISIBLE_DEVICES", UNSET),
    }
    for profile in profiles:
        for variable in profile.variables:
            observed = environ.get(variable.name, UNSET)
            (must if variable.matters else may)[variable.name] = observed
    if "torch" in modules:
        must.update(_torch_facts(modules["torch"]))
    if "triton" in modules:
        must["triton"] = str(modules["triton"].__version__)
    faults = [*_drift(environ), *(f"{name} was imported before the environment was checked" for name in early)]
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
    }
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["device"] = f"{device.name} sm_{device.major}{device.minor} {device.multi_processor_count} SMs"
        facts["driver"] = _driver_version()
    else:
        facts["device"] = "cpu"
        facts["torch.threads"] = str(torch.get_num_threads())
    return facts


def _driver_version() -> str:
    """What the CUDA driver says of itself, as ``13000`` for 13.0; by the driver's own call, since torch's moved."""
    found = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    if status != 0:
        raise RuntimeError(f"cuDriverGetVersion: CUDA error {status}")
    return str(found.value)


def _encode(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")
