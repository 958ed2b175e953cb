"""A training program on many ranks, chosen by one JSON argument; run by tests/test_ranks.py, also without whynan.

Batches are made from their number, so a job that leaves batches out sees the others bit for bit the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

asked: dict[str, Any] = json.loads(sys.argv[1])
outside = nn.Parameter(torch.ones(()))  # no wrapper knows of it
faults: dict[int, tuple[int, str]] = {int(n): (rank, kind) for n, (rank, kind) in asked.get("faults", {}).items()}
every = asked.get("accumulate", 1)


def say(*words: object) -> None:
    """Print a line in one piece: the ranks of a job share their output."""
    sys.stdout.write(" ".join(map(str, words)) + " \n")
    sys.stdout.flush()


class Net(nn.Module):
    """Two layers, BatchNorm where asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16) if asked.get("norm") else nn.Identity()
        self.branch = nn.Linear(16, 16) if asked.get("branch") else None
        self.takes_branch = False
        if asked.get("tied"):
            self.head = nn.Linear(16, 16, bias=False)
            self.head.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if self.branch is not None and self.takes_branch:
            hidden = self.branch(hidden)
        if asked.get("checkpoint"):
            return self.head(checkpoint(self.inner, hidden, use_reentrant=asked["checkpoint"] == "reentrant"))
        return self.head(self.inner(hidden))

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(torch.relu(self.first(x))))

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(self.norm(hidden)))


class Pair(nn.Module):
    """Two data-parallel modules, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = DDP(nn.Linear(8, 8)), DDP(Net())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


class Around(nn.Module):
    """A module that holds a data-parallel one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DDP(Net())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def sharded(**options: Any) -> nn.Module:
    net, mesh = Net(), init_device_mesh("cpu", (world,))
    for part in () if asked.get("tied") else (net.first, net.second):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


class Listed(nn.Module):
    """Holds its sharded layers where no walk over modules finds them."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (world,))
        self.layers = [fully_shard(nn.Linear(8, 8), mesh=mesh) for _ in range(2)]
        self.head = fully_shard(nn.Linear(8, 4), mesh=mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from itertools.chain(super().parameters(recurse), *(layer.parameters() for layer in self.layers))


def rechecked() -> nn.Module:
    """Activation checkpointing as large models have it: wrapped, then sharded."""
    net, mesh = Net(), init_device_mesh("cpu", (world,))
    net.first, net.second = checkpoint_wrapper(net.first), checkpoint_wrapper(net.second)
    for part in (net.first, net.second):
        fully_shard(part, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def by_method() -> nn.Module:
    """A method beside `forward`: what gathers the weights runs in the loop, and frees their memory after each use."""
    net = sharded()
    register_fsdp_forward_method(net, "score")
    return net


def grouped() -> nn.Module:
    net, mesh = Net(), init_device_mesh("cpu", (world,))
    fully_shard([net.first, net.second], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def halves() -> nn.Module:
    middle = world // 2
    groups = [dist.new_group(list(range(middle))), dist.new_group(list(range(middle, world)))]
    return DDP(Net(), process_group=groups[rank >= middle])


def tensor_parallel() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return parallelize_module(net, init_device_mesh("cpu", (world,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def flat(**options: Any) -> nn.Module:
    return FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), **options)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ddp": lambda: DDP(Net(), **asked.get("options", {})), "fsdp": lambda: sharded(**asked.get("options", {})), "around": Around, "own": Net, "pair": Pair,
    "mixed": lambda: sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    "rechecked": rechecked, "grouped": grouped, "by method": by_method, "listed": Listed, "replicated": lambda: replicate(Net()),
    "flat": lambda: flat(**asked.get("options", {})),
    "compiled": lambda: torch.compile(DDP(Net()), backend="eager"), "tp": tensor_parallel, "halves": halves,
}  # fmt: skip


def fault_of(number: int) -> str:
    born, kind = faults.get(number, (-1, ""))
    return kind if born in (rank, -2) else ""


def batch(number: int) -> torch.Tensor:
    place = 0 if asked["model"] == "tp" else rank  # ranks that share operations share the data
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * place + number))
    if fault_of(number) == "data":
        x.numpy()[2, 1] = float("nan")
    return x


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    for part in model.modules() if asked.get("branch") else ():
        part.takes_branch = number // every % 2 == 0
    call = model.score if asked["model"] == "by method" else model
    out = call(batch(number)).float()  # data goes in here
    loss = out.pow(2).mean() * asked.get("gain", 1) / every
    if asked.get("contrast") == "gather":
        parts = [torch.empty_like(out) for _ in range(world)]
        dist.all_gather(parts, out.detach().contiguous())
        parts[rank] = out
        loss = loss + torch.cat(parts).mm(torch.cat(parts).T).pow(2).mean()
    elif asked.get("contrast") == "mean":
        import torch.distributed.nn as dn

        loss = dn.functional.all_reduce(loss) / world
    elif asked.get("contrast") == "functional":
        loss = loss + 0 * all_reduce(out.detach(), "sum", dist.group.WORLD).sum()
    elif asked.get("contrast"):
        import torch.distributed.nn as dn

        all_of_them = torch.cat(dn.all_gather(out))
        loss = loss + F.cross_entropy(all_of_them @ all_of_them.T, torch.arange(len(all_of_them)))
    if asked.get("log"):
        dist.all_reduce(mean := loss.detach().clone())
        mean /= world
    if fault_of(number) == "loss":
        loss = loss + torch.log(out[0, 0].detach() * 0)  # bad loss
    if fault_of(number) == "grad":
        loss = loss + torch.sqrt((out[1] * 0).abs().sum())  # bad slope
    if fault_of(number) == "outside":
        loss = loss + torch.sqrt(outside * 0)  # bad slope of its own
    if fault_of(number) == "spike":
        loss = loss + 1e6
    if fault_of(number) == "index":
        loss = loss + F.embedding(torch.tensor([9]), torch.ones(2, 2)).sum()
    return loss


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= world


def hang_on(model: nn.Module) -> None:
    """Average gradients by hand in hooks of the weights."""

    def averaged(gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(whole := gradient.clone())
        return whole / world

    for parameter in model.parameters():
        if asked["average"] == "hook":
            parameter.register_hook(averaged)
        elif asked["average"] == "after hook":
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", averaged(p.grad)))


def derive(model: nn.Module, loss: torch.Tensor) -> None:
    """Go back without `backward`, and average what comes of it."""
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        dist.all_reduce(gradient)
        parameter.grad = gradient / world


def reduce(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.reduce(parameter.grad, 0)
        parameter.grad /= world


def gather(model: nn.Module) -> None:
    for parameter in model.parameters():
        parts = [torch.empty_like(parameter) for _ in range(world)]
        dist.all_gather(parts, parameter.grad)
        parameter.grad = torch.stack(parts).mean(0)


def log(model: nn.Module, loss: torch.Tensor) -> None:
    """Compare what the ranks have, and change nothing."""
    if asked["logs"] == "loss":
        dist.all_reduce(loss.detach().clone())
    for parameter in model.parameters() if asked["logs"] == "gradients" else ():
        dist.all_reduce(parameter.grad.clone())
        dist.all_gather([torch.empty_like(parameter) for _ in range(world)], parameter.grad)
        dist.gather(parameter.grad, [torch.empty_like(parameter) for _ in range(world)] if rank == 0 else None, 0)
        dist.broadcast(parameter.grad.clone(), 1)


def treat(model: nn.Module, number: int) -> None:
    """What a program does to its gradients after they were averaged."""
    here = fault_of(number) == "write"
    if asked["writes"] == "always" or (asked["writes"] == "later" and number >= 3) or here:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 / torch.tensor(0.0 if here else 2.0))  # bad size


def on_the_side(model: nn.Module, number: int) -> None:
    """What rank 0 does alone while the others wait: evaluation, a checkpoint, a probe of its own that goes bad."""
    if rank == 0:
        inner = getattr(model, "module", model)
        inner.eval()
        with torch.no_grad():
            features = inner(torch.ones(3, 8))
        inner.train()
        torch.save(inner.state_dict(), "checkpoint.pt")
        if number == 1:
            probe = nn.Linear(4, 1)
            small = torch.optim.SGD(probe.parameters(), 0.1)
            torch.log(probe(features).sum() * 0).backward()  # bad probe
            small.step()
    dist.barrier()


def die(number: int) -> None:
    if asked.get("dies") == [number, rank] and attempt == "0":
        os.kill(os.getpid(), signal.SIGKILL)


class Summed(torch.optim.Optimizer):
    """An optimizer whose ranks share the work of a step, as those for very large models do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(update := parameter.grad.clone())
            parameter.add_(update, alpha=-self.param_groups[0]["lr"])


def train(model: nn.Module) -> None:
    rate = asked.get("rate", 0.01)
    parameters = [*model.parameters(), outside] if asked.get("outside") else model.parameters()
    kind = Summed if asked.get("optimizer") == "Summed" else getattr(torch.optim, asked.get("optimizer", "AdamW"))
    optimizer: torch.optim.Optimizer = kind(parameters, lr=rate, **({"fused": True} if asked.get("fused") else {}))
    scaler = torch.amp.GradScaler("cpu", init_scale=asked.get("start", 2.0**10), growth_interval=3, enabled=bool(asked.get("scaler")))
    hang_on(model) if "hook" in asked.get("average", "") else None
    updates = [u for u in range(asked.get("updates", 8)) if u not in asked.get("leave", [])]
    for update in updates[: asked.get("rows", {}).get(str(rank))]:
        for number in range(update * every, update * every + every):
            last = number % every == every - 1
            waiting = model.no_sync() if isinstance(model, DDP) and not last else contextlib.nullcontext()
            if asked["model"] == "fsdp":
                model.set_requires_gradient_sync(last)
            with waiting:
                loss = scaler.scale(loss_of(model, number))
                if asked.get("average") == "derive":
                    derive(model, loss)
                elif asked.get("vector"):
                    loss.expand(2).backward(torch.tensor([0.5, 0.5]))
                else:
                    loss.backward()
            die(number)
        if asked["model"] == "own" and asked.get("average", "sum") in ("sum", "gather", "reduce"):
            {"sum": average, "gather": gather, "reduce": reduce}[asked.get("average", "sum")](model)
        if "logs" in asked:
            log(model, loss)
        if "writes" in asked:
            treat(model, update)
        if asked.get("clip"):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not asked.get("server") or rank == 0:
            scaler.step(optimizer)
        scaler.update()
        for parameter in model.parameters() if asked.get("server") else ():
            dist.broadcast(parameter.data, 0)
        optimizer.zero_grad()
        if asked.get("aside"):
            on_the_side(model, update)
        groups = dist.distributed_c10d._world.pg_map
        say("COLLECTIVES", update, sum(g._get_sequence_number_for_group() for g in groups))
    if asked.get("scaler"):
        say("SCALE", rank, scaler.get_scale())


def digest(model: nn.Module) -> str:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in (*model.parameters(), *model.buffers())]
    return hashlib.sha1(b"".join(t.detach().contiguous().numpy().tobytes() for t in whole)).hexdigest()  # noqa: S324 (compared, not trusted)


attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
if "store" in asked:  # a restarted job finds the addresses of the first one in torchrun's own store
    dist.init_process_group("gloo", f"file://{asked['store']}-{attempt}", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
else:
    dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if asked.get("dies") == [-1, rank]:
    sys.exit(5)
torch.manual_seed(0)
net = MODELS[asked["model"]]()
with Join([net]) if "rows" in asked else contextlib.nullcontext():
    train(net)
say("END", rank, digest(net))
dist.destroy_process_group()
