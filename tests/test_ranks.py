"""Many ranks: all take the same action, nobody waits in vain, one incident names the rank and the sample."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import pytest
import torch
import torch.distributed
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from conftest import PYTHON, Sandbox
from jobs import PROGRAM, Ended, finish, free_port, job, line_of, start, torchrun

pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or sys.platform != "linux", reason="torch.distributed with gloo")

THREE = {"2": (1, "data"), "4": (0, "loss"), "6": (1, "grad")}
CODES = {"data": ("WN701", "data goes in here"), "loss": ("WN101", "bad loss"), "grad": ("WN501", "bad slope")}


def plain(box: Sandbox, ranks: int, asked: dict[str, Any], leave: list[int]) -> Ended:
    """Run the same job without whynan and without some updates."""
    done = job(Sandbox(box.folder / "plain"), ranks, {**asked, "faults": {}, "leave": leave}, watched=False)
    assert done.status == [0] * ranks, done.text
    return done


def check_told(done: Ended, faults: dict[str, tuple[int, str]], ranks: int, every: int = 1, taken: str = "skipped") -> None:
    """One incident for each fault, with its rank, line and sample; all other ranks wrote down that they received it."""
    assert [(i["step"], i["rank"], i["cause"]["code"], i["origin"]["line"]) for i in done.incidents] == [
        (int(number) // every, rank, CODES[kind][0], line_of(CODES[kind][1])) for number, (rank, kind) in faults.items()
    ], done.text
    for incident, (_, kind) in zip(done.incidents, faults.values(), strict=True):
        assert incident["origin"]["samples"] == ([2] if kind == "data" else [])
        assert incident["action"]["taken"] == taken
    for rank in range(ranks):
        got = [(i["step"], i["cause"]["code"], i["action"]["taken"]) for i in done.received(rank)]
        assert got == [(int(n) // every, "WN801", taken) for n, (born, _) in faults.items() if born != rank]


# -- under torchrun -----------------------------------------------------------------------------------------------


def test_torchrun_with_faults_on_different_ranks(box: Sandbox) -> None:
    """Under torchrun a fault in data, loss or gradient of one rank is skipped by all, as if no rank had drawn that batch."""
    asked = {"model": "ddp", "norm": True, "faults": THREE}
    done = torchrun(box, 2, asked)
    assert done.status == [0], done.text
    check_told(done, THREE, 2)
    assert done.said("END") == plain(box, 2, asked, [2, 4, 6]).said("END")
    assert [len(done.metrics(rank)) for rank in range(2)] == [8, 8]


def test_torchrun_with_four_ranks_and_fully_shard(box: Sandbox) -> None:
    """Four ranks with fully_shard and accumulation over two micro-batches: the same holds, whichever micro-batch is bad."""
    faults = {"5": (3, "data"), "8": (2, "grad"), "12": (0, "loss")}
    asked = {"model": "fsdp", "accumulate": 2, "clip": True, "faults": faults}
    done = torchrun(box, 4, asked)
    assert done.status == [0], done.text
    check_told(done, faults, 4, every=2)
    assert done.said("END") == plain(box, 4, asked, [2, 4, 6]).said("END")
    assert len(set(done.said("END").values())) == 1


def test_torchrun_restarts_a_job_whose_rank_was_killed(box: Sandbox) -> None:
    """A rank that is killed while the others go on is told by torchrun, and the restarted job is watched anew."""
    asked = {"model": "ddp", "dies": (1, 1), "faults": {"3": (0, "loss")}, "store": str(box.folder / "store")}
    done = torchrun(box, 2, asked, agent=("--standalone", "--max-restarts=1"))
    assert done.status == [0], done.text
    check_told(done, {"3": (0, "loss")}, 2)
    assert done.text.count("COLLECTIVES 0 ") == 4  # two ranks, twice
    assert done.said("END") == plain(box, 2, {"model": "ddp"}, [3]).said("END")


def test_two_agents_make_one_job(box: Sandbox) -> None:
    """Ranks of two torchrun agents, as on two machines, keep one run directory and tell one incident."""
    asked = {"model": "ddp", "faults": {"2": (1, "data")}}
    common = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}", "--nproc-per-node=1"]
    words = ["-m", "whynan", "run", "--run-dir", str(box.run_dir), str(PROGRAM), json.dumps(asked)]
    agents = [start(box, [PYTHON, "-m", "torch.distributed.run", *common, f"--node-rank={node}", *words]) for node in range(2)]
    done = finish(box, agents)
    assert done.status == [0, 0], done.text
    check_told(done, {"2": (1, "data")}, 2)


# -- kinds of models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"model": "ddp", "norm": True, "options": {"broadcast_buffers": False}},
        {"model": "ddp", "clip": True, "options": {"gradient_as_bucket_view": True}},
        {"model": "ddp", "options": {"static_graph": True}, "log": True},
        {"model": "ddp", "contrast": "gather"},
        {"model": "ddp", "norm": True, "vector": True},
        {"model": "ddp", "norm": True, "aside": True},
        {"model": "ddp", "scaler": True},
        {"model": "ddp", "scaler": True, "clip": True},
        {"model": "around"},
        {"model": "compiled"},
        {"model": "own"},
        {"model": "own", "average": "hook"},
        {"model": "own", "average": "after hook"},
        {"model": "own", "average": "gather"},
        {"model": "fsdp"},
        {"model": "fsdp", "clip": True, "options": {"reshard_after_forward": False}},
        {"model": "fsdp", "norm": True},
        {"model": "fsdp", "tied": True},
        {"model": "fsdp", "scaler": True},
        {"model": "mixed"},
        {"model": "rechecked"},
        {"model": "grouped"},
        {"model": "listed"},
        {"model": "replicated"},
    ],
    ids=lambda asked: " ".join(f"{key}={value}" for key, value in asked.items()),
)
def test_every_kind_of_model(box: Sandbox, asked: dict[str, Any]) -> None:
    """A fault of one rank is skipped by all, its rank, line and sample are named, and no bit shows that the batch was drawn."""
    asked = {**asked, "faults": THREE}
    done = job(box, 2, asked)
    assert done.status == [0, 0], done.text
    own = [i for i in done.incidents if i["origin"]["line"] == line_of("bad probe")]
    assert len(own) == bool(asked.get("aside"))
    if not own:
        check_told(done, THREE, 2)
    reference = plain(box, 2, asked, [2, 4, 6])
    assert done.said("END") == reference.said("END")
    assert "internal error" not in done.text
    assert [i["origin"]["exact"] for i in done.incidents] == [asked["model"] != "mixed"] * len(done.incidents)
    assert done.said("SCALE") == reference.said("SCALE")


def test_the_first_steps_of_a_sharded_model_are_replayed(box: Sandbox) -> None:
    """What stands where in its modules is learned in their first calls, and is their wrapper's: put back, the replay of these steps met distributed weights."""
    faults = {"0": (1, "data"), "1": (0, "loss")}
    done = job(box, 2, {"model": "fsdp", "faults": faults})
    assert done.status == [0, 0], done.text
    check_told(done, faults, 2)


EVERY_PLACE = {"0": (1, "data"), "2": (1, "grad"), "5": (0, "loss")}


@pytest.mark.parametrize(
    "asked",
    [
        {"model": "ddp", "options": {"find_unused_parameters": True}, "branch": True},
        {"model": "ddp", "options": {"find_unused_parameters": True, "gradient_as_bucket_view": True}, "branch": True, "accumulate": 2},
        {"model": "ddp", "options": {"static_graph": True}},
        {"model": "ddp", "options": {"static_graph": True}, "checkpoint": "reentrant"},
        {"model": "ddp", "checkpoint": "reentrant"},
        {"model": "pair", "checkpoint": "plain"},
    ],
    ids=lambda asked: " ".join(f"{key}={value}" for key, value in asked.items()),
)
def test_a_replay_leaves_no_trace_in_what_averages_gradients(box: Sandbox, asked: dict[str, Any]) -> None:
    """A replayed backward pass is not one of the job: what DDP notes about used weights, their order and its first pass stays as it is."""
    every = asked.get("accumulate", 1)
    asked = {**asked, "faults": {str(int(number) * every): fault for number, fault in EVERY_PLACE.items()}}
    done = job(box, 2, asked)
    assert done.status == [0, 0], done.text
    check_told(done, asked["faults"], 2, every=every)
    assert done.said("END") == plain(box, 2, asked, [0, 2, 5]).said("END")
    observed = job(Sandbox(box.folder / "observed"), 2, asked, "--policy", "observe")
    assert observed.status == [0, 0], observed.text
    assert observed.said("END") == job(Sandbox(box.folder / "without"), 2, asked, watched=False).said("END")


def test_a_loss_over_all_ranks_names_the_rank_that_put_it_in(box: Sandbox) -> None:
    """A contrastive loss gathers the features of all ranks, so all losses are bad; the rank whose features were is named."""
    done = job(box, 2, {"model": "ddp", "contrast": "with gradients", "faults": {"2": (1, "data"), "4": (1, "grad")}})
    assert done.status == [0, 0], done.text
    check_told(done, {"2": (1, "data"), "4": (1, "grad")}, 2)


def test_a_loss_that_is_averaged_over_all_ranks(box: Sandbox) -> None:
    """A bad loss of one rank is in the average of all: it is followed through that to the line that made it, and the change is proven."""
    done = job(box, 2, {"model": "ddp", "contrast": "mean", "faults": {"2": (1, "data")}})
    assert done.status == [0, 0], done.text
    check_told(done, {"2": (1, "data")}, 2)
    assert [remedy["result"] for remedy in done.incidents[0]["remedies"]] == ["proven"]


def test_gradients_that_are_asked_for_and_averaged(box: Sandbox) -> None:
    """What `torch.autograd.grad` gives and the program averages is shared, too: the rank that made the bad value is named, and all skip."""
    faults = {"2": (1, "data"), "6": (1, "grad")}
    asked = {"model": "own", "average": "derive", "faults": faults}
    done = job(box, 2, asked)
    assert done.status == [0, 0], done.text
    check_told(done, faults, 2)
    assert done.said("END") == plain(box, 2, asked, [2, 6]).said("END")


@pytest.mark.parametrize("kind", ["loss", "gradients"])
def test_what_is_only_logged_over_the_ranks_is_not_shared(box: Sandbox, kind: str) -> None:
    """Ranks that train models of their own and only compare their losses or gradients decide each for itself: nobody is waited for."""
    done = job(box, 2, {"model": "own", "average": "", "logs": kind, "updates": 4, "faults": {"2": (1, "data")}})
    assert done.status == [0, 0], done.text
    assert "no gradients are shared between the ranks" in done.text
    assert [(i["step"], i["rank"], i["cause"]["code"]) for i in done.incidents] == [(2, 1, "WN701")]


def test_tensor_parallel_models_are_skipped_but_not_replayed(box: Sandbox) -> None:
    """Where single operations run on several ranks all skip together, and the incident says why it has no place."""
    asked = {"model": "tp", "faults": {"2": (-2, "data"), "4": (1, "loss")}}
    done = job(box, 2, asked)
    assert done.status == [0, 0], done.text
    assert [i["cause"]["code"] for i in done.incidents] == ["WN901", "WN901"]
    assert all("tensor parallel" in i["origin"]["note"] for i in done.incidents)
    assert done.said("END") == plain(box, 2, asked, [2, 4]).said("END")


def test_weights_that_are_gathered_outside_of_module_calls(box: Sandbox) -> None:
    """A method that fully_shard was told of runs in the loop: its freed weights are not read, its hooks not called again, and all ranks skip."""
    asked = {"model": "by method", "faults": THREE}
    done = job(box, 2, asked)
    assert done.status == [0, 0], done.text
    assert [(i["step"], i["cause"]["code"], i["action"]["taken"]) for i in done.incidents] == [(n, "WN901", "skipped") for n in (2, 4, 6)]
    assert all("outside of module calls" in i["origin"]["note"] for i in done.incidents)
    assert done.said("END") == plain(box, 2, asked, [2, 4, 6]).said("END")


def test_a_collective_that_nobody_knew_of_ends_a_replay(box: Sandbox) -> None:
    """One rank alone never waits in a collective: the replay ends there, all ranks skip, and the incident says why it has no place."""
    asked = {"model": "ddp", "contrast": "functional", "faults": {"2": (1, "data")}}
    done = job(box, 2, asked)
    assert done.status == [0, 0], done.text
    assert [(i["cause"]["code"], i["action"]["taken"]) for i in done.incidents] == [("WN901", "skipped")]
    assert "cannot be made by one rank alone" in str(done.incidents[0]["cause"]["evidence"])
    assert "born on" not in str(done.incidents[0]["cause"]["evidence"])
    assert done.said("END") == plain(box, 2, asked, [2]).said("END")


def test_a_parameter_that_no_wrapper_knows_of(box: Sandbox) -> None:
    """A gradient that is not averaged can be bad on one rank only: all ranks still skip that step."""
    asked = {"model": "ddp", "outside": True, "faults": {"3": (1, "outside")}}
    done = job(box, 2, asked)
    assert done.status == [0, 0], done.text
    assert [(i["step"], i["rank"], i["cause"]["code"], i["origin"]["line"]) for i in done.incidents] == [(3, 1, "WN501", line_of("bad slope of its own"))]
    assert done.said("END") == plain(box, 2, asked, [3]).said("END")


def test_ranks_that_train_another_model_are_not_asked(box: Sandbox) -> None:
    """Two halves of a job train a model each: a fault in one half is settled there, and the other goes on."""
    asked = {"model": "halves", "faults": {"2": (3, "data")}}
    done = job(box, 4, asked)
    assert done.status == [0] * 4, done.text
    assert [(i["step"], i["rank"]) for i in done.incidents] == [(2, 3)]
    assert [len(done.received(rank)) for rank in range(4)] == [0, 0, 1, 0]
    ends, left_out = done.said("END"), plain(box, 4, asked, [2]).said("END")
    assert (ends[2], ends[3]) == (left_out[2], left_out[3])
    assert ends[0] == ends[1] != left_out[0]


@pytest.mark.parametrize("number", [8, 9, 11], ids=["first", "middle", "last"])
def test_accumulation_with_no_sync(box: Sandbox, number: int) -> None:
    """A bad micro-batch of one rank drops the whole window on all ranks, wherever in the window it stands."""
    asked = {"model": "ddp", "accumulate": 4, "updates": 4, "faults": {str(number): (1, "data")}}
    done = job(box, 2, asked)
    assert done.status == [0, 0], done.text
    check_told(done, {str(number): (1, "data")}, 2, every=4)
    assert done.said("END") == plain(box, 2, asked, [2]).said("END")


def test_uneven_inputs(box: Sandbox) -> None:
    """Inside Join a rank whose data has ended is not waited for: the others settle a bad step by themselves."""
    done = job(box, 2, {"model": "ddp", "optimizer": "SGD", "rows": {"0": 4, "1": 7}, "faults": {"2": (1, "data"), "5": (1, "loss")}})
    assert done.status == [0, 0], done.text
    assert [(i["step"], i["rank"], i["cause"]["code"]) for i in done.incidents] == [(2, 1, "WN701"), (5, 1, "WN101")]
    assert [(i["step"], i["cause"]["code"]) for i in done.received(0)] == [(2, "WN801")]
    assert len(set(done.said("END").values())) == 1


# -- actions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "ranks"), [("ddp", 4), ("fsdp", 2)])
def test_all_ranks_stop_together(box: Sandbox, model: str, ranks: int) -> None:
    """A policy that stops, stops every rank at the same step with exit status 3."""
    done = job(box, ranks, {"model": model, "faults": {"3": (1, "grad")}}, "--policy", "stop")
    assert done.status == [3] * ranks, done.text
    check_told(done, {"3": (1, "grad")}, ranks, taken="stopped")
    assert [len(done.metrics(rank)) for rank in range(ranks)] == [3] * ranks


def test_a_row_of_bad_steps_on_different_ranks_stops_all(box: Sandbox) -> None:
    """Bad steps in a row count for the job, whichever rank they are born on."""
    done = job(box, 2, {"model": "ddp", "faults": {"2": (1, "data"), "3": (0, "loss"), "4": (1, "grad")}}, "--in-a-row", "2")
    assert done.status == [3, 3], done.text
    assert [i["action"]["taken"] for i in done.incidents] == ["skipped", "skipped", "stopped"]


@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_all_ranks_roll_back(box: Sandbox, model: str) -> None:
    """A rollback takes every rank to the same state: the one before the first step, where none was renewed since."""
    asked = {"model": model, "faults": {"3": (1, "data")}}
    done = job(box, 2, asked, "--policy", "rollback")
    assert done.status == [0, 0], done.text
    check_told(done, {"3": (1, "data")}, 2, taken="rolled back")
    assert done.said("END") == plain(box, 2, asked, [0, 1, 2, 3]).said("END")


def test_an_optimizer_with_collectives_is_not_tried_on_one_rank_alone(box: Sandbox) -> None:
    asked = {"model": "ddp", "optimizer": "Summed", "updates": 4, "faults": {"2": (1, "grad")}}
    done = job(box, 2, asked)
    assert done.status == [0, 0], done.text
    assert [(i["rank"], i["cause"]["code"]) for i in done.incidents] == [(1, "WN501")]
    assert set(done.said("END").values()) == set(plain(box, 2, asked, leave=[2]).said("END").values())


def test_a_spike_of_one_rank_is_skipped_by_all(box: Sandbox) -> None:
    """A spike policy that acts, acts on all ranks, also where one rank alone saw the spike."""
    asked = {"model": "ddp", "updates": 36, "rate": 1e-4, "faults": {"33": (1, "spike")}}
    done = job(box, 2, asked, "--spike", "skip")
    assert done.status == [0, 0], done.text
    assert "whynan: rank 1 saw a spike at step 33" in done.out[1]
    assert done.said("END") == plain(box, 2, asked, [33]).said("END")


def test_a_scaler_that_never_let_a_step_through_is_told_once(box: Sandbox) -> None:
    """What all ranks have skipped alike from the first step on is one incident of the job, also when its groups are gone."""
    done = job(box, 2, {"model": "ddp", "scaler": True, "start": 2.0**127, "gain": 1e7, "updates": 10})
    assert done.status == [0, 0], done.text
    assert [(i["rank"], i["cause"]["code"]) for i in done.incidents] == [(0, "WN606")]


def test_observing_changes_nothing(box: Sandbox) -> None:
    """The policy that only observes leaves every bit as it would be without whynan, and still tells of the one rank."""
    asked = {"model": "ddp", "faults": {"2": (1, "loss")}}
    done = job(box, 2, asked, "--policy", "observe")
    assert done.status == [0, 0], done.text
    assert [(i["rank"], i["cause"]["code"], i["action"]["taken"]) for i in done.incidents] == [(1, "WN101", "observed")]
    without = job(Sandbox(box.folder / "without"), 2, asked, watched=False)
    assert done.said("END") == without.said("END")


# -- gradients that are written to after they were averaged ----------------------------------------------------------


def born(done: Ended) -> list[tuple[int, int, str]]:
    """Where the incidents of the job were born, and what was done."""
    assert all(i["origin"]["line"] == line_of("bad size") for i in done.incidents if i["step"] == 4 and i["cause"]["code"] == "WN103"), done.text
    return [(i["step"], i["rank"], i["action"]["taken"]) for i in done.incidents]


@pytest.mark.parametrize("more", [{}, {"scaler": True}, {"scaler": True, "fused": True}, {"clip": True, "options": {"gradient_as_bucket_view": True}}], ids=str)
def test_ranks_that_write_to_averaged_gradients_agree_at_each_step(box: Sandbox, more: dict[str, Any]) -> None:
    """Where all ranks write to averaged gradients, what becomes bad on one of them is skipped by all, and told with rank and line."""
    asked = {"model": "ddp", "writes": "always", "faults": {"4": (1, "write")}, **more}
    done = job(box, 2, asked)
    assert done.status == [0, 0], done.text
    assert born(done) == [(4, 1, "skipped")]
    assert [(i["step"], i["cause"]["code"]) for i in done.received(0)] == [(4, "WN801")]
    left_out = plain(box, 2, asked, [4])
    assert (done.said("END"), done.said("SCALE")) == (left_out.said("END"), left_out.said("SCALE"))


@pytest.mark.parametrize("more", [{}, {"scaler": True}, {"scaler": True, "fused": True}, {"clip": True}], ids=str)
def test_a_rank_that_alone_breaks_its_averaged_gradients(box: Sandbox, more: dict[str, Any]) -> None:
    """One rank makes its averaged gradients bad and the others know nothing: it is told at once, nobody waits, all stop at the next step."""
    done = job(box, 2, {"model": "ddp", "writes": "", "faults": {"4": (1, "write")}, **more})
    assert done.status == [3, 3], done.text
    assert born(done) == [(4, 1, "skipped")]
    assert "whynan: stopped at step 5: rank 1 alone left out step 4, so the weights are not the same on all ranks any more" in done.out[0]
    assert [(i["step"], i["cause"]["code"], i["action"]["taken"]) for i in done.received(0)] == [(4, "WN801", "stopped")]


def test_ranks_that_all_break_their_averaged_gradients_go_on(box: Sandbox) -> None:
    """Where it turns out that all have left out the same update, they go on, and ask each other from then on."""
    asked = {"model": "ddp", "writes": "later", "faults": {"4": (-2, "write")}}
    done = job(box, 2, asked)
    assert done.status == [0, 0], done.text
    assert sorted(born(done)) == [(4, 0, "skipped"), (4, 1, "skipped")]
    left_out = plain(box, 2, asked, [4, 5])
    assert done.said("END") == left_out.said("END")
    assert _per_step(done)[-1] == _per_step(left_out)[-1] + 1


def test_a_broken_averaged_gradient_is_only_observed_where_asked(box: Sandbox) -> None:
    """The policy that only observes tells of it, and does nothing."""
    asked = {"model": "ddp", "writes": "", "faults": {"4": (1, "write")}}
    done = job(box, 2, asked, "--policy", "observe")
    assert done.status == [0, 0], done.text
    assert born(done)[0] == (4, 1, "observed")
    assert done.said("END") == job(Sandbox(box.folder / "without"), 2, asked, watched=False).said("END")


# -- weights in flat parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"options": {"use_orig_params": True}}, {}, {"norm": True, "clip": True, "options": {"use_orig_params": True}}], ids=str)
def test_steps_of_flat_shards_are_left_out_and_not_replayed(box: Sandbox, more: dict[str, Any]) -> None:
    """A bad step of `FullyShardedDataParallel` is skipped by all ranks without a trace; the incident says why nobody could replay it."""
    asked = {"model": "flat", "faults": {"2": (1, "data"), "4": (0, "grad")}, **more}
    done = job(box, 2, asked)
    assert done.status == [0, 0], done.text
    assert done.said("END") == plain(box, 2, asked, [2, 4]).said("END")
    assert [(i["step"], i["cause"]["code"], i["action"]["taken"]) for i in done.incidents] == [(2, "WN901", "skipped"), (4, "WN901", "skipped")]
    assert all("`FullyShardedDataParallel` keeps weights in flat parts" in i["origin"]["note"] for i in done.incidents)
    assert "internal error" not in done.text


# -- a rank that does not step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"model": "own", "average": "reduce"}, {"model": "own", "norm": True}, {"model": "ddp"}], ids=str)
@pytest.mark.parametrize("bad", [(), (0, 3)], ids=["healthy", "bad"])
def test_one_rank_steps_for_all(box: Sandbox, asked: dict[str, Any], bad: tuple[int, ...]) -> None:
    """Where one rank alone makes the update and hands out the weights, it waits for nobody, says so, and leaves out the bad steps by itself."""
    asked = asked | {"server": True, "faults": {str(number): (1, "data") for number in bad}}
    done = job(box, 2, asked, "--rank-timeout", "1000")
    assert done.status == [0, 0], done.text
    assert "whynan: rank 0 does not step together with all others: it decides for itself" in done.out[0]
    assert done.said("END")[0] == plain(box, 2, asked, list(bad)).said("END")[0]
    assert [(i["step"], i["cause"]["code"], i["action"]["taken"]) for i in done.incidents if i["rank"] == 0] == [(n, "WN801", "skipped") for n in bad]


# -- ranks that do not answer -------------------------------------------------------------------------------------


def test_a_rank_killed_at_a_bad_step_is_told(box: Sandbox) -> None:
    """Ranks that want to settle a bad step with one that was killed say so and stop, instead of waiting."""
    done = job(box, 3, {"model": "ddp", "dies": (2, 1), "faults": {"2": (0, "loss")}})
    assert done.status == [3, -9, 3], done.text
    assert all(f"whynan: rank {rank} waited for the others in vain" in done.out[rank] for rank in (0, 2))


@pytest.mark.parametrize("step", [1, 2], ids=["where they meet", "later"])
def test_a_rank_that_is_missing_in_the_exchange(box: Sandbox, step: int) -> None:
    """A rank that lives but does not come to the exchange is named after the time that was asked for, and the others stop."""
    program = box.write(MISSING.replace("STEP", str(step)))
    done = job(box, 2, {}, "--rank-timeout", "3", program=program)
    assert done.status == [3, 0], done.text
    assert "whynan: rank 0 waited for the others in vain" in done.out[0]
    assert "Ranks 1 failed" in done.out[0]
    assert f"whynan: rank 0 waits for ranks 1, up to 3 s, to settle step {step} with them (nan in loss{', WN' * (step > 1)}" in done.out[0]
    first = done.incidents[0]
    assert (first["step"], first["rank"], first["symptom"]["place"], first["action"]["taken"]) == (step, 0, "loss", "stopped")


UNSEEN = """
    import torch, torch.distributed as dist

    class Breaking(torch.nn.Module):
        def forward(self, weight):
            weight.grad[0, 0] = float("nan")  # inside a module nothing is written down

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 2)).mean().backward()
        if step == 2 and dist.get_rank() == 1:
            Breaking()(model.module.weight)
        optimizer.step()
"""


def test_ranks_that_have_gone_on_end_with_a_word(box: Sandbox) -> None:
    """A rank whose bad value nobody else can know of says whom it waits for; the others end with a line of ours and not with the transport's error."""
    done = job(box, 2, {}, "--rank-timeout", "3", program=box.write(UNSEEN))
    assert done.status == [3, 3], done.text
    assert "whynan: rank 1 waits for ranks 0, up to 3 s, to settle step 2 with them" in done.out[1]
    assert "whynan: rank 0 ends, too: rank 1 stopped, because not all ranks answered" in done.out[0]
    assert "Traceback" not in done.text
    assert [(i["step"], i["rank"]) for i in done.incidents] == [(2, 1)]


def test_a_rank_that_stops_for_what_it_trains_alone(box: Sandbox) -> None:
    """A rank that stops for an optimizer of its own leaves a word: the others end with it and exit status 3."""
    done = job(box, 2, {"model": "ddp", "aside": True}, "--policy", "stop")
    assert done.status == [3, 3], done.text
    assert "whynan: rank 1 ends, too: rank 0 stopped at step" in done.out[1]
    assert "Traceback" not in done.text


def test_what_a_rank_trains_alone_has_a_budget_of_its_own(box: Sandbox) -> None:
    """Bad steps of what one rank trains beside the shared model do not use up what the shared model may have."""
    asked = {"model": "ddp", "aside": True, "faults": {"3": (1, "data")}}
    done = job(box, 2, asked, "--in-total", "1")
    assert done.status == [0, 0], done.text
    assert [(i["rank"], i["action"]["taken"], i["action"]["total"]) for i in done.incidents] == [(0, "skipped", 1), (1, "skipped", 1)]


MISSING = """
    import signal, sys, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEP + 2):
        loss = model(torch.ones(2, 2)).mean()
        if step == STEP:
            loss = loss * float("nan")
        loss.backward()
        if step == STEP and dist.get_rank() == 1:
            dist.distributed_c10d._get_default_store().get("end")  # until the other has ended
            break
        try:
            optimizer.step()
        finally:
            if step == STEP:
                dist.distributed_c10d._get_default_store().set("end", "1")
                signal.sigtimedwait([], 1)  # the store lives here
"""


@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_an_exception_on_one_rank_is_its_own(box: Sandbox, model: str) -> None:
    """An exception of one rank ends that rank as it would without whynan; the diagnosis waits for nobody."""
    done = job(box, 2, {"model": model, "faults": {"3": (1, "index")}})
    assert done.status == [1, 1], done.text
    assert "IndexError" in done.out[1]
    assert "IndexError" not in done.out[0]


def test_a_rank_that_ends_before_the_first_step(box: Sandbox) -> None:
    """Nothing of ours waits for a rank that never came to a step."""
    done = job(box, 2, {"model": "ddp", "dies": (-1, 1)})
    assert done.status[1] == 5
    assert done.status[0] == 1, done.text


# -- cost ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "extra"),
    [
        ({"model": "ddp"}, 0),
        ({"model": "ddp", "clip": True}, 0),
        ({"model": "ddp", "writes": "later"}, 0),
        ({"model": "ddp", "writes": "always"}, 1),
        ({"model": "fsdp", "clip": True}, 0),
        ({"model": "fsdp"}, 1),
        ({"model": "own"}, 1),
    ],
    ids=lambda value: str(value),
)
def test_collectives_of_a_healthy_step(box: Sandbox, asked: dict[str, Any], extra: int) -> None:
    """A healthy step makes no collective of ours, but one small one where no collective carries the answer."""
    counts = [_per_step(run) for run in (job(box, 2, asked), plain(box, 2, asked, []))]
    assert len(counts[0]) == len(counts[1]) == 6
    assert counts[0] == [number + extra for number in counts[1]]


def _per_step(done: Ended) -> list[int]:
    """Return how many collectives each step made, without the first, at which the ranks meet."""
    made = [int(line.split()[2]) for line in done.out[0].splitlines() if line.startswith("COLLECTIVES")]
    return [after - before for before, after in itertools.pairwise(made[1:])]


# -- the other way in ---------------------------------------------------------------------------------------------

SPAWNED = """
    import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp, whynan

    def work(rank, world, port, run_dir):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world)
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with whynan.watch(model, optimizer, run_dir=run_dir, policy="skip:1,stop"):
                for step in range(6):
                    x = torch.ones(4, 2)
                    loss = model(x).mean()
                    if step in (2, 3) and rank == 1:
                        loss = loss + torch.log(torch.zeros(()))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        except whynan.TrainingStopped as stop:
            sys.stdout.write(f"STOPPED {rank} {step} \\n")
        dist.destroy_process_group()
        sys.stdout.write(f"END {rank} {model.module.weight.sum().item()} \\n")

    if __name__ == "__main__":
        mp.spawn(work, args=(2, int(sys.argv[1]), sys.argv[2]), nprocs=2)
"""


def test_watch_in_spawned_processes(box: Sandbox) -> None:
    """`whynan.watch` inside each of several spawned processes: one run directory, TrainingStopped on all, a clean end."""
    path = box.write(SPAWNED)
    done = finish(box, [start(box, [PYTHON, str(path), str(free_port()), str(box.run_dir)])])
    assert done.status == [0], done.text
    assert done.said("STOPPED") == {0: "3", 1: "3"}
    assert len(set(done.said("END").values())) == 1
    assert [(i["step"], i["rank"], i["action"]["taken"]) for i in done.incidents] == [(2, 1, "skipped"), (3, 1, "stopped")]
