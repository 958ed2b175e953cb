"""A tiny GPT-2 with Transformers' Trainer. `--fault` plants a zero in the data: its logarithm in `compute_loss` is -inf.

whynan run trainer.py --fault
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

FAULT = "--fault" in sys.argv


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        ids = torch.randint(5, 90, (12,), generator=torch.Generator().manual_seed(index))
        quality = 0.0 if FAULT and index == 20 else 0.5 + 0.01 * index
        return {"input_ids": ids, "labels": ids, "quality": torch.tensor(quality)}


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        quality = inputs.pop("quality")
        outputs = model(**inputs)
        loss = outputs.loss - 0.1 * torch.log(quality).mean()
        return (loss, outputs) if return_outputs else loss


if __name__ == "__main__":
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        "trainer-output", num_train_epochs=1, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, remove_unused_columns=False, disable_tqdm=True,
    )
    trainer = WeightedTrainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Texts())
    print(f"loss {trainer.train().training_loss!r}")
