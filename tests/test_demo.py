"""`whynan demo`: the casebook before the reader's eyes."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from conftest import Sandbox

from whynan.casebook.cases import all_cases
from whynan.casebook.patching import file_of, patched


def test_one_case_is_found_explained_and_healed(box: Sandbox) -> None:
    """The failing program is run, the printed change applied to it and trained to its stated quality; a page is written."""
    done = box.python("-m", "whynan", "demo", "clustering_heads", "--keep", "kept")
    assert done.status == 0, done.err
    assert done.out.count("error[WN501]") == 1 and "the printed change, applied" in done.out
    table = [line for line in done.out.splitlines() if line.startswith("clustering_heads ")]
    assert len(table) == 1 and table[0].endswith("found, explained, healed")
    kept = box.folder / "kept"
    assert "<html" in (kept / "report.html").read_text(encoding="utf-8")
    failing, healed = ((kept / "clustering_heads" / part / "loss.py").read_text().splitlines() for part in ("", "healed"))
    assert sum(line.startswith(("- ", "+ ")) for line in difflib.ndiff(failing, healed)) == 2


def test_an_unknown_name_is_one_line(box: Sandbox) -> None:
    done = box.forked("demo", "transcode")
    assert (done.status, len(done.err.splitlines())) == (2, 1)
    assert "transcoder, token_image, joint_diffusion, clustering_heads, hyper_connections" in done.err


def test_every_case_says_what_it_shows() -> None:
    """Five cases; the text of the true line stands once in its file, and the healed program differs by the stated remedy only."""
    cases = all_cases()
    assert [c.name for c in cases] == ["transcoder", "token_image", "joint_diffusion", "clustering_heads", "hyper_connections"]
    for case in cases:
        assert (case.folder / case.file).read_text(encoding="utf-8").count(case.text) == 1
        for file in case.folder.glob("*.py"):
            other = case.folder / "healed" / file.name
            changed = [x for x in difflib.ndiff(_lines(file), _lines(other)) if x.startswith(("- ", "+ "))] if other.exists() else []
            assert len(changed) in (0, 2), (case.name, changed)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_a_diff_that_does_not_fit_is_refused() -> None:
    diff = "--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
    assert file_of(diff) == "x.py" and patched("a\nb\n", diff) == "a\nc\n"
    with pytest.raises(ValueError, match="expects 'b'"):
        patched("a\nd\n", diff)
