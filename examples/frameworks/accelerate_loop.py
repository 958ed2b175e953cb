"""A loop with Accelerate: accumulation, clipping, a scheduler. `--fault` makes a row equal to its target: the slope of sqrt at 0.

whynan run accelerate_loop.py --fault
accelerate launch --cpu --num_processes 2 -m whynan run accelerate_loop.py --fault
"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader = DataLoader(TensorDataset(x), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for index, (batch,) in enumerate(loader):
        with accelerator.accumulate(model):
            prediction = model(batch)
            target = batch.flip(1)
            if "--fault" in sys.argv and index == 5:
                target[1] = prediction[1].detach()
            distance = (prediction - target).pow(2).sum(-1)
            loss = torch.sqrt(distance).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print(f"loss {loss.item()!r}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
