"""Processes that an unchanged script starts by itself are watched like the script: `mp.spawn`, `mp.Process`."""

from __future__ import annotations

import sys

import pytest
import torch.distributed
from conftest import Sandbox
from jobs import free_port

pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or sys.platform != "linux", reason="torch.distributed with gloo")

RANKS = """
    import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

    def work(rank, world, port):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world)
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            y = model(torch.ones(4, 2)).abs()
            if step == 3 and rank == 1:
                y = y * 0
            loss = y.sqrt().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.destroy_process_group()
        sys.stdout.write(f"END {rank} {bool(model.module.weight.isfinite().all())}\\n")

    if __name__ == "__main__":
        mp.spawn(work, args=(2, int(sys.argv[1])), nprocs=2)
"""

TRIALS = """
    import multiprocessing, sys, torch

    def train(seed, queue):
        torch.manual_seed(seed)
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(6):
            loss = net(torch.randn(8, 4)).pow(2).mean()
            if seed == 2 and step == 4:
                loss = loss + torch.log(loss * 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        queue.put((seed, bool(net.weight.isfinite().all())))

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        queue = context.Queue()
        trials = [context.Process(target=train, args=(seed, queue)) for seed in (1, 2)]
        for trial in trials:
            trial.start()
        print(sorted(queue.get() for _ in trials))
        with context.Pool(1) as pool:
            print(pool.map(abs, [-1, 2]))
        for trial in trials:
            trial.join()
"""


def test_ranks_started_by_spawn_are_watched(box: Sandbox) -> None:
    """An unchanged script with mp.spawn: one incident with its rank and line, skipped by all, told once."""
    done = box.whynan(str(box.write(RANKS)), str(free_port()))
    assert done.status == 0, done.err
    assert sorted(done.out.splitlines()) == ["END 0 True", "END 1 True"]
    assert [(i["step"], i["rank"], i["cause"]["code"], i["origin"]["code"]) for i in done.incidents] == [(3, 1, "WN501", "loss = y.sqrt().mean()")]
    assert done.err.count("error[WN501]") == 1
    assert done.err.count("whynan: wrote") == 1


def test_ranks_that_are_stopped_end_the_script_with_status_3(box: Sandbox) -> None:
    """The script's mp.spawn fails because its processes ended; what is said is why, with the exit status of a stopped run."""
    done = box.whynan(str(box.write(RANKS)), str(free_port()), options=("--policy", "stop"))
    assert done.status == 3, done.err
    assert "whynan: training stopped" in done.err
    assert "Traceback" not in done.err


def test_no_rank_ends_before_the_last_words_are_said(box: Sandbox) -> None:
    """Launchers kill the other ranks once one has ended: a rank whose terminal is slow must still come to say why."""
    slow = RANKS.replace(
        "torch.manual_seed(0)",
        """torch.manual_seed(0)
        import time
        write = sys.stderr.write
        sys.stderr.write = lambda text: (time.sleep(0.0 if rank else 0.2), write(text))[1]""",
    )
    done = box.whynan(str(box.write(slow)), str(free_port()), options=("--policy", "stop"))
    assert done.status == 3, done.err
    assert "whynan: training stopped" in done.err
    assert "whynan: wrote" in done.err


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_trainings_in_processes_of_their_own_keep_their_own_files(box: Sandbox, method: str) -> None:
    """Processes that are no ranks of one job write beside each other; pools and queues work as without us."""
    done = box.whynan(str(box.write(TRIALS)), method)
    assert done.status == 0, done.err
    assert done.out.splitlines() == ["[(1, True), (2, True)]", "[1, 2]"]
    assert sorted(p.name for p in box.run_dir.iterdir()) == ["process-1", "process-2"]
    assert not (box.run_dir / "process-1" / "incidents.jsonl").exists()
    assert "WN101" in (box.run_dir / "process-2" / "incidents.jsonl").read_text()


def test_the_exit_status_of_a_worker_is_its_own_affair(box: Sandbox) -> None:
    """A worker that ends with 3 by itself, and a process object that was closed, change nothing for the script."""
    done = box.whynan(
        str(
            box.write("""
                import multiprocessing, sys, torch

                def work():
                    sys.exit(3)

                if __name__ == "__main__":
                    worker = multiprocessing.get_context("fork").Process(target=work)
                    worker.start()
                    worker.join()
                    print(worker.exitcode)
                    worker.close()
            """)
        )
    )
    assert (done.out, done.status) == ("3\n", 0), done.err


WITHOUT_TORCH = """
    import importlib.util, multiprocessing, sys

    def read(queue):
        queue.put(sorted({"torch", "numpy", "rich"} & {*sys.modules}))

    def train(queue, look=None):
        if look is not None and look("torch") is None:
            return
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            loss = model(torch.ones(2, 2)).square().mean() if step != 2 else torch.log(model(torch.ones(2, 2)) * 0).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        queue.put(bool(model.weight.isfinite().all()))

    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        for work, *look in ((read,), (train,), (train, importlib.util.find_spec)):
            process = context.Process(target=work, args=(queue, *look))
            process.start()
            print(queue.get())
            process.join()
"""


def test_a_process_without_torch_does_not_pay_for_it(box: Sandbox) -> None:
    """A spawned process that needs no torch imports none; one that imports it in its function is watched from there on, however often it was looked for."""
    box.write(WITHOUT_TORCH)
    done = box.whynan("train.py")
    assert done.out.split("\n") == ["[]", "True", "True", ""], done.err
    assert done.err.count("error[WN101]") == 2
    assert "internal error" not in done.err
