"""What is installed here, tried rather than guessed; torch may be absent."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from types import ModuleType
from typing import Any

from whynan import __version__
from whynan.doctoring.facts import Grade, Remark

Rows = tuple[tuple[str, str], ...]
OLDEST = (2, 9)
_PACKAGES = ("numpy", "safetensors", "transformers", "lightning", "accelerate", "deepspeed", "datasets", "pyarrow", "wandb", "tensorboard")
_TYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def torch_here() -> ModuleType | None:
    """Return torch, or None where it is not installed or cannot be loaded."""
    try:
        import torch
    except Exception:  # a broken installation raises OSError and worse
        return None
    return torch


def versions(torch: ModuleType | None) -> Rows:
    """Return the versions of what matters here."""
    rows = [("whynan", __version__), ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    rows.append(("torch", _torch_version(torch)))
    found = {name: _version(name) for name in _PACKAGES}
    rows.append(("beside it", ", ".join(f"{n} {v}" for n, v in found.items() if v) or "nothing of what whynan knows"))
    return tuple(rows)


def _torch_version(torch: ModuleType | None) -> str:
    if torch is None:
        return "not installed" if importlib.util.find_spec("torch") is None else "installed, but it cannot be imported"
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    return f"{torch.__version__}, built for {'CUDA ' + torch.version.cuda if torch.version.cuda else built or 'the CPU'}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def devices(torch: ModuleType | None) -> Rows:
    """Return the devices, and which number types work on each: a small product is computed in each of them."""
    rows = [
        ("processor", f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores" + (f", torch uses {torch.get_num_threads()}" if torch else ""))
    ]
    if torch is None:
        return tuple(rows)
    rows.append(("types on cpu", _types(torch, "cpu")))
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        seen = torch.cuda.get_device_properties(number)
        rows.append((f"cuda:{number}", f"{seen.name}, {seen.total_memory / (1 << 30):.0f} GiB, compute capability {seen.major}.{seen.minor}"))
        rows.append((f"types on cuda:{number}", _types(torch, f"cuda:{number}")))
    if torch.backends.mps.is_available():
        rows.append(("types on mps", _types(torch, "mps")))
    return tuple(rows)


def _types(torch: Any, device: str) -> str:
    return ", ".join(f"{name} {_tried(torch, device, name)}" for name in _TYPES if hasattr(torch, name))


def _tried(torch: Any, device: str, name: str) -> str:
    try:
        made = torch.eye(16, device=device).to(getattr(torch, name))
        if float(made.float().sum()) != 16:
            return "wrong"
    except (RuntimeError, NotImplementedError, TypeError):
        return "no"
    try:
        (made @ made).float().sum().item()
    except (RuntimeError, NotImplementedError, TypeError):
        return "stored only"
    return "yes"


def settings(torch: ModuleType | None) -> Rows:
    """Return the switches that decide whether two runs give the same numbers."""
    environment = {n: os.environ[n] for n in ("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "NVIDIA_TF32_OVERRIDE") if n in os.environ}
    rows = [("environment", ", ".join(f"{k}={v}" for k, v in environment.items()) or "nothing set")]
    if torch is None:
        return tuple(rows)
    backends = torch.backends
    switches = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.deterministic": backends.cudnn.deterministic,
        "cudnn.benchmark": backends.cudnn.benchmark,
    }
    rows.append(("determinism", ", ".join(f"{k} {'on' if v else 'off'}" for k, v in switches.items())))
    rows.append(("float32 products", f"precision {torch.get_float32_matmul_precision()}"))
    rows.append(("denormals", "flushed to zero" if _flushes(torch) else "kept"))
    rows.append(("anomaly mode", "on" if torch.is_anomaly_enabled() else "off"))
    return tuple(rows)


def _flushes(torch: Any) -> bool:
    return bool((torch.tensor([1e-40]) * 1.0).item() == 0.0)


def remarks(torch: ModuleType | None) -> list[Remark]:
    """Return what is known to be bad about this installation."""
    if torch is None:
        if importlib.util.find_spec("torch") is not None:
            return [Remark(Grade.BAD, "torch is installed but cannot be imported", advice="python -c 'import torch' shows why")]
        return []
    found = []
    parts = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2] if p.isdigit())
    if parts < OLDEST:
        found.append(Remark(Grade.BAD, f"torch {torch.__version__} is older than 2.9: run, replay and probe refuse it", advice="pip install -U torch"))
    if _flushes(torch):
        found.append(Remark(Grade.NOTE, "denormal numbers are flushed to zero: a tiny divisor becomes exactly 0"))
    return found


def abilities(torch: ModuleType | None) -> Rows:
    """Return which commands work here."""
    always = "explain, doctor, lint, check (checkpoints, logs; data with numpy)"
    if torch is None:
        return (("works", always), ("needs torch", "run, replay, probe; pip install torch"))
    rows = [("works", f"{always}, run, replay, probe")]
    missing = [n for n in ("pyarrow", "numpy") if not _version(n)]
    if missing:
        rows.append(("would need more", ", ".join(f"{n} for data sets" for n in missing)))
    return tuple(rows)
