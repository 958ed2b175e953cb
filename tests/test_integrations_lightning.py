"""Lightning under both of its names: the callback, its state, what ModelCheckpoint keeps, and ranks that Lightning starts by itself."""

from __future__ import annotations

import shutil
import textwrap

import pytest
from conftest import Sandbox, Shown
from doc_blocks import compare

pytest.importorskip("lightning.pytorch")

HEAD = """
    import logging, os, sys, warnings
    warnings.filterwarnings("ignore")
    import torch
    import {package} as pl
    logging.getLogger(pl.__name__).setLevel(logging.ERROR)
    quiet = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
    pl.seed_everything(0)
    x = torch.randn(16, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
"""
CHECKPOINTS = (
    HEAD
    + """
    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            loss = self.net(batch[0]).square().mean()
            return loss * float("inf") if {weights} and self.current_epoch == 2 else loss

        def validation_step(self, batch, index):
            value = [3.0, 2.0, float("nan"), float("-inf"), 2.5][self.current_epoch]
            self.log("val", self.net(batch[0]).square().mean() if {weights} else value)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    keep = pl.callbacks.ModelCheckpoint("kept", "{{epoch}}", monitor="val", save_last=True, save_top_k=2)
    pl.Trainer(max_epochs=5, callbacks=[keep], **quiet).fit(Lit(), loader, loader)
    print(sorted(os.listdir("kept")), os.path.basename(keep.best_model_path))
    last = torch.load("kept/last.ckpt", weights_only=False)
    print(last["epoch"], last["state_dict"]["net.weight"].isfinite().all().item(), len(last["callbacks"]))
"""
)
MANUAL = (
    HEAD
    + """
    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            first, second = self.optimizers()
            hidden = self.a(batch[0])
            first.zero_grad()
            self.manual_backward(hidden.square().mean())
            self.clip_gradients(first, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            first.step()
            out = self.b(self.a(batch[0]).detach())
            if index == 2:
                out = out * 0
            second.zero_grad()
            self.manual_backward(out.square().sum(1).sqrt().mean())
            second.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.a.parameters(), lr=1e-2), torch.optim.Adam(self.b.parameters(), lr=1e-2)

    {callback}
    trainer = pl.Trainer(max_epochs=1, callbacks=callbacks, enable_checkpointing=False, precision="bf16-mixed", **quiet)
    model = Lit()
    trainer.fit(model, loader)
    print("found", [(i.step, i.cause.code, i.origin.span.code) for c in callbacks for i in c.incidents])
    print("finite", all(p.isfinite().all().item() for p in model.parameters()))
"""
)
OWN = "from whynan.integrations.lightning import WhynanCallback; callbacks = [WhynanCallback(files=False)]"


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Load once here what every forked child needs."""
    import pytorch_lightning  # noqa: F401


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_value_that_is_not_finite_is_never_the_best(box: Sandbox, package: str, shown: Shown) -> None:
    done = box.watched(CHECKPOINTS.format(package=package, weights=False), "--policy", "observe")
    assert done.out.splitlines() == ["['epoch=1.ckpt', 'epoch=4.ckpt', 'last.ckpt'] epoch=1.ckpt", "4 True 1"], done.err
    assert "whynan: ModelCheckpoint: val is nan at step 12: not taken for one of the best" in done.err
    assert "val is -inf at step 16" in done.err
    if package == "lightning.pytorch":
        compare(shown("docs/integrations.md")[0], done.err)
    assert done.incidents == []  # a validation is no training step


def test_a_state_that_is_not_finite_does_not_become_the_last(box: Sandbox, shown: Shown) -> None:
    done = box.watched(CHECKPOINTS.format(package="lightning.pytorch", weights=True), "--policy", "observe")
    assert done.out.splitlines() == ["['epoch=0.ckpt', 'epoch=1.ckpt', 'last.ckpt'] epoch=1.ckpt", "1 True 1"], done.err
    compare(shown("docs/integrations.md")[0], done.err.replace(f"{box.folder}/", ""))


def test_a_rank_whose_watching_is_off_still_answers_the_others(box: Sandbox) -> None:
    """An internal error is one rank's own: at the next checkpoint it makes the same collectives as before."""
    source = CHECKPOINTS.format(package="lightning.pytorch", weights=False)
    source = (
        source.replace("pl.Trainer(", "trainer = pl.Trainer(").replace(
            ".fit(Lit()",
            """
    asked, decide = [], trainer.strategy.reduce_boolean_decision
    trainer.strategy.reduce_boolean_decision = lambda *a, **k: (asked.append(1), decide(*a, **k))[1]
    trainer.fit(Lit()""",
        )
        + "\n    print('asked', len(asked))\n"
    )
    broken = source.replace(
        "def training_step(self, batch, index):",
        """def training_step(self, batch, index):
            if self.current_epoch == 1 and index == 0:
                from whynan.engine.guard import open_guard
                open_guard()._internal_error(RuntimeError("for the test"))""",
    )
    healthy = box.watched(source, "--policy", "observe")
    shutil.rmtree(box.folder / "kept")
    alone = box.watched(broken, "--policy", "observe")
    assert "internal error, watching is off" in alone.err
    assert healthy.out.splitlines() == alone.out.splitlines(), alone.err
    assert "asked " in healthy.out and "asked 0" not in healthy.out


def test_what_a_healthy_run_keeps_is_the_same(box: Sandbox) -> None:
    source = CHECKPOINTS.format(package="lightning.pytorch", weights=True).replace("self.current_epoch == 2", "False")
    watched = box.watched(source)
    shutil.rmtree(box.folder / "kept")
    plain = box.python(str(box.write(source)))
    assert watched.out.splitlines() == [line for line in plain.out.splitlines() if line[0] in "[0123456789"], watched.err


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_manual_optimisation_with_two_optimizers_names_the_line(box: Sandbox, package: str) -> None:
    done = box.watched(MANUAL.format(package=package, callback="callbacks = []"))
    assert [(i["cause"]["code"], i["origin"]["code"]) for i in done.incidents] == [("WN501", "self.manual_backward(out.square().sum(1).sqrt().mean())")], (
        done.err
    )
    assert "finite True" in done.out


def test_the_callback_watches_a_script_that_is_run_by_python(box: Sandbox) -> None:
    done = box.python(str(box.write(MANUAL.format(package="pytorch_lightning", callback=OWN))))
    assert "found [(5, 'WN501', 'self.manual_backward(out.square().sum(1).sqrt().mean())')]" in done.out, done.err
    assert "finite True" in done.out


def test_the_callback_of_the_page_watches_by_itself(box: Sandbox, shown: Shown) -> None:
    """The lines of the page in place of the ones that make the trainer."""
    (block,) = shown("docs/integrations.md")
    source = textwrap.dedent(MANUAL.format(package="lightning.pytorch", callback="import functools"))
    before, made, after = source.partition("trainer = pl.Trainer(")
    usual = "Trainer = functools.partial(pl.Trainer, max_epochs=1, enable_checkpointing=False, **quiet)\n"
    after = after.partition("\n")[2].replace("for c in callbacks", "for c in trainer.callbacks if hasattr(c, 'incidents')")
    done = box.python(str(box.write(f"{before}{usual}{block}{after}")))
    assert made and "found [(5, 'WN501', 'self.manual_backward(out.square().sum(1).sqrt().mean())')]" in done.out, done.err


RESUME = (
    HEAD
    + """
    from whynan import TrainingStopped
    from whynan.integrations.lightning import WhynanCallback

    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            loss = self.net(batch[0]).square().mean()
            return loss / 0 if index == 1 else loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    def train(epochs, path=None):
        watching = WhynanCallback(files=False, in_total=2)
        trainer = pl.Trainer(max_epochs=epochs, callbacks=[watching], enable_checkpointing=False, **quiet)
        try:
            trainer.fit(Lit(), loader, ckpt_path=path)
        except TrainingStopped as stop:
            print("stopped", stop)
        return trainer, watching

    trainer, watching = train(1)
    trainer.save_checkpoint("one.ckpt")
    print(torch.load("one.ckpt", weights_only=False)["callbacks"]["WhynanCallback"])
    train(4, "one.ckpt")
"""
)


def test_the_budget_spent_so_far_is_in_the_checkpoint(box: Sandbox) -> None:
    done = box.python(str(box.write(RESUME.format(package="lightning.pytorch"))))
    assert "{'total': 1, 'streak': 0}" in done.out, done.out + done.err
    assert "stopped stopped at step 5" in done.out, done.out + done.err  # the third bad step in all; two are lived with


def test_ranks_that_lightning_starts_are_watched_and_agree(box: Sandbox) -> None:
    source = (
        CHECKPOINTS.split("class Lit")[0].format(package="lightning.pytorch")
        + """
    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            loss = self.net(batch[0]).square().mean()
            if index == 1 and self.global_rank == 1:
                loss = loss + torch.log(loss - loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    trainer = pl.Trainer(max_epochs=2, strategy="ddp", devices=2, enable_checkpointing=False, **quiet)
    trainer.fit(Lit(), loader)
    if trainer.is_global_zero:
        print("steps", trainer.global_step)
    """
    )
    done = box.whynan(str(box.write(source)), timeout=200)
    assert (done.status, done.out.count("steps 4")) == (0, 1), done.err
    assert [(i["rank"], i["cause"]["code"], i["origin"]["code"]) for i in done.incidents] == [(1, "WN101", "loss = loss + torch.log(loss - loss)")] * 2, (
        done.err
    )


ACCUMULATING = (
    HEAD
    + """
    class Own(torch.optim.SGD):
        pass

    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return {optimizer}(self.parameters(), lr=1e-2)

    x = torch.randn(12, 4, 4)
    x[4, 1] = float("nan")  # the first half of the third step
    x = torch.cat([x[:4], x[6:]]) if {without} else x
    lit = Lit()
    pl.Trainer(max_epochs=1, accumulate_grad_batches=2, enable_checkpointing=False, **quiet).fit(lit, torch.utils.data.DataLoader(list(x), batch_size=None))
    print([p.tolist() for p in lit.state_dict().values()])
"""
)


@pytest.mark.parametrize("optimizer", ["torch.optim.Adam", "Own"])
def test_a_bad_first_micro_batch_drops_its_window(optimizer: str, box: Sandbox) -> None:
    """The closure of a step that is left out runs all the same, for Lightning asks for its result, and is undone."""
    never = box.python(str(box.write(ACCUMULATING.format(package="lightning.pytorch", optimizer=optimizer, without=True))))
    done = box.whynan(str(box.write(ACCUMULATING.format(package="lightning.pytorch", optimizer=optimizer, without=False))))
    assert (done.status, done.out) == (0, never.out), done.err
    assert [(i["step"], i["action"]["taken"]) for i in done.incidents] == [(2, "skipped")]
