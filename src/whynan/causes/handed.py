"""What the step was given, in words: ids that are all the same, the sample behind a row, the hook the code ran in."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from whynan.errors import let_through
from whynan.records import short_dtype

if TYPE_CHECKING:
    import torch

    from whynan.capsule.drawn import Drawn
    from whynan.capsule.replay import Program
    from whynan.capsule.tape.entries import Entry, Slot
    from whynan.trace.birth import Birth
    from whynan.trace.lines import Line

SAMPLES = 3  # rows of a batch that are told one by one


def batch_size(program: Program) -> int:
    """Return the most common first dimension of what was handed in, weights apart: a teacher's are written in the step."""
    sizes: dict[int, int] = {}
    for entry in program.entries:
        for size in _rows_given(program, entry):
            sizes[size] = sizes.get(size, 0) + 1
    return max(sizes, key=lambda s: sizes[s], default=0)


def feeds_a_model(program: Program, size: int) -> bool:
    """Whether modules are given tensors of that many rows, or what the step made of such; so it is where no module is given any data.

    Statistics of weights, a codebook or a queue may have more tensors than the batch has.
    """
    from whynan.capsule.tape.entries import dependencies

    calls = {entry.number: entry for entry in program.entries}
    todo = [entry for entry in program.entries if entry.runs_model]
    seen, sizes = {entry.number for entry in todo}, set[int]()
    for entry in todo:  # grows by what they were given
        sizes.update(_rows_given(program, entry))
        behind = {number for number in dependencies(entry) if number in calls} - seen
        seen |= behind
        todo += [calls[number] for number in sorted(behind)]
    return size in sizes or not sizes


def _rows_given(program: Program, entry: Entry) -> Iterator[int]:
    """Yield the first dimensions of what a call was handed from outside, weights apart."""
    from whynan.capsule.tape.entries import Outside

    for leaf in entry.reads:
        tensor: Any = leaf.tensor if isinstance(leaf, Outside) else None
        if tensor is not None and tensor.dim() and not tensor.requires_grad and id(tensor) not in program.weights:
            yield tensor.shape[0]


def constant_ids(program: Program) -> list[str]:
    """Say which whole numbers that came in are all the same: token ids, labels, indices.

    Cost: a forward pass and one comparison per integer tensor that was handed in, in the failing step alone.
    """
    found = []
    for entry, name, tensor in given(program.entries, program.results().get):
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.numel() < 2:
            continue
        first = tensor.flatten()[0]
        if bool((tensor == first).all()):
            shape = f"{short_dtype(str(tensor.dtype))}[{', '.join(map(str, tensor.shape))}]"
            found.append(f"{name} of {entry.name}: {shape}, all {tensor.numel()} are {first.item()}")
    return list(dict.fromkeys(found))


def hook_words(program: Program) -> list[str]:
    """Say that the code ran in a hook of another model."""
    within = next((e.within for e in program.entries if e.within is not None), None)
    return [] if within is None else [f"computed in a hook of {within.name}, inside a call of {within.entry.name}"]


def sample_words(program: Program, samples: list[int]) -> list[str]:
    """Say which samples of the data set the rows of a batch are."""
    drawn = _drawn(program) if samples else None
    return [] if drawn is None else [drawn.sample(row) for row in samples[:SAMPLES]]


def line_in_data(program: Program, birth: Birth, samples: list[int]) -> Line | None:
    """Return the line of the data set, or of what makes a batch of its samples, that made a bad value which was handed in."""
    from whynan.trace.lines import PATIENCE, first_bad_line

    if not samples or birth.leaf is None:
        return None
    nan, begin = birth.leaf.damage.nan, time.monotonic()
    try:
        with samples_again(program) as drawn:
            if drawn is None:
                return None
            line = first_bad_line(lambda: drawn.fetch(samples[0]), nan)
            slow = (time.monotonic() - begin) * len(drawn.indices) > PATIENCE
            return line if line is not None or slow else first_bad_line(drawn.gather, nan)
    except Exception as error:  # of the program's own code: it may not like to be asked twice
        let_through(error)
        return None


@contextmanager
def samples_again(program: Program) -> Iterator[Drawn | None]:
    """Let a data set be asked for samples of a step's batch again: what is random draws as if it had not been."""
    from whynan.capsule.state.generators import Generators, put
    from whynan.capsule.state.randomness import put_rng, take_rng

    drawn = _drawn(program)
    if drawn is None:
        yield None
        return
    rng, generators = take_rng(others=True), Generators()
    generators.find(vars(drawn.data_set).values() if hasattr(drawn.data_set, "__dict__") else ())
    states = generators.take()
    try:
        with program.still():
            yield drawn
    finally:
        put_rng(rng)
        put(states)


def held_by_data(program: Program) -> Iterator[torch.Tensor]:
    """Yield the tensors that the data set of a step's batch holds."""
    from whynan.capsule.tape.nested import tensors_of

    drawn = _drawn(program)
    if drawn is not None and hasattr(drawn.data_set, "__dict__"):
        yield from tensors_of(list(vars(drawn.data_set).values()))


def _drawn(program: Program) -> Drawn | None:
    return program.recorder.beside.draws.behind(tensor for _, _, tensor in given(program.entries, program.recorder.tape.alive))


def given(entries: list[Entry], alive: Callable[[Slot], torch.Tensor | None]) -> Iterator[tuple[Entry, str, torch.Tensor]]:
    """Yield the tensors from outside that the step, or the call around its hook, was given; `alive` knows what the step itself made."""
    from whynan.capsule.tape.arguments import leaves
    from whynan.capsule.tape.entries import Outside, Slot

    around = [entry.within for entry in entries if entry.within is not None]
    kept = {slot: tensor for within in around for slot, tensor in within.made.items()}
    for entry in {id(e): e for e in (*entries, *(within.entry for within in around))}.values():
        names = _parameters(entry)
        named = [*zip([*names, *("argument",) * len(entry.args)], entry.args, strict=False), *entry.kwargs.items()]
        for name, value in named:
            for leaf in leaves(value):
                if isinstance(leaf, Outside) and not leaf.tensor.requires_grad:
                    yield entry, name, leaf.value().detach()
                elif isinstance(leaf, Slot):
                    made = kept.get(leaf)
                    made = alive(leaf) if made is None else made
                    if made is not None and not made.is_floating_point():
                        yield entry, name, made.detach()


def _parameters(entry: Entry) -> list[str]:
    function: Any = getattr(entry.fn, "forward", entry.fn)
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
