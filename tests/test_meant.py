"""What a healthy program means by its non-finite values: found by programs of other people."""

from __future__ import annotations

import pytest
from conftest import Sandbox

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
"""


@pytest.mark.parametrize(
    "metric",
    ["torch.exp(loss)", "-10 * torch.log10((net(x) * (s < 3)).square().mean())", "-10 * torch.log10((out * (s < 3)).square().mean())"],
    ids=["of the loss", "of a call of its own", "of the same forward pass"],
)
@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_a_number_that_is_only_logged_is_no_loss(metric: str, where: str, box: Sandbox) -> None:
    """A perplexity or a PSNR that is infinite does not reach loss, gradients or state."""
    lines = {place: f"print(({metric}).item())" if place == where else "" for place in ("before", "between", "after")}
    done = box.watched(f"""{HEAD}
net = nn.Linear(8, 50)
opt = torch.optim.SGD(net.parameters(), 1e-3)
for s in range(6):
    x = torch.randn(16, 8)
    out = net(x)
    loss = F.cross_entropy(out * 1000, (x[:, 0] > 0).long())
    opt.zero_grad()
    {lines["before"]}
    loss.backward()
    {lines["between"]}
    opt.step()
    {lines["after"]}
""")
    assert done.status == 0, done.err
    assert "inf" in done.out
    assert done.incidents == []


def test_a_loss_that_the_program_turns_away_from_is_still_told(box: Sandbox) -> None:
    """It is looked at like a metric, but nothing goes back in that step."""
    done = box.watched(f"""{HEAD}
net = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), 1e-3)
for s in range(6):
    x = torch.randn(16, 8) if s != 3 else torch.zeros(16, 8)
    loss = net(x).square().mean() / x.var()
    print(loss.item())
    if not torch.isfinite(loss):
        continue
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    assert [(i["step"], i["action"]["taken"]) for i in done.incidents] == [(3, "observed")]
    assert "the program itself leaves this step out: no update is made with it" in done.incidents[0]["cause"]["evidence"]
    assert "whynan: the program itself left this step out; nothing was to be done" in done.err and "observed only" not in done.err


def test_nan_as_a_mark_in_a_buffer(box: Sandbox) -> None:
    """A buffer that is read through isnan holds NaN on purpose; one that is not is damaged."""
    program = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", torch.full((3,), START))

    def forward(self, x):
        out = self.layer(x)
        with torch.no_grad():
            column = int(out.argmax(1)[0])
            value = out[:, column].mean()
            self.seen[column] = UPDATE
        return out - READ * 0.01

net = Net()
opt = torch.optim.SGD(net.parameters(), 0.05)
for s in range(20):
    x = torch.randn(8, 4)
    loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    meant = program.replace("START", "float('nan')").replace("UPDATE", "value if torch.isnan(self.seen[column]) else 0.9 * self.seen[column] + 0.1 * value")
    done = box.watched(HEAD + meant.replace("READ", "torch.nan_to_num(self.seen)"))
    assert (done.status, done.incidents) == (0, [])
    damaged = program.replace("START", "0.0").replace("UPDATE", "0.9 * self.seen[column] + 0.1 * value / value.sub(value).where(torch.tensor(s == 7), 1.0)")
    done = box.watched(HEAD + damaged.replace("READ", "out.detach()"))
    assert [(i["step"], i["symptom"]["place"]) for i in done.incidents] == [(7, "buffer")]


def test_trial_points_of_a_line_search_are_no_spikes(box: Sandbox) -> None:
    """LBFGS looks far away and takes it back."""
    done = box.watched(f"""{HEAD}
net = nn.Linear(4, 1)
opt = torch.optim.LBFGS(net.parameters(), line_search_fn="strong_wolfe", max_iter=10)
x = torch.randn(64, 4)
y = torch.exp(x.sum(1, keepdim=True) * 0.5)
largest = [0.0]
def closure():
    opt.zero_grad()
    loss = (torch.exp(net(x).clamp(max=20)) - y).pow(2).mean()
    largest[0] = max(largest[0], loss.item())
    loss.backward()
    return loss
for _ in range(15):
    opt.step(closure)
print(largest[0])
""")
    assert float(done.out) > 1e5
    assert "warning" not in done.err
    assert done.incidents == []


CHAIN = """
class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.emit = nn.Linear(6, 3)
        self.move = nn.Parameter(torch.randn(3, 3), requires_grad={trained})
        with torch.no_grad():
            self.move[0, 2] = -torch.inf  # I may not follow O

    def forward(self, words, tags):
        emission = self.emit(words)
        alpha, score = emission[:, 0], emission[:, 0].gather(1, tags[:, :1])[:, 0]
        for i in range(1, words.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + self.move + emission[:, i, None], dim=1)
            score = score + emission[:, i].gather(1, tags[:, i : i + 1])[:, 0] + self.move[tags[:, i - 1], tags[:, i]]  # here
        return (torch.logsumexp(alpha, dim=1) - score).mean()

net = Chain()
opt = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 0.05)
for s in range(8):
    words, tags, share = torch.randn(4, 3, 6), torch.tensor([[1, 2, 0]] * 4), torch.ones(())
    if s == 4:
        {fault}
    loss = net(words, tags) + torch.log(share)  # or here
    opt.zero_grad()
    loss.backward()
    opt.step()
print(net.move.detach()[0, 2].item())
"""
FORBIDDEN = "tags[1] = torch.tensor([1, 0, 2])"


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [(FORBIDDEN, "WN405", "# here"), ("share = share * 0", "WN101", "# or here"), ("words[2, 1] = torch.nan", "WN701", "# or here")],
    ids=["a forbidden path", "a log of zero", "a bad sample"],
)
def test_an_infinity_that_a_weight_held_in_healthy_steps_is_no_cause(box: Sandbox, trained: bool, fault: str, code: str, line: str) -> None:
    """A step that goes bad for a reason of its own is told by that and left out; the weight keeps its -inf, and the run goes on."""
    done = box.watched(HEAD + CHAIN.replace("{trained}", str(trained)).replace("{fault}", fault))
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"], incident["action"]["taken"]) == (4, code, "skipped"), done.err
    assert incident["origin"]["code"].endswith(line) and (done.out, done.status) == ("-inf\n", 0)
    assert box.forked("replay", "--trust", str(box.run_dir)).status == 0  # the capsule knows it too


@pytest.mark.parametrize("fault", ["net.move.data[1, 2] = torch.nan", "net.emit.weight.data[0] = torch.inf"])
def test_a_weight_that_goes_bad_beside_infinities_that_are_meant_is_the_cause(box: Sandbox, fault: str) -> None:
    """What was not there in a healthy step is damage, in the same weight or in another one."""
    done = box.watched(HEAD + CHAIN.replace("{trained}", "True").replace("{fault}", fault))
    assert [(i["step"], i["cause"]["code"], i["action"]["taken"]) for i in done.incidents] == [(4, "WN601", "stopped")]


def test_a_diagnosis_does_not_write_to_a_table_that_a_step_takes_views_of(box: Sandbox) -> None:
    """An entry of a constant is picked by `table[0][k]`, a view: making it finite for an experiment made the program's own -inf a number."""
    done = box.watched(f"""{HEAD}
table = torch.tensor([[0.1, -0.3, -torch.inf], [0.2, 0.3, 0.4]])
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x, k):
        return self.layer(x).mean() - table[0][k]
net = Net()
opt = torch.optim.SGD(net.parameters(), 0.1)
for s in range(6):
    loss = net(torch.randn(8, 4), 2 if s == 3 else 1)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(table[0, 2].item())
""")
    assert [i["cause"]["code"] for i in done.incidents] == ["WN405"]
    assert done.out == "-inf\n"


TABLE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(40, 8), nn.Linear(8, 3)

    def forward(self, words):
        return self.head(self.table(words){absorbed})

net = Net()
weight = torch.randn(40, 8)
weight[17, {bad}] = {value}
{fill}
opt = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 1e-3)
for s in range(12):
    words = torch.randint(0, 16, (64,))
    {late}
    loss = F.cross_entropy(net(words), words % 3)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
LOAD = "net.load_state_dict({**net.state_dict(), 'table.weight': weight})"


@pytest.mark.parametrize(
    "fill", [LOAD, LOAD + "\nnet.table.weight.requires_grad_(False)", "net.table.weight.data = weight"], ids=["loaded", "frozen", "by hand"]
)
@pytest.mark.parametrize(("bad", "value"), [("2", "-torch.inf"), (":2", "torch.inf")])
def test_an_infinity_in_a_row_that_no_healthy_step_looked_up_is_damage(box: Sandbox, fill: str, bad: str, value: str) -> None:
    """It could be meant as long as nobody reads it; the step that does, and dies of it, shows that it is not."""
    source = TABLE.replace("{fill}", fill).replace("{absorbed}", "").replace("{bad}", bad).replace("{value}", value)
    done = box.watched(HEAD + source.replace("{late}", "words[3] = 17 if s > 6 else 0"))
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["code"]) == (7, "WN601", "return self.head(self.table(words))"), done.err
    assert "`table.weight`" in incident["cause"]["evidence"][0]
    assert "not finite: row 17; steps that look up other rows do not meet it" in incident["cause"]["evidence"]
    assert [span["label"] for span in incident["origin"]["from"]] == (["load_state_dict brought it in here"] if "load" in fill else [])
    assert box.forked("replay", "--trust", str(box.run_dir)).out.count("WN601")


def test_rows_of_infinities_that_healthy_steps_looked_up_are_meant(box: Sandbox) -> None:
    """A table of masks: a softmax absorbs its -inf, until an input allows nothing at all."""
    source = (
        TABLE.replace("{fill}", f"weight[:, 1] = -torch.inf\n{LOAD}\nnet.table.weight.requires_grad_(False)")
        .replace("{bad}", ":")
        .replace("{value}", "-torch.inf")
    )
    done = box.watched(HEAD + source.replace("{absorbed}", ".softmax(-1)").replace("{late}", "words[3] = 17 if s == 7 else 0"))
    assert [(i["step"], i["cause"]["code"], i["action"]["taken"]) for i in done.incidents] == [(7, "WN401", "skipped")], done.err


TERMS = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.05)
for i in range(10):
    {top}
    terms = []
    for m in range(3):
        x = torch.randn(5, 4)
        mask = torch.zeros(5) if (i, m) in {bad} else torch.ones(5)
        term = ((net(x)[:, 0] - x.sum(1)) ** 2 * mask).sum() / mask.sum()
        if not torch.isfinite(term):
            {then}
        terms.append(term)
    if terms:
        loss = torch.stack(terms).mean()
        {before}
        loss.backward()
        opt.step()
        {end}
"""


@pytest.mark.parametrize("zeroed", ["top", "before", "end"])
@pytest.mark.parametrize("bad", [{(5, 0)}, {(5, 0), (5, 1)}, {(5, 0), (6, 0), (7, 1), (7, 2)}], ids=str)
@pytest.mark.parametrize(("then", "told"), [("continue", []), ("terms = []; break", [5])], ids=["the term", "the step"])
def test_a_program_that_leaves_bad_terms_out_itself_is_healthy(box: Sandbox, zeroed: str, bad: set[tuple[int, int]], then: str, told: list[int]) -> None:
    """Also where the first term is the bad one. One that leaves the whole step has all its terms again in the next."""
    places = {place: "opt.zero_grad()" if place == zeroed else "pass" for place in ("top", "before", "end")}
    source = TERMS.replace("{bad}", str(bad)).replace("{then}", then)
    for place, text in places.items():
        source = source.replace(f"{{{place}}}", text)
    done = box.watched(HEAD + source)
    assert [i["step"] for i in done.incidents][:1] == told, done.err
    assert done.status == 0
