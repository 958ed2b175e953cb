"""`whynan lint` on the command line: formats, suppression, settings, fixes, exit status, and input that cannot be read."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, PYTHON

from whynan.commands.main import main
from whynan.lint import files, linting, reporting

BAD = "import torch\n\n\ndef nll(x):\n    return -torch.log(torch.softmax(x, dim=-1))\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lint(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Run the command; return status, output and errors."""
    status = main(["lint", *argv])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_text_points_at_the_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finding shows title, place, the source with a caret under exactly the expression, help and the code's page."""
    (folder / "a.py").write_text(BAD)
    status, out, _ = lint(capsys, "a.py")
    assert status == 1
    lines = out.splitlines()
    assert lines[0].startswith("high[WN101]: log of a softmax")
    assert "a.py:5:13" in lines[1]
    source, caret = lines[3], lines[4]
    start = caret.index("^")
    assert source[start : start + caret.count("^")] == "torch.log(torch.softmax(x, dim=-1))"
    assert "whynan explain WN101" in out


def test_summary_comes_last_most_likely_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last lines rank the findings, high confidence before medium."""
    (folder / "a.py").write_text("import torch\ndef f(path):\n    return torch.load(path)\n" + BAD)
    _, out, _ = lint(capsys, "a.py")
    tail = out[out.index("whynan: 2 findings") :].splitlines()
    assert "most likely first" in tail[0]
    assert [line.split()[:2] for line in tail[1:]] == [["high", "WN101"], ["medium", "WL109"]]


def test_nothing_found_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A clean tree gives status 0 and one line."""
    (folder / "a.py").write_text("import torch\n")
    assert lint(capsys, ".") == (0, "whynan: nothing found in 1 file\n", "")


def test_low_confidence_only_on_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default medium and above is shown; what was held back is counted."""
    (folder / "a.py").write_text("import torch\ndef f(x: torch.Tensor):\n    return torch.exp(x)\n")
    status, out, _ = lint(capsys, "a.py")
    assert status == 0
    assert "1 more of lower confidence" in out
    assert lint(capsys, "a.py", "--min-confidence", "low")[0] == 1


def test_concise_is_a_line_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """path:line:column: code title."""
    (folder / "a.py").write_text(BAD)
    out = lint(capsys, "a.py", "--format", "concise")[1]
    assert out.splitlines()[0] == "a.py:5:13: WN101 log of a softmax [high, confidence high]"


def test_json_is_one_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON holds every field of a finding, and what could not be read."""
    (folder / "a.py").write_text(BAD)
    (folder / "b.py").write_text("import torch\ndef (\n")
    status, out, _ = lint(capsys, "a.py", "b.py", "--format", "json")
    data = json.loads(out)
    assert status == 2
    (finding,) = data["findings"]
    assert (finding["code"], finding["line"], finding["column"], finding["severity"], finding["fix"]["safe"]) == ("WN101", 5, 12, "high", True)
    assert data["unreadable"][0]["path"] == "b.py"


def test_github_annotations(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One workflow command a finding, with properties escaped."""
    (folder / "a,b.py").write_text(BAD)
    out = lint(capsys, "a,b.py", "--format", "github")[1]
    assert out.startswith("::error file=a%2Cb.py,line=5,endLine=5,col=13,endColumn=48,title=WN101 log-of-zero::log of a softmax")


def test_sarif_has_what_the_schema_requires(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """version, runs, tool.driver.name, and for each result a message, a known rule and a region that counts from 1."""
    (folder / "a.py").write_text(BAD + "def g(p):\n    return torch.load(p)\n")
    log = json.loads(lint(capsys, "a.py", "--format", "sarif")[1])
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "whynan"
    ids = [r["id"] for r in driver["rules"]]
    assert ids == ["WL109", "WN101"]
    for result in run["results"]:
        assert result["message"]["text"]
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        region = result["locations"][0]["physicalLocation"]["region"]
        assert min(region.values()) >= 1
        assert (region["startLine"], region["startColumn"]) <= (region["endLine"], region["endColumn"])


@pytest.mark.parametrize(
    ("comment", "status"),
    [("# whynan: ignore", 0), ("# whynan: ignore[WN101]", 0), ("# whynan: ignore[log-of-zero, WN103]", 0), ("# whynan: ignore[WN103]", 1)],
)
def test_comment_suppresses(folder: Path, capsys: pytest.CaptureFixture[str], comment: str, status: int) -> None:
    """A comment on the line leaves out all findings there, or those it names."""
    (folder / "a.py").write_text(BAD.rstrip() + f"  {comment}\n")
    assert lint(capsys, "a.py")[0] == status


@pytest.mark.parametrize(
    ("table", "status"),
    [("", 1), ('ignore = ["WN101"]', 0), ('select = ["WL"]', 0), ('select = ["WN1"]', 1), ('exclude = ["sub"]', 0), ('min-confidence = "high"', 1),
     ('per-file-ignores = {"sub/*.py" = ["log-of-zero"]}', 0), ('per-file-ignores = {"other/*.py" = ["WN101"]}', 1)],
)  # fmt: skip
def test_pyproject_is_read(folder: Path, capsys: pytest.CaptureFixture[str], table: str, status: int) -> None:
    """[tool.whynan] selects, ignores, excludes and sets the confidence."""
    (folder / "sub").mkdir()
    (folder / "sub" / "a.py").write_text(BAD)
    (folder / "pyproject.toml").write_text(f"[tool.whynan]\n{table}\n")
    assert lint(capsys, ".")[0] == status


def test_source_in_capsules_is_not_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run directory holds copies of the source; the findings are told once."""
    capsule = folder / "whynan-runs" / "1115-140213" / "capsules" / "step-000001" / "source"
    capsule.mkdir(parents=True)
    (capsule / "a.py").write_text(BAD)
    assert lint(capsys, ".")[0] == 0
    (folder / "a.py").write_text(BAD)
    assert lint(capsys, ".")[1].count("[WN101]") == 1


@pytest.mark.parametrize(
    "argv",
    [[], ["missing.py"], ["a.py", "--select", "XX9"], ["a.py", "--format", "yaml"], ["a.py", "--min-confidence", "some"]],
)
def test_misuse_is_one_line_and_status_2(folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    """Wrong arguments are named in one line on stderr."""
    (folder / "a.py").write_text("import torch\n")
    status, _, err = lint(capsys, *argv)
    assert status == 2
    assert err.startswith("whynan: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("table", ["select = 3", 'select = ["XX1"]', 'min-confidence = "sure"', "per-file-ignores = []", "= broken"])
def test_bad_settings_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str], table: str) -> None:
    """A setting that cannot be meant is named with its file."""
    (folder / "a.py").write_text(BAD)
    (folder / "pyproject.toml").write_text(f"[tool.whynan]\n{table}\n")
    status, _, err = lint(capsys, "a.py")
    assert status == 2
    assert "pyproject.toml" in err
    assert err.count("\n") == 1


def test_unreadable_input_is_one_line_each_and_the_rest_is_done(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Syntax error, undeclared Latin-1, no permission, a pipe, a link to itself, a folder that holds itself, a broken notebook."""
    (folder / "good.py").write_text(BAD)
    (folder / "syntax.py").write_text("import torch\ndef f(:\n")
    (folder / "latin.py").write_bytes("import torch\nname = 'é'\n".encode("latin-1"))
    (folder / "closed.py").write_text(BAD)
    os.mkfifo(folder / "pipe.py")
    (folder / "loop.py").symlink_to(folder / "loop.py")
    (folder / "inner").mkdir()
    (folder / "inner" / "again").symlink_to(folder)
    (folder / "broken.ipynb").write_text('{"torch": 1}')
    read_bytes = Path.read_bytes

    def denied(path: Path) -> bytes:
        if path.name == "closed.py":
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    status, out, err = lint(capsys, ".")
    assert status == 2
    assert out.count("high[WN101]") == 1
    said = sorted(line.removeprefix("whynan: ").split(":")[0] for line in err.splitlines())
    assert said == ["broken.ipynb", "closed.py", "inner/again", "latin.py", "loop.py", "pipe.py", "syntax.py"]


def test_declared_encoding_is_honoured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Latin-1 file that says so is read, and columns count characters."""
    (folder / "a.py").write_bytes(("# coding: latin-1\nimport torch\ndef f(x):\n    s = 'éé'; y = torch.log(torch.sigmoid(x)); return y\n").encode("latin-1"))
    status, out, _ = lint(capsys, "a.py", "--format", "concise")
    assert status == 1
    assert out.startswith("a.py:4:19: WN101")


def test_notebook_cells(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The code cells of a notebook are looked at, with the imports of earlier cells, and named by number."""
    cells = [
        {"cell_type": "markdown", "source": ["# torch"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "import torch\n"]},
        {"cell_type": "code", "source": ["def f(x):\n", "    return torch.log(torch.softmax(x, -1))\n"]},
        {"cell_type": "code", "source": ["def f(:\n"]},
    ]
    (folder / "a.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}))
    status, out, err = lint(capsys, "a.ipynb", "--format", "concise")
    assert out.startswith("a.ipynb:cell 3:2:12: WN101")
    assert status == 2
    assert err.startswith("whynan: a.ipynb, cell 4: syntax error")


def test_large_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five megabytes of statements are looked at to the end; a file past the limit is one line."""
    body = "x = torch.relu(x + 1.0)\n" * 200_000
    (folder / "large.py").write_text("import torch\nx = torch.ones(3)\n" + body + BAD)
    status, out, _ = lint(capsys, "large.py", "--format", "concise")
    assert status == 1
    assert out.startswith("large.py:200007:")
    (folder / "huge.py").write_bytes(b"#" * (files._LARGEST + 1))
    assert "larger than" in lint(capsys, "huge.py")[2]


@pytest.mark.parametrize(
    "text", ["x = " + "(" * 3000 + "1" + ")" * 3000, "x = " + "-" * 20000 + "1", "x = y" + " + torch.log(y)" * 2000, "x = y" + ".f()" * 20000, "def f(:\n" * 10]
)
def test_deep_nesting_does_not_crash(folder: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Expressions nested past what Python can hold are at most one line; the other file is still done."""
    (folder / "deep.py").write_text(f"import torch\n{text}\n")
    (folder / "good.py").write_text(BAD)
    _, out, err = lint(capsys, ".")
    assert "good.py:5:13" in out
    assert err.count("\n") <= 1


def test_null_bytes_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A binary file with the wrong name."""
    (folder / "a.py").write_bytes(b"import torch\n\x00\x00\n")
    status, _, err = lint(capsys, "a.py")
    assert status == 2
    assert err.count("\n") == 1
    assert "None" not in err


FIXES = {
    "log_softmax": ("torch.log(torch.softmax(x, dim=-1))", "torch.log_softmax(x, dim=-1)"),
    "log_softmax as methods": ("x.softmax(-1).log()", "torch.log_softmax(x, -1)"),
    "logsigmoid": ("torch.log(torch.sigmoid(x))", "F.logsigmoid(x)"),
    "vector_norm": ("torch.sqrt((x ** 2).sum(dim=1))", "torch.linalg.vector_norm(x, dim=1)"),
    "vector_norm of a difference": ("((x - y) * (x - y)).sum(1, keepdim=True).sqrt()", "torch.linalg.vector_norm(x - y, dim=1, keepdim=True)"),
    "softplus": ("torch.log(1 + torch.exp(x))", "F.softplus(x)"),
    "logsumexp": ("x.exp().sum(dim=1).log()", "torch.logsumexp(x, dim=1)"),
    "softmax": ("torch.exp(x) / torch.exp(x).sum(dim=1, keepdim=True)", "torch.softmax(x, dim=1)"),
    "sigmoid": ("1 / (1 + torch.exp(-x))", "torch.sigmoid(x)"),
    "cross entropy": ("F.binary_cross_entropy(torch.sigmoid(x), y)", "F.binary_cross_entropy_with_logits(x, y)"),
    "log1p": ("torch.log(1 + x.abs())", "torch.log1p(x.abs())"),
}


@pytest.mark.parametrize("name", FIXES)
def test_safe_fixes_keep_the_mathematics(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """--fix writes the stable form, and it gives the same numbers where the old one was finite."""
    old, new = FIXES[name]
    file = folder / "a.py"
    file.write_text(f"import torch\nimport torch.nn.functional as F\n\n\ndef some_loss(x, y):\n    return {old}\n")
    lint(capsys, "a.py", "--fix", "--min-confidence", "low")
    assert file.read_text().rstrip().endswith(f"return {new}")
    torch.manual_seed(0)
    x, y = torch.randn(4, 5, dtype=torch.float64), torch.rand(4, 5, dtype=torch.float64)
    scope = {"torch": torch, "F": torch.nn.functional, "x": x, "y": y}
    assert torch.allclose(eval(old, scope), eval(new, scope))


def test_softmax_without_keepdim_is_not_rewritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """exp(x) / exp(x).sum(1) divides along another axis: no fix is offered."""
    (folder / "a.py").write_text("import torch\ndef f(x):\n    return torch.exp(x) / torch.exp(x).sum(1)\n")
    assert lint(capsys, "a.py", "--diff")[1] == ""


def test_unsafe_fixes_only_when_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A clamp changes results: --fix leaves it, --unsafe-fixes writes it."""
    file = folder / "a.py"
    text = "import torch\ndef unit(v: torch.Tensor):\n    return v / v.norm()\n"
    file.write_text(text)
    assert lint(capsys, "a.py", "--fix")[0] == 1
    assert file.read_text() == text
    assert lint(capsys, "a.py", "--unsafe-fixes")[0] == 0
    assert "v / v.norm().clamp_min(1e-6)" in file.read_text()


def test_diff_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--diff shows a unified diff of what --fix would do."""
    file = folder / "a.py"
    file.write_text(BAD)
    status, out, _ = lint(capsys, "a.py", "--diff")
    assert status == 1
    assert "-    return -torch.log(torch.softmax(x, dim=-1))\n+    return -torch.log_softmax(x, dim=-1)\n" in out
    assert file.read_text() == BAD


def test_fix_keeps_line_ends_and_encoding(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with Windows line ends in Latin-1 stays one; a second finding on the line is fixed too."""
    file = folder / "a.py"
    file.write_bytes(
        "# coding: latin-1\r\nimport torch\r\ndef f(x):\r\n    é = 1; return torch.log(torch.softmax(x, -1)) + torch.log(torch.softmax(x, 0))\r\n".encode(
            "latin-1"
        )
    )
    lint(capsys, "a.py", "--fix")
    assert (
        file.read_bytes()
        == "# coding: latin-1\r\nimport torch\r\ndef f(x):\r\n    é = 1; return torch.log_softmax(x, -1) + torch.log_softmax(x, 0)\r\n".encode("latin-1")
    )


def test_works_without_torch(folder: Path) -> None:
    """lint starts and finds where torch cannot be imported."""
    (folder / "a.py").write_text(BAD)
    program = "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None; from whynan.commands.main import main; sys.exit(main(['lint', 'a.py']))"
    done = subprocess.run([PYTHON, "-c", program], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_hook_file_names_the_command() -> None:
    """The pre-commit hook runs `whynan lint` on Python files and notebooks."""
    hook = (Path(__file__).parent.parent / ".pre-commit-hooks.yaml").read_text()
    assert "entry: whynan lint" in hook
    assert "types_or: [python, pyi, jupyter]" in hook


def test_fix_keeps_mixed_line_ends_the_mark_and_the_permissions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines that were not fixed keep their own line ends; the byte order mark, the mode and a link stay."""
    file = folder / "real.py"
    file.write_bytes(b"\xef\xbb\xbfimport torch\r\ndef f(x):\n    return torch.log(torch.softmax(x, -1))\r\n# end\n")
    file.chmod(0o750)
    (folder / "a.py").symlink_to("real.py")
    lint(capsys, "a.py", "--fix")
    assert file.read_bytes() == b"\xef\xbb\xbfimport torch\r\ndef f(x):\n    return torch.log_softmax(x, -1)\r\n# end\n"
    assert file.stat().st_mode & 0o7777 == 0o750
    assert (folder / "a.py").is_symlink()
    assert sorted(p.name for p in folder.iterdir()) == ["a.py", "real.py"]


def test_fix_twice_changes_nothing_more(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What --fix wrote has nothing left to fix."""
    file = folder / "a.py"
    body = "".join(f"def f{i}(x, y):\n    return {old}\n" for i, (old, _) in enumerate(FIXES.values()))
    file.write_text(f"import torch\nimport torch.nn.functional as F\n{body}")
    lint(capsys, "a.py", "--fix", "--min-confidence", "low")
    once = file.read_text()
    lint(capsys, "a.py", "--fix", "--min-confidence", "low")
    assert file.read_text() == once


def test_a_full_disk_costs_nothing(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a fix cannot be written the file stays as it was, one line says why, the other file is fixed, and the status is 2."""
    (folder / "a.py").write_text(BAD)
    (folder / "b.py").write_text(BAD)
    replace = os.replace

    def full(source: str, target: Path) -> None:
        if Path(target).name == "a.py":
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    status, _, err = lint(capsys, ".", "--fix")
    assert (status, (folder / "a.py").read_text()) == (2, BAD)
    assert "log_softmax" in (folder / "b.py").read_text()
    assert err == "whynan: 1 fixed in 1 file\nwhynan: a.py: cannot be written: no space left on device\n"
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("table", ["[tool]\nwhynan = 3", "[[tool.whynan]]\na = 1"])
def test_settings_that_are_no_table_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str], table: str) -> None:
    """The file is named, and the status is 2."""
    (folder / "pyproject.toml").write_text(table)
    status, _, err = lint(capsys, ".")
    assert (status, err) == (2, f"whynan: {folder / 'pyproject.toml'}: tool.whynan is not a table\n")


def test_a_tool_that_is_no_table_says_nothing_about_whynan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is set: it is another tool's to complain."""
    (folder / "pyproject.toml").write_text("tool = 3")
    assert lint(capsys, ".")[0] == 0


def test_an_empty_name_is_not_the_working_directory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`whynan lint "$UNSET"` is misuse."""
    (folder / "a.py").write_text(BAD)
    status, out, err = lint(capsys, "")
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_a_name_with_control_characters_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line end or an escape sequence in a file's name is written out, and percent-encoded in SARIF."""
    (folder / "a\n\x1b[31mb.py").write_text(BAD)
    (folder / "c\nd.py").write_text("import torch\ndef (\n")
    _, out, err = lint(capsys, ".", "--format", "concise")
    assert out.startswith("a\\n\\x1b[31mb.py:5:13: WN101")
    assert err.count("\n") == 1
    log = json.loads(lint(capsys, ".", "--format", "sarif")[1])
    assert log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%0A%1B%5B31mb.py"


def test_thousands_of_findings_split_their_source_once(folder: Path) -> None:
    """The text of a file is taken apart once, not for each finding: the time stays linear."""

    class Counted(str):
        splits = 0

        def split(self, *given: object, **named: object) -> list[str]:  # type: ignore[override]
            Counted.splits += 1
            return super().split(*given, **named)  # type: ignore[arg-type]

    (folder / "a.py").write_text(BAD * 20)
    report = linting.lint_paths([folder / "a.py"])
    report.texts = {key: Counted(source) for key, source in report.texts.items()}
    assert reporting.text(report).count("--> ") == 20
    assert Counted.splits == 1


def test_a_full_output_is_one_line(folder: Path) -> None:
    """Output that cannot be written gives status 2 and no traceback."""
    (folder / "a.py").write_text(BAD)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [PYTHON, "-m", "whynan", "lint", "a.py"], cwd=folder, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (2, "whynan: the output: no space left on device\n")


def test_control_c_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 130 and no traceback."""

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(linting, "lint_paths", interrupted)
    assert lint(capsys, ".") == (130, "", "whynan: interrupted\n")
