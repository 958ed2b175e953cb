"""Read a project's source for combinations that hide, cause or multiply non-finite values. Nothing is run."""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from whynan.doctoring.configured import Uses, settings_not_in_effect
from whynan.doctoring.facts import Grade, Remark
from whynan.errors import UsageError
from whynan.settings.layout import FORMS
from whynan.settings.recommending import Recommended, layouts_of, recommend

MOST_FILES = 5000
MOST_BYTES = 2 << 20
_ELSEWHERE = {"capsules", ".git", ".venv", "venv", "node_modules", "site-packages", "__pycache__", "build", "dist", ".tox", ".mypy_cache", "whynan-runs"}
_NOT_OF_A_TRAINING = {"pyproject.toml", "package.json", "package-lock.json", "tsconfig.json"}
_OPTIMIZERS = {"Adam", "AdamW", "SGD", "Adagrad"}
_ARGUMENTS = {"TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig", "GRPOConfig"}


def read_project(path: Path) -> tuple[list[Remark], int]:
    """Return the remarks on a file or folder, and how many files were read."""
    found: list[Remark] = []
    read = 0
    uses = Uses()
    for file in _sources(path):
        if read >= MOST_FILES:
            found.append(Remark(Grade.NOTE, f"only the first {MOST_FILES} files were read"))
            break
        shown = os.path.relpath(file) if not os.path.relpath(file).startswith("..") else str(file)
        try:
            tree = ast.parse(_text(file))
            remarks = list(_remarks(tree))
        except (OSError, SyntaxError, ValueError, UnicodeDecodeError, RecursionError, MemoryError) as error:
            found.append(Remark(Grade.UNREAD, _why(error), shown))
            continue
        read += 1
        uses.note(tree, shown)
        found += [Remark(r.grade, r.text, shown, r.line, r.advice) for r in remarks]
    for remark in settings_not_in_effect(_configurations(path), uses) if read else ():
        found.append(Remark(remark.grade, remark.text, os.path.relpath(remark.file), remark.line, remark.advice))
    return found, read


def _configurations(path: Path, suffixes: tuple[str, ...] = (".yaml", ".yml")) -> list[Path]:
    """Return the files of a project that look like settings of a training: they lie beside its sources."""
    if path.is_file():
        return []
    folders = {file.parent for file in _sources(path)} or {path}
    near = {folder / below for folder in folders for below in (".", "config", "configs", "conf")}
    return sorted({f for folder in near if folder.is_dir() for f in folder.iterdir() if f.suffix in suffixes and f.is_file()})


def recommend_settings(path: Path, runs: Iterable[Path]) -> Recommended:
    """Say what the settings of a project, or one file of settings, should be; a file is seen with the code of its folder."""
    named = path.is_file() and path.suffix.lower() in FORMS
    files = [path] if named else [f for f in _configurations(path, tuple(FORMS)) if f.name not in _NOT_OF_A_TRAINING]
    uses, read = _uses(path.parent if named else path)
    try:
        layouts = layouts_of(files, named)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return recommend(layouts, frozenset(uses.read) if read else None, frozenset(uses.asked), runs)


def _uses(path: Path) -> tuple[Uses, int]:
    uses, read = Uses(), 0
    for file in itertools.islice(_sources(path), MOST_FILES):
        with contextlib.suppress(OSError, SyntaxError, ValueError, UnicodeDecodeError, RecursionError, MemoryError):
            uses.note(ast.parse(_text(file)), str(file))
            read += 1
    return uses, read


def _why(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f"not Python (line {error.lineno}): {error.msg}"
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"[:160]


def _sources(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, folders, files in os.walk(path, followlinks=False):
        folders[:] = sorted(f for f in folders if f not in _ELSEWHERE and not f.startswith("."))
        for name in sorted(files):
            if name.endswith((".py", ".ipynb")):
                yield Path(folder) / name


def _text(file: Path) -> str:
    if not file.is_file():
        raise ValueError("not a regular file")  # reading a pipe would wait for its writer
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES >> 20} MB")
    if file.suffix == ".ipynb":
        book = json.loads(file.read_text(encoding="utf-8"))
        cells = book.get("cells") if isinstance(book, dict) else None
        if not isinstance(cells, list):
            raise ValueError("not a notebook: no cells in it")
        code = ["".join(map(str, c.get("source") or [])) for c in cells if isinstance(c, dict) and c.get("cell_type") == "code"]
        return "\n".join(line for cell in code for line in cell.splitlines() if not line.lstrip().startswith(("%", "!")))
    with tokenize.open(file) as opened:  # honours the coding line
        return opened.read()


def _remarks(tree: ast.AST) -> Iterator[Remark]:
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    on_gpu = any(isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.startswith("cuda") for n in ast.walk(tree)) or any(
        _name(c) == "cuda" for c in calls
    )
    bfloat = next((c for c in calls if _name(c) == "autocast" and "bfloat16" in ast.unparse(c)), None)
    for call in calls:
        yield from _of_call(call, on_gpu, bfloat is not None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from _of_switch(node)


def _of_call(call: ast.Call, on_gpu: bool, bfloat: bool) -> Iterator[Remark]:
    name, line = _name(call), call.lineno
    if (name == "set_detect_anomaly" and _first_is(call, True)) or (name == "detect_anomaly" and not _first_is(call, False)):
        yield Remark(
            Grade.BAD, "anomaly mode is left on: every step costs two to four times as much", line=line, advice="take it out; whynan run finds the place"
        )
    if name == "Trainer" and _keyword(call, "detect_anomaly") is True:
        yield Remark(Grade.BAD, "Trainer(detect_anomaly=True): every step costs two to four times as much", line=line, advice="take it out")
    if name in _ARGUMENTS and _keyword(call, "logging_nan_inf_filter") is not False and not _has_unpacking(call):
        yield Remark(
            Grade.BAD, f"{name} hides NaN and infinite losses from the log (logging_nan_inf_filter is on)", line=line, advice="logging_nan_inf_filter=False"
        )
    if name == "GradScaler" and bfloat and _keyword(call, "enabled") is not False:
        yield Remark(Grade.BAD, "a GradScaler beside bfloat16: it has nothing to scale and can still skip steps", line=line, advice="leave the scaler out")
    if name in _OPTIMIZERS and on_gpu and _keyword(call, "fused") is not True and _of_torch(call) and not _has_unpacking(call):
        yield Remark(Grade.NOTE, f"{name} without fused=True on CUDA: a bad step cannot be skipped on the device", line=line, advice="fused=True")
    if name == "set_flush_denormal" and not _first_is(call, False):
        yield Remark(Grade.NOTE, "denormal numbers are flushed to zero: a tiny divisor becomes exactly 0", line=line)


_SWITCHES = {
    "allow_fp16_reduced_precision_reduction": "sums of float16 products are kept in float16: they can overflow",
    "allow_bf16_reduced_precision_reduction": "sums of bfloat16 products are kept in bfloat16: three digits are left",
    "allow_tf32": "float32 products with ten bits of mantissa (TF32)",
    "benchmark": "cudnn.benchmark: two runs need not give the same numbers",
}


def _of_switch(node: ast.Assign) -> Iterator[Remark]:
    for target in node.targets:
        is_backend = isinstance(target, ast.Attribute) and "backends" in ast.unparse(target)
        if is_backend and target.attr in _SWITCHES and isinstance(node.value, ast.Constant) and node.value.value is True:  # type: ignore[attr-defined]
            yield Remark(Grade.NOTE, _SWITCHES[target.attr], line=node.lineno)  # type: ignore[attr-defined]


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _of_torch(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) or "optim" in ast.unparse(call.func)


def _first_is(call: ast.Call, value: bool) -> bool:
    given = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg in ("mode", "check_nan", "enabled")), None)
    return isinstance(given, ast.Constant) and given.value is value


def _keyword(call: ast.Call, name: str) -> object:
    given = next((k.value for k in call.keywords if k.arg == name), None)
    return given.value if isinstance(given, ast.Constant) else given


def _has_unpacking(call: ast.Call) -> bool:
    return any(k.arg is None for k in call.keywords)
