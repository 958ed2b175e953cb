"""What a capsule's `repro.py` stands on. Copied into the capsule as `loader/`: needs torch and safetensors, not whynan."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from whynan.capsule.names import CapsuleError
from whynan.capsule.read import read
from whynan.capsule.rebuild import Decoder
from whynan.capsule.trusted import TrustedCode

_node_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class Step:
    """One failing step: its objects by number, the random state before a call, and what came out."""

    def __init__(self, file: str) -> None:
        try:
            self.capsule = read(Path(file).resolve().parent)
        except CapsuleError as error:
            raise SystemExit(f"repro.py: {error}") from None
        try:
            program = self.capsule.program
            self.code = TrustedCode(self.capsule.sources, program["globals"], lambda value: value).__enter__()
            self.decoder = Decoder(program["objects"], self.capsule.tensors(), self.code)
            self.decoder.extra = {"outside": self._outside}
            self.code.decode = self.decoder.decode
            self.code.finish()
            self.leaves = [self.decoder.decode(t) for t in program["leaves"] or []]
            self.roots = [self.decoder.decode(r) for r in program["roots"]]
            self.state = [getattr(self.decoder.decode(program.get("optimizer")), "state", None)]
        except CapsuleError as error:
            raise SystemExit(f"repro.py: {error}{self.capsule.lacks()}") from None
        self.calls = {call["number"]: call for call in program["entries"]}
        self.caught: dict[tuple[int, int, int], torch.Tensor] = {}
        torch.set_default_dtype(getattr(torch, program["settings"]["default_dtype"]))
        torch.set_num_threads(program["settings"]["threads"])

    def _outside(self, node: dict[str, Any]) -> Any:
        value = self.decoder.decode(node["saved"] if node["saved"] is not None else node["tensor"])
        return value.clone() if node["written"] and not value.requires_grad else value

    def get(self, number: int) -> Any:
        """Return an object of the capsule."""
        return self.decoder.decode({"$": number})

    def fn(self, number: int) -> Any:
        """Return what a call calls."""
        return self.decoder.decode(self.calls[number]["fn"])

    def gradient(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a tensor; one left over from an earlier step is not here, and counts as 0."""
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf)
        return leaf.grad

    @contextmanager
    def mode(self, number: int) -> Iterator[None]:
        """Set random state, gradient mode and autocast as they were at a call."""
        call = self.calls[number]
        if call["rng"] is not None:
            _put_rng(self.decoder, call["rng"])
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(call["grad"]))
            for device, on, dtype in call["autocast"]:
                stack.enter_context(torch.autocast(self.decoder.decode(device), dtype=getattr(torch, dtype), enabled=on))
            if call["wanted"]:
                stack.enter_context(_Catcher(self, number, {tuple(w) for w in call["wanted"]}))
            yield

    def rebuild(self, value: Any, attributes: dict[str, Any], items: Any) -> Any:
        """Return a copy of an object with the tensors made here in place."""
        if isinstance(value, tuple):
            return type(value)(*items)
        made = copy.copy(value)
        made.__dict__.update(attributes)
        for key, item in items.items() if isinstance(items, dict) else ():
            made[key] = item
        return made

    def verdict(self, *losses: Any) -> None:
        """Say what is not finite and exit with status 1; with 0 if everything is finite here."""
        found = [(f"loss {n}" if n else "loss", t) for n, value in enumerate(losses) for t in tensors_of(value)]
        names = {id(p): n for root in self.roots for n, p in root.named_parameters()}
        for number, leaf in enumerate(self.leaves):
            name = names.get(id(leaf), f"tensor {number}")
            found += [(f"gradient of {name}", leaf.grad)] if leaf.grad is not None else []
            found.append((name, leaf))
        found += [(n, b) for root in self.roots for n, b in root.named_buffers()]
        found += [("optimizer state", t) for t in tensors_of(self.state)]
        bad = [(name, t.detach()) for name, t in found if t.is_floating_point() and not bool(t.detach().to_dense().isfinite().all())]
        incident = self.capsule.head["incident"]
        origin, cause = incident["origin"], incident["cause"]
        for name, tensor in bad[:8]:
            print(f"{name}: {_said(tensor)}")
        if not bad:
            print(f"everything is finite here; the run saw {cause['code']} ({cause['title']})")
            sys.exit(0)
        print(f"{cause['code']} {cause['title']}: {origin['file']}:{origin['line']}  {origin['code']}")
        sys.exit(1)


def _said(tensor: torch.Tensor) -> str:
    if tensor.numel() == 1:
        return repr(float(tensor))
    dense = tensor.to_dense()
    return f"{int((~dense.isfinite()).sum())} of {dense.numel()} values are not finite, shape {list(dense.shape)}"


def _put_rng(decoder: Decoder, node: dict[str, Any]) -> None:
    torch.set_rng_state(decoder.decode(node["torch"]))
    for state in node["cuda"] if torch.cuda.is_available() else ():
        torch.cuda.set_rng_state(decoder.decode(state))
    if node["python"] is not None:
        random.setstate(decoder.decode(node["python"]))
    if node["numpy"] is not None and "numpy.random" in sys.modules:
        sys.modules["numpy.random"].set_state(decoder.decode(node["numpy"]))


def tensors_of(tree: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield the tensors in a result, in the order the tape counts them."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list | dict):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_of(item, depth)
    elif depth > 0 and hasattr(tree, "__dict__") and not isinstance(tree, type | torch.nn.Module):
        for item in list(vars(tree).values()):
            yield from tensors_of(item, depth - 1)


def out(value: Any, index: int) -> torch.Tensor:
    """Return the n-th tensor in a result."""
    return list(tensors_of(value))[index]


class _Catcher(torch.overrides.TorchFunctionMode):
    """Picks up tensors from inside a module that the step used elsewhere, by their autograd node."""

    def __init__(self, step: Step, number: int, wanted: set[Any]) -> None:
        super().__init__()
        self.step, self.number, self.wanted, self.start = step, number, wanted, _node_number()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result, 0):
            if tensor.requires_grad and tensor.grad_fn is not None:
                key = (tensor.grad_fn._sequence_nr() - self.start, tensor.output_nr)
                if key in self.wanted:
                    self.step.caught[self.number, *key] = tensor
        return result
