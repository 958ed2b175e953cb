"""Functions of torch that a module has imported by name before watching began."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch._dynamo.utils
from torch.nn.utils import clip_grad_norm_

import whynan


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch._dynamo.utils.counters["stats"], "unique_graphs", 0)  # by a test before this one


@pytest.mark.parametrize(("place", "replaced"), [("helpers.py", True), ("site-packages/library.py", False), ("compiled.so", False)])
def test_names_are_replaced_in_the_files_of_the_program(place: str, replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In those of the program, by the rule that tells them everywhere else; a library keeps what it has imported."""
    module = ModuleType("held_by_a_test")
    module.__file__ = str(tmp_path / place)
    module.clip = original = clip_grad_norm_  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with whynan.watch(torch.nn.Linear(1, 1), files=False):
        assert (module.clip is not original) is replaced
    assert module.clip is original


def test_internal_module_without_a_file_keeps_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that torch's C code makes."""
    module = ModuleType("made_by_c")
    module.clip = original = clip_grad_norm_  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with whynan.watch(torch.nn.Linear(1, 1), files=False):
        assert module.clip is original
