"""The package as it is installed: built by hatchling, put into an environment with what it asks for and nothing else, no torch, no numpy."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import shutil
import struct
import subprocess
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, PYTHON, Shown

ROOT = Path(__file__).resolve().parent.parent
DIRECT = {"click", "rich", "jinja2", "safetensors"}
THEIRS = {"markdown-it-py", "mdurl", "pygments", "markupsafe"}
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree: a build writes nothing into it."""
    pytest.importorskip("hatchling", reason="hatchling builds the package; `make` installs it")
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [PYTHON, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a command in an environment that holds the wheel and what it asks for, taken from here: no network."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False, symlinks=True)
    packages = next(place.glob("lib/python*/site-packages"))
    pip = [PYTHON, "-m", "pip", "--python", str(place), "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    done = subprocess.run(pip, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in needed("whynan", requirements(wheel)):
        _link(name, packages)

    def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(place / "bin" / command[0]), *command[1:]], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def _link(name: str, packages: Path) -> None:
    """Put a distribution of this environment into another one."""
    files = importlib.metadata.distribution(name).files or []
    for top in {file.parts[0] for file in files if file.parts[0] != ".."}:
        source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
        if source.exists() and not (packages / top).exists():
            (packages / top).symlink_to(source)


def requirements(wheel: Path) -> list[str]:
    """What the wheel asks for without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    return [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]


def needed(name: str, asked: list[str]) -> set[str]:
    """Everything that comes along, by name, as the markers of this Python and system have it."""
    packaging = pytest.importorskip("packaging.requirements")
    found: set[str] = set()
    for text in asked:
        requirement = packaging.Requirement(text)
        key = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found |= {key} | needed(key, importlib.metadata.requires(key) or [])
    return found


def test_installing_brings_four_small_packages_and_what_they_need(wheel: Path) -> None:
    """Four are asked for; with theirs it is eight, none of them large, and torch and numpy are not among them."""
    assert {re.split(r"[<>=! ;]", text)[0] for text in requirements(wheel)} == DIRECT
    assert needed("whynan", requirements(wheel)) == DIRECT | THEIRS
    sizes = {
        name: sum(Path(str(f.locate())).stat().st_size for f in importlib.metadata.files(name) or [] if f.suffix != ".pyc" and Path(str(f.locate())).exists())
        for name in DIRECT | THEIRS
    }
    assert max(sizes.values()) < 8_000_000, sizes


def test_wheel_holds_the_package_and_its_data_only(wheel: Path) -> None:
    """Every file of src/whynan is in it, and nothing of the tests, docs or benchmarks; the licence is."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    ours = {p.relative_to(ROOT / "src").as_posix() for p in files_below(ROOT / "src" / "whynan")}
    book = ROOT / "examples" / "casebook"
    programs = {f"whynan/casebook/programs/{p.relative_to(book).as_posix()}" for p in files_below(book) if p.suffix in (".py", ".toml", ".yaml")}
    assert {n for n in names if not n.split("/")[0].endswith(".dist-info")} == ours | programs
    assert any(n.endswith("licenses/LICENSE") for n in names)


def files_below(folder: Path) -> list[Path]:
    """The files that git knows or would take: no caches and nothing that a run left."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", str(folder)]
    listed = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if listed.returncode:  # no repository: an unpacked source
        return [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_wheel_holds_the_programs_of_the_demo_and_what_the_report_is_made_of(wheel: Path) -> None:
    """Five cases with their healed programs, and the template, style and scripts of the page with the licence of the one that is not ours."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for case in ("transcoder", "token_image", "joint_diffusion", "clustering_heads", "hyper_connections"):
        assert {f"whynan/casebook/programs/{case}/{file}" for file in ("case.toml", "train.py", "healed/train.py")} <= names
    page = {Path(n).suffix for n in names if n.startswith("whynan/report/page/")}
    assert {".j2", ".css", ".js"} <= page
    assert any(n.startswith("whynan/report/page/") and "licen" in n.lower() for n in names)


def test_pip_installs_a_clone(tmp_path: Path, shown: Shown) -> None:
    """The command of the page in a copy of the tree; without the network, so what it needs is not fetched."""
    pytest.importorskip("hatchling", reason="hatchling builds the package; `make` installs it")
    (command,) = shown("docs/start.md")
    words = shlex.split(command)
    assert words[:2] == ["pip", "install"]
    clone = tmp_path / "clone"
    for path in files_below(ROOT):
        (clone / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, clone / path.relative_to(ROOT))
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--no-compile", "--target", str(tmp_path / "there")]
    done = subprocess.run([PYTHON, "-m", *words, *offline], cwd=clone, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "there" / "whynan" / "__init__.py").is_file() and (tmp_path / "there" / "bin" / "whynan").is_file()


def test_neither_torch_nor_numpy_is_there(installed: Run, tmp_path: Path) -> None:
    """The tests below would otherwise show nothing."""
    for module in ("torch", "numpy"):
        done = installed("python", "-c", f"import {module}", folder=tmp_path)
        assert "ModuleNotFoundError" in done.stderr


def test_explain_lint_and_doctor_work_without_torch(installed: Run, tmp_path: Path) -> None:
    """The page of a code, a finding in source, and what is installed."""
    assert installed("whynan", "explain", "WN501", folder=tmp_path).stdout.startswith("WN501 infinite-slope")
    (tmp_path / "loss.py").write_text("import torch\n\n\ndef loss(x):\n    return -torch.log(torch.softmax(x, -1)).mean()\n")
    found = installed("whynan", "lint", "loss.py", folder=tmp_path)
    assert (found.returncode, found.stderr) == (1, "")
    assert "high[WN101]" in found.stdout
    doctor = installed("whynan", "doctor", folder=tmp_path)
    assert doctor.returncode == 0
    assert re.search(r"torch +not installed", doctor.stdout)


@pytest.mark.parametrize("bad", [True, False])
def test_check_of_safetensors_works_without_torch(installed: Run, tmp_path: Path, bad: bool) -> None:
    """A NaN in a file is found; a healthy file is healthy."""
    values = [1.0, 2.0, float("nan") if bad else 3.0, 4.0]
    head = json.dumps({"layer.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + struct.pack("<4f", *values))
    done = installed("whynan", "check", "model.safetensors", folder=tmp_path)
    assert done.returncode == int(bad), done.stdout + done.stderr
    assert ("layer.weight: 1 nan of 4 values (WN601)" in done.stdout) == bad


def test_check_of_a_torch_file_works_without_torch(installed: Run, tmp_path: Path) -> None:
    """A pickle is read, not loaded."""
    torch.save({"layer.weight": torch.tensor([1.0, float("nan")])}, tmp_path / "model.pt")
    assert "layer.weight: 1 nan of 2 values (WN601)" in installed("whynan", "check", "model.pt", folder=tmp_path).stdout


def test_report_is_made_without_torch(installed: Run, tmp_path: Path) -> None:
    """From the files of a run made elsewhere: the page, the text, and one frame of the live view."""
    run = tmp_path / "whynan-runs" / "1115-140213"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "loss": 1 / (n + 1), "grad_norm": 0.5}) + "\n" for n in range(8)))
    done = installed("whynan", "report", str(run), folder=tmp_path)
    assert done.returncode == 0 and done.stderr.splitlines() == [f"whynan: wrote {run / 'report.html'}"]
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (run / "report.md").is_file()
    live = installed("whynan", "report", str(run), "--follow", "--once", folder=tmp_path)
    assert live.returncode == 0 and "loss" in live.stdout


@pytest.mark.parametrize("command", [("run", "train.py"), ("replay", "capsule"), ("probe", "train:factory"), ("demo",), ("demo", "transcoder")])
def test_what_needs_torch_says_so_in_one_line(installed: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Exit status 2, no traceback."""
    (tmp_path / "train.py").write_text("def factory(): ...\n")
    (tmp_path / "capsule").mkdir()
    done = installed("whynan", *command, folder=tmp_path)
    assert done.returncode == 2
    assert "torch" in done.stderr
    assert len(done.stderr.splitlines()) == 1
