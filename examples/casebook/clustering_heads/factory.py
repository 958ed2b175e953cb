"""For `whynan probe clustering_heads/factory.py:factory`: one batch, the heads and the loss of train.py."""

from pathlib import Path
from tempfile import mkdtemp

import torch

from data import DIM, KINDS, batches, cached
from loss import ClusteringLoss
from model import Pair


def factory():
    torch.manual_seed(0)
    features, neighbours = next(batches(cached(Path(mkdtemp()), 0, None), 16, 0))
    model, criterion = Pair(2, DIM, KINDS), ClusteringLoss(2, KINDS, 0.6, (0.1, 0.04), old_fix=False)

    def loss(model, batch):
        both = torch.cat([batch["features"], batch["neighbours"]])
        return criterion(model.student(both), [t.detach() for t in model.teacher(both)])

    return model, loss, {"features": features, "neighbours": neighbours}
