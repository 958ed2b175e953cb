"""Models that keep tensors of other kinds: sparse, nested, quantised, without numbers, of a library's layout, repeated. A bad step is dropped all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import whynan
from whynan.capsule.state.holdings import can_change, write_back
from whynan.capsule.tape.facts import is_memory, is_readable

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "mkldnn": lambda: torch.ones(4).to_mkldnn(),
    "meta": lambda: torch.ones(4, device="meta"),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "expanded": lambda: torch.ones(1, 4).expand(3, 4),
    "zeros": lambda: torch._efficientzerotensor(3),  # type: ignore[attr-defined]
    "inference": lambda: _inferred(),
}


def _inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3) * 2


class Keeper(nn.Module):
    """Keeps a tensor, and running statistics beside it."""

    def __init__(self, kind: str, how: str) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        made = KINDS[kind]()
        if how == "buffer":
            self.register_buffer("kept", made)
        elif how == "parameter":
            self.kept = nn.Parameter(made, requires_grad=False)
        else:
            self.kept, self.more = made, {"a": [made]}  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        out: torch.Tensor = self.norm(self.layer(x))
        return out


def trained(model: Callable[[], nn.Module], bad: tuple[int, ...] = (3, 5), drawn: bool = True) -> list[torch.Tensor]:
    """Train, with or without the bad batches; return weights and dense buffers."""
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 0.1)
    for step, x in enumerate(torch.randn(7, 3, 4)):
        if step in bad and not drawn:
            continue
        loss = net(x * float("nan") if step in bad else x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = [*net.parameters(), *net.buffers()]
    return [t.detach().clone() for t in state if is_readable(t)]


def assert_dropped(model: Callable[[], nn.Module], capsys: pytest.CaptureFixture[str], **wishes: Any) -> None:
    """Two bad batches are diagnosed, and leave the state of a training that never drew them."""
    with whynan.watch(files=False, **wishes) as guard:
        state = trained(model)
    assert [(i.step, i.cause.code) for i in guard.incidents] == [(3, "WN701"), (5, "WN701")]
    assert all(torch.equal(a, b) for a, b in zip(state, trained(model, drawn=False), strict=True))
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.parametrize("how", ["attribute", "buffer", "parameter"])
@pytest.mark.parametrize("kind", KINDS)
def test_model_that_keeps_an_odd_tensor(kind: str, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The bad steps are told with their cause and left out, bit for bit."""
    assert_dropped(lambda: Keeper(kind, how), capsys)


@pytest.mark.parametrize("kind", ["sparse", "expanded", "nested", "meta", "mkldnn"])
def test_rollback_passes_over_what_nobody_can_write_to(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same where the run goes back to its last good state."""
    assert_dropped(lambda: Keeper(kind, "buffer"), capsys, policy="rollback", snapshot_every=1)


class Accumulating(nn.Module):
    """Writes to sparse tensors in place: in an attribute, in a list, in a buffer."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kept, self.more = torch.eye(4).to_sparse(layout=layout), [torch.eye(4).to_sparse(layout=layout)]
        self.register_buffer("sums", torch.eye(4).to_sparse(layout=layout))
        self.register_buffer("dense", torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute, and remember how large the input was."""
        with torch.no_grad():
            for held in (self.kept, self.more[0], self.sums):
                held.mul_(x.abs().mean())
            self.dense.copy_(self.kept.to_dense() + self.more[0].to_dense() + self.sums.to_dense())
        out: torch.Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensor_that_is_written_in_place(layout: torch.layout, capsys: pytest.CaptureFixture[str]) -> None:
    """A sparse tensor that a forward pass writes to is put back with the dropped step, and a replay does not move it on."""
    assert_dropped(lambda: Accumulating(layout), capsys)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_of_tensors_is_answered_for_every_kind(kind: str) -> None:
    """What is said to be memory can be cloned and written back; what is said to be readable can be compared."""
    tensor = KINDS[kind]()
    if is_memory(tensor):
        tensor.copy_(tensor.clone())
    if is_readable(tensor):
        assert torch.equal(tensor, tensor.clone())
    assert can_change(tensor) == is_memory(tensor)
    write_back(tensor, tensor)
