"""See every operation of a replayed step, forward and backward, and write down the graph of values.

Two passes: the first looks only at what came out of each operation (on a GPU, of those that a scout was in doubt about);
the second, when the place is known, keeps copies of the values around it (`keep`). Operations that cannot be looked into
(extensions, opaque subclasses) are one node.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch.autograd import forward_ad

from whynan.capsule.replay import Enough, call_entry
from whynan.capsule.sites import Site, caller_of, helped_by, live_frame, live_site
from whynan.capsule.tape.entries import Entry
from whynan.errors import let_through
from whynan.trace.calls import CallTracker
from whynan.trace.colours import FILLS, colour_of, without_unchosen
from whynan.trace.graph import OUTSIDE, Colour, Graph, Leaf, Op, Source
from whynan.trace.memory import is_part, storage_key, weak_storage
from whynan.trace.modes import ReplayMode
from whynan.trace.opaque import called_now
from whynan.trace.operators import dtype_name, named_arguments, overwrites, results_of, stem, text_of
from whynan.trace.refusals import refuses_any
from whynan.trace.slicing import HAND_ON
from whynan.tripwire.values import CLEAN, Damage, damage_of, is_mask_like, plain, shape_of

Layout = tuple[Any, ...]  # offset, shape and strides
_NAN = Damage(nan=True)
_node_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_FLOOR = call_entry.__code__
_OF_TANGENTS = -2  # minus the operation whose derivative is carried along: the number of a node that autograd does not have

_SELECTIVE = ("masked_fill", "masked_fill_", "where", "index_fill", "index_fill_", "constant_pad_nd", "nan_to_num", "nan_to_num_", "scalar_tensor")


_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})  # write running statistics, which their schemas do not say


class Tracer(ReplayMode):
    """Records a `Graph`; with `keep`, also clones of the inputs and outputs of those operations."""

    def __init__(self, roles: dict[int, tuple[str, str]], keep: frozenset[int] = frozenset(), budget: int = 1 << 30) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self.roles = roles  # storage address: role, name
        self.keep = keep
        self.light = bool(keep)  # with places to keep, the graph is known already
        self.count = 0
        self.budget = budget
        self.kept_inputs: dict[int, dict[str, torch.Tensor]] = {}
        self.kept_output: dict[int, torch.Tensor] = {}
        self.members: dict[int, int] = {}  # which of the results of an operation is the first bad one
        self.calls = CallTracker(self)
        self.suspects: frozenset[int] | None = None  # the operations to look at; None: all
        self.nan: frozenset[int] = frozenset()  # of those not looked at: they are known to give NaN
        self.clean: frozenset[int] = frozenset()  # memory that is known to be finite
        self.meant = True  # an infinity that the loop writes into its batch is taken for a mask
        self.hold = -1  # the operation in whose function the values are to be named
        self.last = sys.maxsize  # the last operation of interest: after it a second pass ends
        self.seen: dict[int, str] = {}  # the operations whose values were kept, by name
        self.frame: FrameType | None = None
        self.caller: Site | None = None  # of the library that it runs in
        self.between: Site | None = None  # where that library itself called a helper of its own
        self.entry: Entry | None = None
        self.first: dict[int, int] = {}  # the first operation of each entry
        self.modules: list[str] = []
        self.scripted = 0  # how many of them are TorchScript
        self.broken = ""
        self.refused: dict[str, torch.Tensor] = {}  # arguments of the last call that raised
        self._refusal: tuple[Op, BaseException] | None = None
        self._indifferent: BaseException | None = None  # raised over something that no value changes
        self._writers: dict[int, tuple[object, int]] = {}  # storage: weak reference, op index or -1 - leaf index
        self._results: dict[int, Layout | None] = {}  # of damaged operations with one result, whose damage is theirs: how it lies in its memory
        self._lent: list[tuple[torch.Tensor, torch.Tensor]] = []  # results in memory of the program, and what was there
        self._numbers: list[tuple[float, Source]] = []  # those that are not finite and were read out of a tensor
        self._last_node = 0
        self._begun = sys.maxsize  # the first operation of the model since the last backward pass
        self._blind = False

    def __enter__(self) -> Tracer:
        self._last_node = _node_number()
        super().__enter__()  # type: ignore[no-untyped-call]
        self.calls.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        self.calls.__exit__(*details)  # type: ignore[no-untyped-call]
        self.calls.tracer = None  # a cycle would hold the tensors of the replay until the next garbage collection
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self._give_back()

    def entering(self, entry: Entry) -> None:
        """A tape entry begins."""
        self.entry = entry
        self.graph.sites[entry.number] = entry.site
        self.first.setdefault(entry.number, len(self.graph.ops))
        self._begun = sys.maxsize if entry.kind == "backward" else self._begun

    def leaving(self, entry: Entry) -> None:
        """A tape entry ended."""
        self.entry = None

    @contextmanager
    def blind(self) -> Iterator[None]:
        """Look at tensors without tracing the looking."""
        self._blind = True
        try:
            yield
        finally:
            self._blind = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Look at something that is only told beside the verdict: unseen, and a failure in it harms nothing."""
        try:
            with self.blind(), torch._C.DisableTorchFunction():
                yield
        except Exception as error:
            let_through(error)

    def call_failed(self, name: str, args: Any, error: BaseException) -> None:
        """A function of torch refused its arguments: keep the innermost one, in case no operation ran that stands for it."""
        if self.light or (self._refusal is not None and self._refusal[1] is error):
            return
        site = live_site(_FLOOR, 3) or (self.entry.site if self.entry else None)
        module = self.modules[-1].strip("\0") if self.modules else ""
        self._refusal = (Op(-1, f"torch.{name.rsplit('.', 1)[-1]}", [], {}, site, module, False, -1, name, -1, "", bool(self.modules), error=error), error)
        self.refused = {f"arg{i}": t for i, t in enumerate(args) if isinstance(t, torch.Tensor)}

    def failing(self, error: BaseException | None) -> Op | None:
        """Return the operation that raised over its values, or the call that refused its arguments before any operation ran."""
        if error is not None and error is self._indifferent:
            return None
        found = next((op for op in reversed(self.graph.ops) if op.error is error), None) if error is not None else None
        if found is not None or self._refusal is None or self._refusal[1] is not error:
            return found
        op = self._refusal[0]
        op.index = len(self.graph.ops)
        op.sources = [self._source(name, tensor, op.site) for name, tensor in self.refused.items()]
        self.graph.ops.append(op)
        return op

    def knows_finite(self, tensor: torch.Tensor) -> bool:
        """Whether a result is known to be finite without a look: a scout has seen it."""
        known = self._writers.get(storage_key(tensor))
        return self.suspects is not None and known is not None and known[1] >= 0 and not self.graph.ops[known[1]].damage

    def maker_of(self, tensor: torch.Tensor) -> int:
        """Return what last wrote a tensor: an operation's index, or -1 - the index of a leaf."""
        return self._maker(tensor, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._blind:
            return func(*args, **kwargs)
        if self.light:
            return self._light(func, args, kwargs)
        number = _node_number()
        op: Op | None = None
        try:
            op = self._before(func, args, kwargs, number)
        except Exception as error:
            let_through(error)
            self.broken = self.broken or f"{type(error).__name__} while tracing {func}: {error}"
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            if op is not None:
                op.error = error
                with self.aside():
                    self._indifferent = error if refuses_any(func, args, kwargs) else None
            raise
        if op is not None:
            try:
                with torch._C.DisableTorchFunction():  # our own looking is not the user's calling
                    self._made(op, args, result)
                    self._after(op, args, result)
            except Exception as error:
                let_through(error)
                self.broken = self.broken or f"{type(error).__name__} while tracing {func}: {error}"
        return result

    def _made(self, op: Op, args: Any, result: Any) -> None:
        """An operation of the first pass gave its result; for subclasses that change it."""

    @contextmanager
    def _changing(self, result: torch.Tensor) -> Iterator[None]:
        """Let a result be written to. One that is a view of a weight or a batch is put back when the replay is over, and nobody sees that it was written to."""
        if storage_key(result) not in {storage_key(leaf.tensor) for leaf in self.graph.leaves}:
            yield
            return
        self._lent.append((result.detach(), result.detach().clone()))
        with torch.autograd._unsafe_preserve_version_counter(result):  # type: ignore[attr-defined]
            yield

    def _give_back(self) -> None:
        with torch._C.DisableTorchFunction():
            while self._lent:
                result, value = self._lent.pop()
                with torch.autograd._unsafe_preserve_version_counter(result):  # type: ignore[attr-defined]
                    result.copy_(value)

    def _light(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Second pass: only keep values."""
        index, self.count = self.count, self.count + 1
        if index > self.last:
            raise Enough
        if index == self.hold:
            self.frame = live_frame(_FLOOR, 3)
            self.caller, self.between = caller_of(self.frame, _FLOOR), helped_by(self.frame, _FLOOR)
        if index not in self.keep:
            return func(*args, **kwargs)
        self.seen[index] = text_of(func)
        with torch._C.DisableTorchFunction():
            self._keep_inputs(index, func, args, kwargs)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if outputs := results_of(args, result):
                self._keep_output(index, outputs)
        return result

    def _before(self, func: Any, args: Any, kwargs: dict[str, Any], number: int) -> Op:
        graph = self.graph
        index = len(graph.ops)
        node = torch._C._current_autograd_node()
        site = live_site(_FLOOR, 3)
        # user code that runs inside the engine with gradients on is a recomputed forward pass (checkpointing)
        backward = node is not None and not (site is not None and torch.is_grad_enabled())
        with torch._C.DisableTorchFunction():
            sources, scalars = self._arguments(func, args, kwargs, site)
        made = number - 1 if number > self._last_node else -1
        tangent = not backward and self._is_tangent(func, index)
        op = Op(
            index=index,
            name=text_of(func),
            sources=sources,
            scalars=scalars,
            site=site or (self.entry.site if self.entry else None),
            module=self.modules[-1].strip("\0") if self.modules else "",
            live=site is not None and not tangent,
            scripted=self.scripted > 0,
            in_module=bool(self.modules) and self.modules[0] != "\0",
            backward=backward or tangent,
            node=node._sequence_nr() if backward and node is not None else _OF_TANGENTS - self.calls.value if tangent else made,
            call=self.calls.name,
            entry=self.entry.number if self.entry else -1,
            kind=self.entry.kind if self.entry else "",
        )
        for fresh in range(self._last_node, number):
            graph.node_maker[fresh] = index
        self._last_node = max(number, self._last_node)
        if made < 0 and op.name.split(".")[1].endswith("_"):
            self._take_over(op)
        if op.in_module or (op.node >= 0 and not op.backward):
            self._begun = min(self._begun, index)
        graph.ops.append(op)
        return op

    def _take_over(self, op: Op) -> None:
        """Give an operation in place its own autograd node: autograd copies what it overwrites (`deg.pow_(-0.5)`), and the copy was met first."""
        copy = self.graph.ops[-1] if self.graph.ops else None
        if copy is None or stem(copy.name) != "clone" or [s.maker for s in copy.sources] != [s.maker for s in op.sources[:1]]:
            return
        if copy.node >= 1 and self.graph.node_maker.get(copy.node - 1) == copy.index:  # two nodes: the second is the copy's own
            op.node = copy.node - 1
            self.graph.node_maker[op.node] = op.index

    def _is_tangent(self, func: Any, index: int) -> bool:
        """Whether an operation belongs to the derivative that a call of torch carries along in forward mode (`jacfwd`): it comes behind the value itself."""
        if forward_ad._current_level < 0:
            return False
        if self.calls.value < 0 and stem(text_of(func)).strip("_") == self.calls.name.rsplit(".", 1)[-1].strip("_"):
            self.calls.value = index
            self.graph.node_maker[_OF_TANGENTS - index] = index
            return False
        return self.calls.value >= 0

    def _arguments(self, func: Any, args: Any, kwargs: dict[str, Any], site: Site | None) -> tuple[list[Source], dict[str, Any]]:
        sources: list[Source] = []
        scalars: dict[str, Any] = {}
        written = overwrites(func)
        for key, value in named_arguments(func, args, kwargs):
            if isinstance(value, torch.Tensor):
                if not (written and key == "self") and key != "out":
                    sources.append(self._source(key, value, site))
            elif isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
                sources += [self._source(f"{key}[{i}]", v, site) for i, v in enumerate(value) if isinstance(v, torch.Tensor)]
            else:
                scalars[key] = value
                if self._numbers and stem(text_of(func)) not in FILLS and (source := self._read_out(value)) is not None:
                    sources.append(replace(source, name=key))
                    if site is None:
                        self.graph.by_number.add(len(self.graph.ops))
        return sources, scalars

    def _read_out(self, value: Any) -> Source | None:
        """Return the tensor that a bad number was read out of before (`scale = (1 / x.max()).item()`); Python may have made a NaN of infinities since."""
        if not isinstance(value, float) or math.isfinite(value):
            return None
        return next((source for number, source in reversed(self._numbers) if abs(number) == abs(value) or math.isnan(value)), None)

    def _source(self, name: str, tensor: torch.Tensor, site: Site | None) -> Source:
        maker = self._maker(tensor, site)
        made = self.graph.ops[maker] if maker >= 0 else self.graph.leaves[-1 - maker]
        if not made.damage or not (tensor.is_floating_point() or tensor.is_complex()):
            return Source(name, maker)
        damage = self._damage(tensor, maker)
        return Source(name, maker, damage, made.colour if damage else Colour.CLEAN)

    def _damage(self, tensor: torch.Tensor, maker: int) -> Damage:
        if self.suspects is not None and (known := self._results.get(maker)) is not None and known == _layout(tensor):
            return self.graph.ops[maker].damage
        return damage_of(tensor)  # a view may have missed the bad part

    def _maker(self, tensor: torch.Tensor, site: Site | None) -> int:
        key = storage_key(tensor)
        known = self._writers.get(key)
        if known is not None:
            if known[1] < 0:
                self._used(self.graph.leaves[-1 - known[1]])
            return known[1]
        role, name = self.roles.get(key, ("constant", ""))
        outer = self.entry.site if self.entry else None
        used_at = outer if role == "input" and outer else site or outer  # an input is handed in by the loop
        leaf = Leaf(tensor, role, name, used_at=used_at, first_use=len(self.graph.ops))
        leaf.damage = CLEAN if key in self.clean else damage_of(tensor)
        if leaf.damage:
            around = called_now(_FLOOR) if role == "constant" else None
            if around is not None and around.made(tensor, self.calls.name):
                leaf.role, leaf.name, leaf.used_at = OUTSIDE, around.name, around.site or outer
            written = self._begun <= leaf.first_use and self.calls.name.endswith("__setitem__")  # a number that stands for a result
            intended = is_mask_like(tensor) or (leaf.role in ("constant", "buffer") and not leaf.damage.nan) or (leaf.role == "constant" and written)
            leaf.colour = Colour.DELIBERATE if intended else Colour.DAMAGE
        leaf.written_at = outer if self._writing() else None
        self.graph.leaves.append(leaf)
        self._writers[key] = (tensor, -len(self.graph.leaves))
        return -len(self.graph.leaves)

    def _writing(self) -> bool:
        return self.entry is not None and self.entry.kind == "write"

    def _used(self, leaf: Leaf) -> None:
        """What comes in is used where it is read, not where the program wrote a part of it before."""
        if leaf.written_at is not None and leaf.used_at is leaf.written_at and not self._writing() and self.entry is not None:
            leaf.used_at, leaf.first_use = self.entry.site, len(self.graph.ops)

    def _after(self, op: Op, args: Any, result: Any) -> None:
        outputs = results_of(args, result)
        name = stem(op.name)
        if name == "_local_scalar_dense" and isinstance(result, float) and not math.isfinite(result) and op.sources:
            self._numbers.append((result, op.sources[0]))
        if self.suspects is None or op.index in self.suspects:
            for tensor in outputs:
                op.damage = op.damage | damage_of(tensor)
        elif op.index in self.nan:
            op.damage = _NAN
        if outputs:
            op.shape, op.dtype = shape_of(outputs[0]), dtype_name(outputs[0].dtype)
        if op.damage:
            if len(outputs) == 1:
                self._results[op.index] = _layout(outputs[0])
            if name == "where" and len([s for s in op.sources if s.damage]) > 1:
                op.sources = without_unchosen(op.sources, args)
            op.colour = colour_of(self.graph, op, name, args)
        if (op.damage.nan or (op.damage and not self.meant)) and (self._prepares(op, outputs) or self._made_of_nan(op, name, outputs)):
            return
        silent = [t for t in args[3:5] if isinstance(t, torch.Tensor)] if name in _BATCH_NORMS else []
        for tensor in outputs + silent:
            key = storage_key(tensor)
            known = self._writers.get(key)
            if known is None or not self._worse_before(known[1], tensor, op):
                self._writers[key] = (weak_storage(tensor), op.index)

    def _prepares(self, op: Op, written: list[torch.Tensor]) -> bool:
        """A NaN written into the batch by the step's own code (`x[3] = nan`) is a bad input, met where the batch is read; not into a result."""
        if not self._writing() or not op.name.split(".")[1].endswith("_") or written[0].requires_grad:
            return False
        made = [self._origin(s) for s in op.sources if s.damage.nan or (s.damage and not self.meant)]
        if not (made or self._is_given_bad(op)) or any(not isinstance(m, Leaf) or m.role != "constant" for m in made):
            return False
        site = self.entry.site if self.entry is not None else None
        whole = written[0] if written[0]._base is None else written[0]._base
        if self._made_by(whole) >= self._begun:
            return False
        self.graph.leaves.append(Leaf(whole, "input", "", op.damage, Colour.DAMAGE, used_at=site, written_at=site, first_use=op.index))
        self._writers[storage_key(whole)] = (whole, -len(self.graph.leaves))
        return True

    def _made_of_nan(self, op: Op, name: str, made: list[torch.Tensor]) -> bool:
        """A tensor made with a NaN that the loop's own code writes out (`x * float("nan")`, `full(…, nan)`) is a bad input too.

        Not after its model has computed: then the NaN stands for a result.
        """
        loose = self.entry is not None and self.entry.kind == "call" and not op.backward and op.index < self._begun
        if not loose or name in _SELECTIVE or not self._is_given_bad(op):
            return False
        if any(s.colour is not Colour.CLEAN for s in op.sources):
            return False
        site = self.entry.site if self.entry is not None else None
        self.graph.leaves.append(Leaf(made[0], "input", "", op.damage, Colour.DAMAGE, used_at=site, written_at=site, first_use=op.index))
        self._writers[storage_key(made[0])] = (made[0], -len(self.graph.leaves))
        return True

    def _is_given_bad(self, op: Op) -> bool:
        """Whether a number that stands in the code is NaN, or an infinity that is not taken for a mask."""
        return any(isinstance(v, float | complex) and (v != v or (not self.meant and abs(v) == math.inf)) for v in op.scalars.values())

    def _origin(self, source: Source) -> Op | Leaf:
        """Return what made an argument, past the lifting of a Python number."""
        made = self.graph.maker(source)
        return self._origin(made.sources[0]) if isinstance(made, Op) and "lift_fresh" in made.name and made.sources else made

    def _made_by(self, tensor: torch.Tensor) -> int:
        """Return what made a tensor, past the views of it."""
        maker = self._maker(tensor, None)
        while maker >= 0 and stem(self.graph.ops[maker].name) in HAND_ON and self.graph.ops[maker].sources:
            maker = self.graph.ops[maker].sources[0].maker
        return maker

    def _worse_before(self, maker: int, tensor: torch.Tensor, op: Op) -> bool:
        """Whether the memory behind a part of it (`x[3]`), last written by `maker`, holds damage that this operation neither made nor removed."""
        made = self.graph.ops[maker] if maker >= 0 else self.graph.leaves[-1 - maker]
        worse = made.colour > op.colour or (self._writing() and maker < 0 and made.colour is op.colour)
        return made.colour >= Colour.DELIBERATE and worse and is_part(tensor)

    def _keep_inputs(self, index: int, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        kept: dict[str, torch.Tensor] = {}
        for key, value in named_arguments(func, args, kwargs):
            items = {key: value} if isinstance(value, torch.Tensor) else {}
            if isinstance(value, list | tuple):
                items = {f"{key}[{i}]": v for i, v in enumerate(value) if isinstance(v, torch.Tensor)}
            for name, tensor in items.items():
                copy = self._copy(tensor)
                if copy is not None:
                    kept[name] = copy
        self.kept_inputs[index] = kept

    def _keep_output(self, index: int, outputs: list[torch.Tensor]) -> None:
        place = next((i for i, t in enumerate(outputs) if damage_of(t)), -1)
        if place >= 0:
            self.members[index] = place
        copy = self._copy(outputs[max(place, 0)])
        if copy is not None:
            self.kept_output[index] = copy

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        dense = plain(tensor.detach()) if tensor.device.type != "meta" else None
        size = dense.numel() * dense.element_size() if dense is not None else 0
        if dense is None or size > self.budget:
            return None
        self.budget -= size
        return dense.clone()


def _layout(tensor: torch.Tensor) -> Layout | None:
    """Say how a tensor lies in its memory; two with the same maker and the same layout hold the same values."""
    return (tensor.storage_offset(), tensor.shape, tensor.stride()) if plain(tensor) is tensor else None
