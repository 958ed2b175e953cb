"""The text of a remedy is run, not only its proof: every program here is patched with the first diff and must then be finite."""

from __future__ import annotations

import ast
import math
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
from conftest import Sandbox

from whynan.causes.diffs import joined
from whynan.causes.edits import as_operand
from whynan.causes.fixes import Fix
from whynan.causes.source import Expression, positioned

HEAD = """
    import torch
    from torch import nn
    import torch.nn.functional as F
    torch.set_num_threads(1)
    torch.manual_seed(0)
"""
LOOP = """
    opt = torch.optim.SGD(net.parameters(), 1e-3)
    for step in range(5):
        loss = loss_of(step == 3)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(loss.item())
"""


def program(body: str, head: str = HEAD, loop: str = LOOP) -> str:
    """A program whose fourth step fails: what it needs, what it computes, how it trains."""
    return "".join(textwrap.dedent(part) for part in (head, body, loop))


def first_remedy(box: Sandbox, source: str) -> dict[str, Any]:
    done = box.watched(source)
    assert done.incidents, done.err
    remedy: dict[str, Any] = done.incidents[0]["remedies"][0]
    return remedy


def heal(box: Sandbox, diff: str, tool: tuple[str, ...] = ("patch", "-p1")) -> list[float]:
    """Apply a diff in the folder of the program; return the losses that the program then prints."""
    applied = subprocess.run(tool, cwd=box.folder, input=diff.encode(), capture_output=True, check=False)
    assert applied.returncode == 0, applied.stdout.decode() + applied.stderr.decode() + diff
    done = box.plain(box.folder / "train.py")
    assert done.status == 0, done.err + diff
    return [float(line) for line in done.out.splitlines()]


def healed(box: Sandbox, source: str) -> str:
    """Run a program watched, apply its first diff, run it plain; return the diff."""
    remedy = first_remedy(box, source)
    assert remedy["result"] == "proven" and remedy["diff"], remedy
    losses = heal(box, remedy["diff"])
    assert len(losses) >= 5 and all(map(math.isfinite, losses)), (losses, remedy["diff"])
    return str(remedy["diff"])


def added(diff: str) -> list[str]:
    return [line[1:].strip() for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++")]


# -- what stands before the dot ---------------------------------------------------------------------------------------

MASKED = """
    def loss_of(bad):
        legal = torch.ones(6, 4, dtype=torch.bool)
        legal[0, 2] = False
        if bad:
            legal[4] = False
        return net(torch.randn(6, 3), legal).exp().mean()
"""


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_module_of_the_instance_is_no_tensor(box: Sandbox, name: str) -> None:
    """`self.softmax(z)` with an nn.Softmax: its argument is guarded, not `self`."""
    kind = {"softmax": "Softmax", "log_softmax": "LogSoftmax"}[name]
    body = f"""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)
            self.{name} = nn.{kind}(dim=-1)

        def forward(self, x, legal):
            z = self.fc(x).masked_fill(~legal, float("-inf"))
            return self.{name}(z)

    net = Net()
    """
    diff = healed(box, program(textwrap.dedent(body) + textwrap.dedent(MASKED)))
    assert f"return self.{name}(z.masked_fill(" in diff


def test_a_module_of_an_argument_is_no_tensor(box: Sandbox) -> None:
    """`model.softmax(z)` where `model` is an argument: what the trace saw called there decides."""
    body = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)
            self.softmax = nn.Softmax(dim=-1)

    def score(model, x, legal):
        z = model.fc(x).masked_fill(~legal, float("-inf"))
        return model.softmax(z)

    net = Net()
    """
    source = program(textwrap.dedent(body) + textwrap.dedent(MASKED).replace("net(torch", "score(net, torch"))
    assert "return model.softmax(z.masked_fill(" in healed(box, source)


def test_a_namespace_of_any_name_is_no_tensor(box: Sandbox) -> None:
    body = """
    import torch.nn.functional as nnf
    net = nn.Linear(3, 4)

    def loss_of(bad):
        m = torch.ones(6, 1)
        m[2] = float(not bad)
        s = net(torch.rand(6, 3)).sigmoid()
        return (nnf.softmax(s.masked_fill(m == 0, float("-inf")), dim=-1) * s).sum(-1).mean()
    """
    assert "nnf.softmax(s.masked_fill" in healed(box, program(body))


def test_the_logits_of_a_softmax_module_get_a_name_and_its_dimension_is_kept(box: Sandbox) -> None:
    """The argument is a call of unknown effect: it is computed once, and the log_softmax takes its dimension from where the module is made."""
    body = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)
            self.softmax = nn.Softmax(-1)

        def forward(self, x):
            p = self.softmax(self.fc(x))
            return p.log()

    net = Net()

    def loss_of(bad):
        return -net(torch.randn(6, 3) * (600 if bad else 1)).mean()
    """
    diff = healed(box, program(body))
    assert added(diff) == ["p = self.softmax(logits := self.fc(x))", "return torch.log_softmax(logits, -1)"]


def test_what_a_sequential_is_given_is_not_what_its_last_module_is_given(box: Sandbox) -> None:
    """The proof is made at the softmax inside; a change of the Sequential's argument would be another one, so none is shown."""
    body = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)
            self.head = nn.Sequential(nn.Identity(), nn.LogSoftmax(-1))

        def forward(self, x, legal):
            return self.head(self.fc(x).masked_fill(~legal, float("-inf")) * 1.0)

    net = Net()
    """
    remedy = first_remedy(box, program(textwrap.dedent(body) + textwrap.dedent(MASKED)))
    assert (remedy["result"], remedy["diff"]) == ("proven", "")


# -- keywords and objects ---------------------------------------------------------------------------------------------

CTC = """
    def loss_of(bad):
        lengths = torch.tensor([2, 6 if bad else 3])
        return run(torch.randn(5, 2, 3), torch.tensor([[1, 2, 3, 1, 2, 3]] * 2), lengths)
"""


@pytest.mark.parametrize(
    ("made", "called"),
    [("crit = nn.CTCLoss(blank=0)", "crit"), ("crit = nn.CTCLoss()", "crit"), ("net.loss, other = nn.CTCLoss(reduction='mean'), 1", "net.loss")],
)
def test_a_keyword_of_a_loss_object_goes_where_it_is_made(box: Sandbox, made: str, called: str) -> None:
    body = f"""
    net = nn.Linear(3, 4)
    {made}

    def run(x, t, lengths):
        return {called}(net(x).log_softmax(-1), t, torch.full((2,), 5), lengths)
    """
    diff = healed(box, program(textwrap.dedent(body) + textwrap.dedent(CTC)))
    assert len(added(diff)) == 1 and "nn.CTCLoss(" in added(diff)[0] and "zero_infinity=True)" in added(diff)[0]


def test_a_loss_object_made_twice_gets_no_diff(box: Sandbox) -> None:
    body = """
    net = nn.Linear(3, 4)
    crit = nn.CTCLoss(blank=1)
    crit = nn.CTCLoss()

    def run(x, t, lengths):
        return crit(net(x).log_softmax(-1), t, torch.full((2,), 5), lengths)
    """
    remedy = first_remedy(box, program(textwrap.dedent(body) + textwrap.dedent(CTC)))
    assert (remedy["result"], remedy["diff"]) == ("proven", "") and remedy["effect"].startswith("with that")


def test_a_function_that_stands_for_an_object_is_given_what_it_was_made_with(box: Sandbox) -> None:
    body = """
    net = nn.Linear(3, 4)
    crit = nn.CrossEntropyLoss(ignore_index=0)

    def loss_of(bad):
        y = torch.randint(1, 4, (6,))
        return crit(net(torch.randn(6, 3)), torch.zeros_like(y) if bad else y)
    """
    remedy = first_remedy(box, program(body))
    assert not remedy["diff"] or "ignore_index=0" in remedy["diff"]


# -- the name of torch ------------------------------------------------------------------------------------------------

CHANCE = """
    def loss_of(bad):
        x = {torch}rand(6, 3)
        chance = (net(x) + x.new_tensor([0.0, 200.0 * bad])).softmax(-1)
        return -chance.log()[:, 0].mean()
"""


@pytest.mark.parametrize(
    ("head", "prefix", "wanted"),
    [
        ("import torch as th\nfrom torch import nn\nth.manual_seed(0)\n", "th.", "th.log_softmax("),
        ('"""A docstring."""\nfrom torch import nn, rand, optim\n', "", "import torch"),
        ("# a comment\nfrom __future__ import annotations\nfrom torch import nn, rand, optim\n", "", "import torch"),
    ],
)
def test_the_diff_uses_the_files_own_name_for_torch_or_imports_it(box: Sandbox, head: str, prefix: str, wanted: str) -> None:
    body = "net = nn.Linear(3, 2)\n" + textwrap.dedent(CHANCE).format(torch=prefix)
    diff = healed(box, program(body, head, LOOP.replace("torch.", prefix)))
    assert any(wanted in line for line in added(diff)) and (prefix == "" or "torch." not in "".join(added(diff)))


def test_a_file_that_uses_methods_only_imports_torch_after_its_docstring(box: Sandbox) -> None:
    box.write('"""Hand written losses."""\n\n\ndef bce(p, t):\n    return -(t * p.log() + (1 - t) * (1 - p).log()).mean()\n', "losses.py")
    body = """
    from losses import bce
    net = nn.Linear(3, 1)

    def loss_of(bad):
        x = torch.randn(6, 3)
        return bce(torch.sigmoid(net(x)[:, 0] * (1000 if bad else 1)), (x[:, 0] > 0).float())
    """
    diff = healed(box, program(body))
    assert "+++ b/losses.py" in diff and added(diff)[:2] == ["", "import torch"]


def test_where_torch_is_another_variable_there_is_no_diff(box: Sandbox) -> None:
    body = "net = nn.Linear(3, 2)\n" + textwrap.dedent(CHANCE).format(torch="").replace("(bad)", "(bad, torch=None)")
    remedy = first_remedy(box, program(body, "from torch import nn, rand, optim\n", LOOP.replace("torch.", "")))
    assert "torch.where" not in remedy["diff"]


# -- lines ------------------------------------------------------------------------------------------------------------


def test_an_expression_over_several_lines(box: Sandbox) -> None:
    body = """
    net = nn.Linear(3, 2)

    def relative_error(pred, ref):
        return (
            (pred - ref)  # the difference
            .abs()
            / ref.abs()
            .amax(  # scale of the sample
                dim=-1,
                keepdim=True,
            )
        ).mean()

    def loss_of(bad):
        x = torch.randn(6, 3)
        y = x[:, :2] * 2
        y[1] = y[1] * (not bad)
        return relative_error(net(x), y)
    """
    done = box.watched(program(body))
    diff = done.incidents[0]["remedies"][0]["diff"]
    shown = [line.strip() for line in done.err.splitlines()]
    assert all(f"+ {line}" in shown for line in added(diff)) and "- .abs()" in shown
    assert all(map(math.isfinite, heal(box, diff)))


def test_an_operand_over_several_lines_keeps_its_comment(box: Sandbox) -> None:
    body = """
    net = nn.Linear(3, 4)

    def loss_of(bad):
        s = net(torch.rand(6, 3)).sigmoid() * (torch.arange(6) != (2 if bad else 9)).float()[:, None]
        return - \\
            torch.log(
                s
                .prod(-1)   # all of them
            ).mean()
    """
    assert added(healed(box, program(body))) == [".prod(-1).clamp_min(1e-12)   # all of them"]


METHODS = {
    "the root of a sum that ends on another line": ("(1 - (\n    net(x) - y).pow(2).sum(\n        1).sqrt()).pow(2)", "vector_norm"),
    "a chain with one method a line": ("(\n    net(x)\n    .sub(y)\n    .pow(2)\n    .sum(-1)\n    .sqrt()\n)", "vector_norm"),
    "a softmax by hand": ("(\n    s\n    .exp()\n    / s\n    .exp()\n    .sum(\n        -1, keepdim=True\n    )\n)", "torch.softmax"),
    "a standard deviation": ("(\n    net(x[:n])\n    .std(\n        dim=0,  # of the batch\n    )\n)", "correction=int(value_2.shape[0] > 1),  # of the batch"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_is_not_on_the_first_line_of_its_call(box: Sandbox, name: str) -> None:
    """As formatters break chains: Python then says of the call that it begins at the method's own name."""
    written, wanted = METHODS[name]
    body = """
    net = nn.Linear(3, 2)

    def loss_of(bad):
        x, n = torch.rand(6, 3), 1 if bad else 6
        y = net(x).detach() if bad else torch.zeros(6, 2)
        s = net(x) + (200 if bad else 0)
        value = {}
        return (value * torch.arange(1, value.shape[-1] + 1)).mean()
    """
    assert wanted in "\n".join(added(healed(box, program(textwrap.dedent(body).format(textwrap.indent(written, "    ").lstrip())))))


def test_what_the_statement_itself_assigns_is_assigned_after_it(box: Sandbox) -> None:
    """The logits get their name anew in the statement that takes the logarithm, on an earlier line of it: they may still be read there."""
    body = """
    net = nn.Linear(3, 4)

    def loss_of(bad):
        x = net(torch.rand(6, 3)) * (200 if bad else 1)
        p = torch.softmax(x, -1)
        x = (
            -torch.log(
                p
            )
        )
        return x.mean()
    """
    assert "log_softmax" in "".join(added(healed(box, program(body))))


LOG = """
    net = nn.Linear(3, 1)

    def loss_of(bad):
        x = torch.rand(6, 3)
        x[1] = x[1] * (not bad)
        return (net(x)[:, 0] - torch.log(x.sum(-1))).pow(2).mean()
"""


@pytest.mark.parametrize("tool", [("patch", "-p1"), ("git", "apply", "-")])
@pytest.mark.parametrize("kind", ["crlf", "no end", "mark"])
def test_the_line_ends_of_the_file_are_those_of_the_diff(box: Sandbox, kind: str, tool: tuple[str, ...]) -> None:
    """Windows line ends, a last line without one, a byte order mark: `patch` and `git apply` take the diff."""
    subprocess.run(["git", "init", "-q", "."], cwd=box.folder, check=True)
    text = program(LOG).strip() + "\n"
    if kind == "no end":
        text = program(LOG, loop=LOOP).strip().replace("print(loss.item())", "print(loss.item())\n_ = (torch.zeros(1)\n  .log())").rstrip()
    raw = {"crlf": text.replace("\n", "\r\n"), "no end": text, "mark": "\ufeff" + text}[kind].encode()
    path = box.folder / "train.py"
    path.write_bytes(raw)
    done = box.forked("run", "--run-dir", str(box.run_dir), str(path))
    diff = done.incidents[0]["remedies"][0]["diff"]
    assert all(map(math.isfinite, heal(box, diff, tool)))
    assert path.read_bytes().count(b"\r") == raw.count(b"\r")


LIBRARY = """
    import torch

    def log_sum(x):
        return torch.log(x.sum(-1))
"""


@pytest.mark.parametrize("both", [False, True], ids=["one file", "a file here as well"])
@pytest.mark.parametrize("tool", [("patch", "-p1", "-d", "/"), ("git", "-C", "/", "apply", "-")], ids=["patch", "git"])
def test_a_diff_of_an_installed_library_is_applied_from_the_root(
    box: Sandbox, tmp_path_factory: pytest.TempPathFactory, tool: tuple[str, ...], both: bool
) -> None:
    """A file outside the working directory has no path there that `patch` or `git apply` take."""
    library = tmp_path_factory.mktemp("site-packages") / "sums.py"
    library.write_text(textwrap.dedent(LIBRARY), encoding="utf-8")
    here = "+ (net(x)[:, 0] / x.sum(-1)).mean()" if both else ""
    body = f"""
        import sys
        sys.path.append({str(library.parent)!r})
        from sums import log_sum
        net = nn.Linear(3, 1)

        def loss_of(bad):
            x = torch.rand(6, 3)
            x[1] = x[1] * (not bad)
            return (net(x)[:, 0] - log_sum(x)).pow(2).mean() {here}
    """
    remedy = first_remedy(box, program(body))
    assert remedy["result"] == "proven"
    assert f"+++ b{library}\n" in remedy["diff"] and (f"+++ b{box.folder}/train.py\n" in remedy["diff"]) is both
    assert all(map(math.isfinite, heal(box, remedy["diff"], tool)))


def unified(source: str, old: str, new: str, tmp_path: Path) -> str:
    """The diff that puts `new` in the place of the expression `old`."""
    import ast

    path = tmp_path / "train.py"
    path.write_bytes(source.encode())
    lines = source.replace("\r\n", "\n").splitlines(keepends=True)
    lines[-1] = lines[-1].rstrip("\n") + "\n"
    code = compile(source, str(path), "exec")
    tree = ast.parse("".join(lines))
    shown = Expression("train.py", ast.Constant(0), lines, code=code)
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.expr) and shown.segment(n) == old)
    found = Expression("train.py", node, lines, code=code)
    return joined([(found, (next(n for n in found.tree if isinstance(n, ast.expr) and found.segment(n) == old), new))])


def test_a_last_line_without_an_end_is_marked(tmp_path: Path) -> None:
    diff = unified("x = 1\ny = abs(x)", "abs(x)", "max(x, 1)", tmp_path)
    assert diff.splitlines()[-4:] == ["-y = abs(x)", "\\ No newline at end of file", "+y = max(x, 1)", "\\ No newline at end of file"]


@pytest.mark.parametrize("new", ["max(x, nothing)", "max(x, ", "(y := x) if x else (yield)"])
def test_a_text_that_would_not_run_gives_no_diff(tmp_path: Path, new: str) -> None:
    """An unknown name, a bracket left open, a yield outside a function."""
    assert unified("x = 1\ny = abs(x)\n", "abs(x)", new, tmp_path) == ""


@pytest.mark.parametrize(("line", "wanted"), [("y = abs(x).real", "(x + 1).real"), ("y = -abs(x)", "-(x + 1)"), ("y = [abs(x)]", "[x + 1]")])
def test_a_sum_in_the_place_of_a_call_is_put_in_brackets_where_something_binds_to_it(tmp_path: Path, line: str, wanted: str) -> None:
    assert added(unified(f"x = 1\n{line}\n", "abs(x)", "x + 1", tmp_path)) == [f"y = {wanted}"]


def test_brackets_are_found_over_several_lines() -> None:
    assert as_operand("a\n+ b") == "(a\n+ b)" and as_operand("a\n.b()") == "a\n.b()"


# -- what may be evaluated twice --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "divisor",
    ["F.dropout(h, 0.7 if bad else 0.0).sum(-1)", "drop(h, bad).sum(-1)", "next(values)(bad)", "(h * queue.pop() * (not bad)).sum(-1)"],
    ids=["dropout", "a function", "next", "pop"],
)
def test_a_divisor_that_may_not_be_evaluated_twice_is_written_once(box: Sandbox, divisor: str) -> None:
    body = f"""
    net = nn.Linear(8, 2)
    queue = [1.0] * 8
    drop = lambda h, bad: F.dropout(h, 0.7 if bad else 0.0)
    values = iter([lambda bad: torch.ones(6) * (torch.arange(6) != (1 if bad else 9))] * 8)

    def loss_of(bad):
        h = net(torch.rand(6, 8)).exp()
        return (h.detach()[:, 0] * h[:, 0] / {divisor}).mean()
    """
    diff = healed(box, program(body))
    assert "".join(added(diff)).count(divisor) == 1


def test_a_pure_divisor_is_written_out(box: Sandbox) -> None:
    body = """
    net = nn.Linear(3, 1)

    def loss_of(bad):
        x = torch.rand(6, 3)
        x[1] = x[1] * (not bad)
        return (net(x)[:, 0] - 1.0 / x.sum(-1)).abs().mean()
    """
    assert ":=" not in healed(box, program(body))


def test_a_keyword_that_asks_the_operand_does_not_evaluate_it_anew(box: Sandbox) -> None:
    body = """
    net = nn.Linear(3, 2)

    def kept(out, n):
        return F.dropout(out, 0.5)[:n]

    def loss_of(bad):
        out = net(torch.randn(6, 3))
        return kept(out, 1 if bad else 6).std(0).mean() + out.square().mean()
    """
    diff = healed(box, program(body))
    assert "(value := kept(out, 1 if bad else 6)).std(0, correction=int(value.shape[0] > 1))" in diff


def test_what_was_assigned_and_then_changed_is_not_read_again(box: Sandbox) -> None:
    """`p = softmax(x)`, then another `x`: log_softmax(x) would be of the new one."""
    body = """
    net = nn.Linear(3, 4)

    def loss_of(bad):
        x = net(torch.randn(6, 3)) * (600 if bad else 1)
        p = torch.softmax(x, -1)
        x = x * 0
        return -torch.log(p).mean() + x.mean()
    """
    remedy = first_remedy(box, program(body))
    assert "log_softmax(x" not in remedy["diff"]


# -- operands by name -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written",
    ["torch.pow(exponent=-0.5, input=s)", "torch.div(input=torch.ones(6, 1), other=s)", "torch.log(input=s)", "torch.div(torch.ones(6, 1), other=s)"],
)
def test_operands_given_by_name_are_remedied(box: Sandbox, written: str) -> None:
    body = f"""
    net = nn.Linear(3, 1)
    nn.init.constant_(net.bias, 3.0)

    def loss_of(bad):
        s = net(torch.rand(6, 3)).relu() * (torch.arange(6) != (2 if bad else 9))[:, None]
        return {written}.mean()
    """
    healed(box, program(body))


def test_operands_by_name_come_in_order() -> None:
    assert positioned((1,), {"other": 2, "alpha": 3}) == ((1, 2), {"alpha": 3})
    assert positioned((), {"other": 2}) == ((), {"other": 2})


def test_an_argument_that_several_calls_share_is_changed_where_it_is_made(box: Sandbox) -> None:
    """A bound in one of the calls leaves the pole of the next one: the counts of a negative binomial and its dispersion meet it three times."""
    body = """
    net = nn.Linear(4, 3)
    def nll(x, r):
        norm = torch.lgamma(x + r) - torch.lgamma(r) - torch.lgamma(x + 1)
        return -(norm + r * (r / (r + 1)).log1p()).mean()
    def loss_of(bad):
        x = torch.randn(8, 4)
        spread = F.relu(net(x).abs() + 0.5 - 50 * bad * torch.eye(8, 3))
        return nll(torch.zeros(8, 3), spread)
    """
    assert added(healed(box, program(body))) == ["spread = F.relu(net(x).abs() + 0.5 - 50 * bad * torch.eye(8, 3)).add(1e-4)"]


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("y = x.clamp_min(0).log()", "y = x.clamp_min(1e-12).log()"),
        ("y = torch.log(x + 1e-20)", "y = torch.log(x.clamp_min(1e-12))"),
        ("y = torch.log(x + 1)", "y = torch.log((x + 1).clamp_min(1e-12))"),
        ("y = torch.log(x.clamp_min(2))", "y = torch.log(x.clamp_min(2).clamp_min(1e-12))"),
    ],
)
def test_a_bound_replaces_the_one_that_did_not_hold(line: str, changed: str) -> None:
    """Two bounds on top of each other would say less than one."""
    node = ast.parse(line).body[0].value  # type: ignore[attr-defined]
    method = isinstance(node.func.value, ast.Call)
    operand = node.func.value if method else node.args[0]
    expression = Expression("", node, [line], "log", [ast.unparse(operand)], [operand])
    change = Fix("", "{x}.clamp_min(1e-12)", 0).text(expression)
    assert change is not None
    assert line.replace(ast.unparse(operand), change[1]) == changed
