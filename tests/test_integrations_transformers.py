"""Transformers' Trainer: what its log makes of a bad loss is said, and the callback does what `whynan run` does."""

from __future__ import annotations

import os
import textwrap

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from conftest import Sandbox, Shown

from whynan.errors import UsageError

transformers = pytest.importorskip("transformers")

PROGRAM = """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Texts(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            ids = torch.randint(5, 90, (12,), generator=torch.Generator().manual_seed(index))
            return {{"input_ids": ids, "labels": torch.full_like(ids, -100) if 16 <= index < 20 else ids}}

    class InOrder(Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments("out", num_train_epochs=1, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, {more})
    {callback}
    Trainer, model, args, data = InOrder, GPT2LMHeadModel(config), arguments, Texts()
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=callbacks)
    trainer.train()
    print("found", [(i.step, i.cause.code) for c in callbacks for i in c.incidents])
    print("finite", all(p.isfinite().all().item() for p in trainer.model.parameters()))
"""
OWN = "from whynan.integrations.transformers import WhynanCallback; callbacks = [WhynanCallback(files=False)]"


def program(callback: str = "callbacks = []", **more: object) -> str:
    return PROGRAM.format(callback=callback, more=", ".join(f"{k}={v!r}" for k, v in more.items()))


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Load once here what every forked child needs."""
    from transformers import GPT2LMHeadModel, Trainer  # noqa: F401


def test_label_smoothing_with_a_batch_that_has_no_label_names_the_line_and_what_the_log_hides(box: Sandbox) -> None:
    done = box.watched(program(label_smoothing_factor=0.1))
    assert [(i["step"], i["cause"]["code"], i["origin"]["code"]) for i in done.incidents] == [(4, "WN402", "nll_loss = nll_loss.sum() / denominator")], done.err
    assert done.err.count("logging_nan_inf_filter=True logs the mean of the other steps in its place") == 1
    assert "finite True" in done.out


@pytest.mark.parametrize(("policy", "logged"), [("skip", 0), ("observe", 4)])
def test_the_log_goes_on_after_a_skipped_batch_and_stays_nan_after_one_that_is_not(box: Sandbox, policy: str, logged: int) -> None:
    done = box.watched(program(logging_nan_inf_filter=False), "--policy", policy)
    assert [i["cause"]["code"] for i in done.incidents] == ["WN402"], done.err
    assert done.err.count("its log says nan from here on") == 1
    assert done.out.count("'loss': 'nan'") + done.out.count("'loss': nan") == logged  # step 4 and the three healthy ones after it
    assert "finite True" in done.out


def test_a_bad_micro_batch_is_found_in_its_accumulation_window(box: Sandbox) -> None:
    source = program(label_smoothing_factor=0.1, gradient_accumulation_steps=2, bf16=True)
    done = box.watched(source.replace("index < 20", "index < 24"))  # the Trainer counts the labels of the whole window
    assert [(i["step"], i["cause"]["code"], i["origin"]["exact"]) for i in done.incidents] == [(2, "WN402", True)], done.err


def test_the_callback_watches_by_itself_and_leaves_torch_alone(box: Sandbox) -> None:
    path = box.write(program(OWN, label_smoothing_factor=0.1))
    done = box.python(str(path), env=dict(os.environ))
    assert "found [(4, 'WN402')]" in done.out, done.err
    assert "finite True" in done.out
    assert "nll_loss = nll_loss.sum() / denominator" in done.err


def test_the_callback_of_the_page_watches_by_itself(box: Sandbox, shown: Shown) -> None:
    """The lines of the page in place of the ones that make the trainer."""
    (block,) = shown("docs/integrations.md")
    before, made, after = textwrap.dedent(program(label_smoothing_factor=0.1)).partition("trainer = Trainer(")
    after = after.partition("\n")[2].replace("for c in callbacks", "for c in trainer.callback_handler.callbacks if hasattr(c, 'incidents')")
    done = box.python(str(box.write(f"{before}{block}{after}")), env=dict(os.environ))
    assert made and "found [(4, 'WN402')]" in done.out, done.err


def test_under_whynan_run_the_callback_joins_what_is_watched(box: Sandbox) -> None:
    done = box.watched(program(OWN, label_smoothing_factor=0.1))
    assert [i["step"] for i in done.incidents] == [4], done.err
    assert "found [(4, 'WN402')]" in done.out
    assert "watching begins anew" not in done.err


def test_an_option_that_does_not_exist_is_told_where_the_callback_is_made() -> None:
    from whynan.integrations.transformers import WhynanCallback

    with pytest.raises(UsageError, match="polizy"):
        WhynanCallback(polizy="skip")
