"""What is remembered of batches: the right samples, however the loader works, and no batch is kept alive for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, Dataset

import whynan
from whynan.capsule.drawn import KEPT, Draws
from whynan.engine.guard import open_guard


class Numbered(Dataset[Any]):
    """Samples that hold their own number; one of them cannot be read."""

    def __init__(self, size: int = 24, broken: int = -1) -> None:
        self.size, self.broken = size, broken

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise ValueError("cannot be read")
        return {"x": torch.tensor([float(index), 1.0]), "id": index, "a": index, "b": index, "c": index}


@pytest.fixture
def draws() -> Iterator[Draws]:
    """What a guard in this process remembers."""
    with whynan.watch(torch.nn.Linear(2, 1), files=False):
        guard = open_guard()
        assert guard is not None
        yield guard.recorder.beside.draws


def behind(draws: Draws, batch: Any) -> tuple[list[int], int]:
    found = draws.behind([batch["x"]])
    assert found is not None
    return list(found.indices), found.batch


def test_after_a_break_the_kept_workers_begin_a_new_pass(draws: Draws) -> None:
    loader = DataLoader(Numbered(), batch_size=4, num_workers=2, persistent_workers=True)
    for last in (2, 5):
        for number, batch in enumerate(loader):
            assert behind(draws, batch) == (batch["id"].tolist(), number)
            if number == last:
                break


def test_batches_that_come_in_any_order_get_no_numbers(draws: Draws) -> None:
    for number, batch in enumerate(DataLoader(Numbered(), batch_size=4, num_workers=2, in_order=False)):
        assert behind(draws, batch) == ([], number)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_cannot_be_made_does_not_move_the_numbers_of_the_next(draws: Draws, workers: int) -> None:
    source, seen = iter(DataLoader(Numbered(broken=5), batch_size=4, num_workers=workers)), 0
    while True:
        try:
            batch = next(source)
        except StopIteration:
            break
        except ValueError:
            continue
        seen += 1
        assert behind(draws, batch)[0] == batch["id"].tolist()
    assert seen == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_watching_that_begins_in_the_middle_of_a_pass_names_no_wrong_sample(workers: int) -> None:
    source = iter(DataLoader(Numbered(48), batch_size=4, num_workers=workers))
    next(source)
    with whynan.watch(torch.nn.Linear(2, 1), files=False):
        guard = open_guard()
        assert guard is not None
        told = [(behind(guard.recorder.beside.draws, batch), batch["id"].tolist()) for batch in source]
    assert [number for (_, number), _ in told] == list(range(1, 12))
    assert all(indices in ([], ids) for (indices, _), ids in told)
    assert [indices for (indices, _), _ in told][-4:] == [ids for _, ids in told][-4:]  # those asked for since


def test_batches_drawn_in_another_thread_do_not_shift_the_others(draws: Draws) -> None:
    source = iter(DataLoader(Numbered(), batch_size=4, num_workers=1))
    thread = threading.Thread(target=lambda: [next(source) for _ in range(2)])
    thread.start()
    thread.join()
    for number, batch in enumerate(source, 2):
        assert behind(draws, batch) == (batch["id"].tolist(), number)


def test_no_batch_is_kept_alive(draws: Draws) -> None:
    def collate(samples: list[Any]) -> Any:
        data = torch.ones(8, 1000)
        return data, data[:, 0], ["a long text" * 100]

    memory = [StorageWeakRef(batch[0].untyped_storage()) for batch in DataLoader(Numbered(), batch_size=1, collate_fn=collate)]
    assert sum(not ref.expired() for ref in memory) <= 1
    assert "of this pass: field 2 'a long text" in draws._last[-1].sample(0)  # a number that has no name says nothing
    assert all(len(text) <= 64 for drawn in draws._last for name, texts in drawn.fields if name == "field 2" for text in texts)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not list open files")
def test_batches_of_workers_leave_no_files_open(draws: Draws) -> None:
    opened = [len(os.listdir("/proc/self/fd")) for _ in DataLoader(Numbered(120), batch_size=4, num_workers=1)]
    assert max(opened[10:]) <= max(opened[:10]) + 10, opened
    assert len(draws._last) == 30


def test_only_small_columns_are_copied_and_few_batches_remembered(draws: Draws) -> None:
    for _ in DataLoader(Numbered(8 * KEPT), batch_size=2, collate_fn=lambda _: (torch.ones(4000), torch.ones(90), torch.ones(97), torch.ones(5000))):
        pass
    assert len(draws._last) == KEPT
    assert [name for name, _ in draws._last[-1].fields] == ["field 0", "field 1"]


def test_memory_that_is_used_again_is_not_taken_for_the_batch(draws: Draws) -> None:
    for batch in DataLoader(Numbered(), batch_size=4):
        assert behind(draws, batch)
    del batch
    assert draws.behind([torch.ones(4, 2) for _ in range(500)]) is None
