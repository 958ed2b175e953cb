"""`whynan explain`: the page of a code, found by code, slug, error message or a piece of log; without torch."""

from __future__ import annotations

import re
import subprocess

import pytest
from conftest import ENVIRONMENT, PYTHON

import whynan
from whynan.commands.main import main

CODES = {
    "WN101": "log-of-zero", "WN102": "log-of-negative", "WN103": "division-by-zero", "WN104": "zero-over-zero",
    "WN105": "root-of-negative", "WN106": "negative-power-of-zero", "WN107": "inverse-function-out-of-range",
    "WN108": "singular-matrix", "WN109": "pole-of-special-function", "WN201": "exp-overflow", "WN202": "half-overflow",
    "WN203": "float-overflow", "WN204": "epsilon-lost", "WN301": "inf-minus-inf", "WN302": "zero-times-inf",
    "WN303": "inf-over-inf", "WN401": "fully-masked-softmax", "WN402": "mean-of-nothing", "WN403": "variance-of-one",
    "WN404": "constant-batch", "WN405": "infeasible-target", "WN501": "infinite-slope", "WN502": "branch-not-taken",
    "WN503": "gradient-overflow", "WN504": "degenerate-decomposition", "WN601": "parameter-not-finite",
    "WN602": "buffer-not-finite", "WN603": "optimizer-state-not-finite", "WN604": "update-not-finite", "WN605": "divergence",
    "WN606": "loss-scale-collapse", "WN607": "learning-rate-overridden", "WN608": "uninitialised-parameter",
    "WN701": "input-not-finite", "WN702": "target-not-finite", "WN703": "value-out-of-range", "WN802": "not-reproducible",
    "WN803": "compiled-only", "WN901": "origin-not-observed",
}  # fmt: skip


@pytest.mark.parametrize(("code", "slug"), CODES.items())
def test_every_code_has_a_page(code: str, slug: str) -> None:
    """A code, in any case, and its slug give the same page, which begins with code, slug and title and says more."""
    page = whynan.explain(code)
    head, blank, *rest = page.splitlines()
    assert head.startswith(f"{code} {slug}: ")
    assert not head.endswith(".")
    assert blank == ""
    assert "".join(rest).strip()
    assert whynan.explain(code.lower()) == whynan.explain(f"  {slug} ") == page


def test_list_of_all_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Without an argument every code is listed once, in order, with slug and title."""
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines]
    assert listed == sorted(listed)
    assert set(CODES) <= set(listed)
    assert len(set(listed)) == len(listed)
    assert all(len(line.split()) >= 3 for line in lines)


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("Function 'SqrtBackward0' returned nan values in its 0th output.", {"WN501"}),
        ("Function 'PowBackward0' returned nan values in its 0th output.", {"WN501", "WN502"}),
        ("Function 'LinalgVectorNormBackward0' returned nan values in its 0th output.", {"WN501"}),
        ("Function 'LogBackward0' returned nan values in its 0th output.", {"WN101"}),
        ("Function 'WhereBackward0' returned nan values in its 1th output.", {"WN502"}),
        ("Function 'DivBackward0' returned nan values in its 0th output.", {"WN103", "WN104", "WN404"}),
        ("Function 'ExpBackward0' returned nan values in its 0th output.", {"WN201"}),
        ("Function 'LinalgEighBackward0' returned nan values in its 0th output.", {"WN504"}),
        ("Function 'SoftmaxBackward0' returned nan values in its 0th output.", {"WN401"}),
        ("Function 'ScaledDotProductFlashAttentionForCpuBackward0' returned nan values in its 0th output.", {"WN401"}),
        ("IndexError: index out of range in self", {"WN703"}),
        ("RuntimeError: CUDA error: device-side assert triggered", {"WN703"}),
        ("IndexError: Target 10 is out of bounds.", {"WN703"}),
        ("torch._C._LinAlgError: linalg.cholesky: The factorization could not be completed because the input is not positive-definite", {"WN108"}),
        (
            "torch._C._LinAlgError: linalg.inv: The diagonal element 2 is zero, the inversion could not be completed because the input matrix is singular.",
            {"WN108"},
        ),
        ("UserWarning: std(): degrees of freedom is <= 0. Correction should be strictly less than the reduction factor", {"WN403"}),
        ("ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 8])", {"WN403"}),
        ("RuntimeError: value cannot be converted to type at::Half without overflow", {"WN202"}),
        ("RuntimeWarning: Mean of empty slice", {"WN402"}),
        ("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0", {"WN606"}),
        ("RuntimeError: probability tensor contains either `inf`, `nan` or element < 0", {"WN101", "WN401"}),
        ("RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped.", {"WN503", "WN501"}),
        ("step 120: loss=nan", {"WN605", "WN701"}),
        ("epoch 3 train_loss: inf lr 1e-3", {"WN605"}),
        ("grad_norm: nan", {"WN503", "WN501"}),
        ("error[WN404]: constant batch\n  --> train.py:3", {"WN404"}),
    ],
)
def test_messages_find_their_codes(text: str, codes: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An error message or a piece of log gives the codes it can come from, the page of the first, and what to run."""
    assert main(["explain", text]) == 0
    out = capsys.readouterr().out
    assert codes <= set(re.findall(r"^ +(WN\d{3})  ", out, re.MULTILINE))
    first = re.search(r"^ +(WN\d{3})  ", out, re.MULTILINE)
    assert first is not None
    assert f"\n{first[1]} {CODES[first[1]]}: " in out
    assert "whynan run" in out


def test_message_without_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    """The words of a message may come as separate arguments."""
    assert main(["explain", "index", "out", "of", "range", "in", "self"]) == 0
    assert "WN703" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["hello there", "WN999", "wn000", "", "   ", "line one\nline two", "x" * 5000, "-inf is what I saw", "0.3500"])
def test_text_that_fits_nothing(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown text: one line that says so and what to do, exit status 2."""
    assert main(["explain", text]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert re.fullmatch(r"whynan: [^\n]+\n", streams.err)
    assert len(streams.err) < 250


def test_explain_starts_without_torch() -> None:
    """`import whynan`, its explain and the command line's explain never import torch, and work where it is absent."""
    program = """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
import whynan
assert len(whynan.explain("WN101")) > 20
from whynan.commands.main import main
assert main(["explain", "WN501"]) == 0
assert main(["explain"]) == 0
assert main(["--version"]) == 0
assert main(["run", "anything.py"]) == 2
loaded = [name for name in sys.modules if name.split(".")[0] in ("torch", "numpy") and sys.modules[name] is not None]
assert not loaded, loaded
"""
    done = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "whynan: torch is not installed in this environment; pip install torch\n"


def test_public_names() -> None:
    """Every public name can be had, and an unknown one is an AttributeError as of any module."""
    assert all(getattr(whynan, name) is not None for name in whynan.__all__)
    assert len(whynan.__all__) <= 14
    with pytest.raises(AttributeError, match="no attribute 'wach'"):
        whynan.wach  # noqa: B018 (the access is the test)
