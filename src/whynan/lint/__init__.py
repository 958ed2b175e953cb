"""Static checks of source: what can become non-finite, seen before the first step. Reads code, never runs it, never imports torch.

files ─► model (imports, functions, classes, bindings) ─► walk ─► rules ─► Finding ─► reporting, fixes
                         └── values: what an expression can be, asked for by the rules
"""

from __future__ import annotations

from whynan.lint.findings import Confidence, Finding, Severity
from whynan.lint.linting import Report, lint_paths, lint_text
from whynan.lint.settings import Settings

__all__ = ["Confidence", "Finding", "Report", "Settings", "Severity", "lint_paths", "lint_text"]
