"""A LightningModule and a LightningDataModule. `--fault` plants a row of zeros: a zero vector over its own norm is nan.

whynan run lightning_module.py --fault
"""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Points(pl.LightningDataModule):
    def setup(self, stage):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        y = x.sum(1, keepdim=True)
        if "--fault" in sys.argv:
            x[40] = 0
        self.data = TensorDataset(x, y)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=8)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=32)


class Direction(nn.Module):
    def forward(self, x):
        return x / x.norm(dim=1, keepdim=True)


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Direction(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, index):
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", (self.net(x) - y).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    pl.seed_everything(0)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Regression(), datamodule=Points())
    print(f"loss {trainer.callback_metrics['loss'].item()!r}")
