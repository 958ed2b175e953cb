"""Run directories made by hand, for tests of the report: large ones, broken ones, hostile ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

HOSTILE = '</script><img src=x onerror="document.title=1"> --> {{ 7*7 }} \u2028 \x1b[31m'

DIFF = "--- a/train.py\n+++ b/train.py\n@@ -11 +11 @@\n-    {}\n+    return torch.linalg.vector_norm(difference, dim=-1)\n"


def incident(step: int = 3, code: str = "WN501", line: int = 11, **more: Any) -> dict[str, Any]:
    """One line of incidents.jsonl, with every field the page tells."""
    source = "return torch.sqrt(difference.pow(2).sum(-1))"
    span = {"file": "train.py", "line": line, "end_line": line, "column": 11, "end_column": 48, "function": "distance", "code": source, "indent": 4}
    value = {"name": "self", "dtype": "float32", "shape": [16], "nan": 0, "posinf": 0, "neginf": 0, "zeros": 1, "min": 0.0, "max": 0.0625}
    told = {
        "schema": 1, "step": step, "rank": 0, "time": "2026-11-15T07:00:00Z",
        "symptom": {"place": "gradient", "kind": "nan", "name": "enc.0.weight", "detail": "4 tensors"},
        "origin": {
            "phase": "backward", **span, "module": "", "op": "aten.sqrt.default", "exact": True, "note": "",
            "inputs": [{**value, "name": "difference.pow(2).sum(-1)"}], "output": {**value, "name": "result"}, "samples": [3, 7],
            "from": [{"file": "train.py", "line": 10, "end_line": 10, "column": 17, "end_column": 22, "code": "difference = a - b", "label": "0 in row 3"}],
        },
        "cause": {"code": code, "slug": "infinite-slope", "title": "infinite slope", "confidence": "proven",
                  "evidence": ["1 of 16 arguments of sqrt are 0 (row 3)"], "label": "the slope of sqrt at 0 is infinite; inf * 0 is nan"},
        "remedies": [
            {"title": "use the norm", "diff": DIFF.format(source), "safe": True, "result": "proven", "effect": "loss 0.0253, gradient norm 0.7902"},
            {"title": "clamp the argument", "diff": "", "safe": False, "result": "failed", "effect": "finite, but the gradient is dead (loss 0.0253)"},
        ],
        "experiments": [{"question": "the step without samples [3, 7]", "answer": "loss 0.0311, gradient norm 0.61"}],
        "action": {"policy": "skip", "taken": "skipped", "streak": 1, "total": 1},
        "path": [
            {"role": "argument", "op": "sum", "phase": "loss", "span": span, "value": value, "note": "argument 'self'"},
            {"role": "origin", "op": "div", "phase": "backward", "span": span, "value": {**value, "posinf": 1}},
            {"role": "carried", "op": "mul", "phase": "backward", "module": "enc", "span": span, "note": "float32[16], holds nan", "left_out": 40},
            {"role": "symptom", "op": "gradient enc.0.weight", "note": "holds nan"},
        ],
        "histograms": [{"name": "difference.pow(2).sum(-1)", "dtype": "float32", "edges": [0.0, 0.03125, 0.0625], "counts": [12, 4], "zeros": 1}],
        "modules": [
            {"name": "", "kind": "Net", "dtype": "float32", "largest": 1.5},
            {"name": "enc.0", "kind": "Linear", "dtype": "float16", "largest": 40000.0, "weight_dtype": "float16", "weight_largest": 2.0, "bad_gradient": True},
        ],
        "source": [{"file": "train.py", "first": 9, "lines": ["def distance(a, b):", "    difference = a - b", "    " + source]}],
    }  # fmt: skip
    return {**told, **more}


def metrics(steps: int, bad: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; the gradient norm of bad steps is not finite."""
    return [
        {"step": n, "loss": 2.5 / (1 + n / 50), "grad_norm": "nan" if n in bad else 1 + 0.5 * math.sin(n), "lr": 0.01 * 0.999**n, "scale": 65536.0}
        for n in range(steps)
    ]


def write_run(folder: Path, incidents: list[dict[str, Any]], rows: list[dict[str, Any]], facts: dict[str, Any] | None = None) -> Path:
    """Write a run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("incidents.jsonl", incidents), ("metrics.jsonl", rows)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if facts is not None:
        (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder
