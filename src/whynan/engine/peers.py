"""Who else trains what an optimizer updates, and how the gradients come together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from whynan.capsule.alone import in_flat_shards, is_sharded
from whynan.engine.session import Session, parameters_of

DDP = torch.nn.parallel.DistributedDataParallel


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that step an optimizer together."""

    members: tuple[int, ...]
    sharded: bool = False  # a rank holds and sees a part of each gradient
    even: bool = True  # the norm of the gradients is the same on all of them

    @property
    def averaged(self) -> bool:
        """Whether all have the same averaged gradients, and nothing else tells them of a bad value."""
        return self.even and not self.sharded


def peers_of(session: Session, optimizer: torch.optim.Optimizer) -> Peers | None:
    """Find out with whom this optimizer steps; nobody where its parameters are this rank's own."""
    parameters = parameters_of(optimizer)  # also those without a gradient yet: they may get one later
    sharded = [p for p in parameters if is_sharded(p)]
    if sharded:
        ranks = {int(r) for p in sharded for r in p.device_mesh.mesh.flatten().tolist()}  # type: ignore[attr-defined]
        return Peers(tuple(sorted(ranks)), True, len(sharded) == len(parameters))
    for flat in in_flat_shards(m for root in session.recorder.roots.modules() for m in root.modules()):
        if not {id(p) for p in flat.parameters()}.isdisjoint(map(id, parameters)):
            group: Any = None if hasattr(flat, "_inter_node_pg") else flat.process_group  # of copies of a sharded model: all ranks
            return Peers(tuple(sorted(dist.get_process_group_ranks(group))), sharded=True, even=False)
    averaged: set[int] = set()
    members: set[int] = set()
    for model in replicas(session):
        own = {id(p) for n, p in model.module.named_parameters() if n not in model.parameters_to_ignore}
        if any(id(p) in own for p in parameters):
            averaged |= own
            members |= set(dist.get_process_group_ranks(model.process_group))
    if members:
        return Peers(tuple(sorted(members)), even=all(id(p) in averaged for p in parameters))
    if session.recorder.received.sums([p.grad for p in parameters if p.grad is not None]):
        return Peers(tuple(range(dist.get_world_size())), even=False)
    return None


def is_first(session: Session) -> bool:
    """Whether this rank is the first of those that train with it; asks nobody, and may be asked when the groups are gone."""
    if models := replicas(session):
        return bool(models[0].process_group.rank() == 0)
    meshes = [p.device_mesh for o in session.optimizers for p in parameters_of(o) if is_sharded(p)]  # type: ignore[attr-defined]
    return not meshes or not any(meshes[0].get_coordinate() or ())


def replicas(session: Session) -> list[DDP]:
    """Return the DistributedDataParallel modules in use, wherever they stand."""
    modules = dict.fromkeys(m for root in session.recorder.roots.modules() for m in root.modules())
    behind = (getattr(getattr(hook, "__self__", None), "_ddp", None) for m in modules for hook in m._forward_pre_hooks.values())  # of `replicate`
    return [m for m in dict.fromkeys((*modules, *behind)) if isinstance(m, DDP)]


def some_have_ended(session: Session) -> bool:
    """Whether the program is inside `Join`: ranks whose data has ended are not there to talk to."""
    return any(getattr(getattr(m, "_join_config", None), "enable", False) for m in replicas(session))
