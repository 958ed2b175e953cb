"""A DataLoader with two forked workers; samples are made with numpy and random inside the workers."""
import hashlib
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Blobs(Dataset):
    """Images with one or two blobs; a constant image is standardised to NaN in passing and then replaced."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        image = np.zeros((1, 12, 12), dtype=np.float32)
        count = index % 3
        for _ in range(count):
            r, c = rng.integers(0, 10, 2)
            image[0, r : r + 2, c : c + 2] = 1.0
        tensor = torch.from_numpy(image)
        tensor = (tensor - tensor.mean()) / tensor.std()
        return torch.nan_to_num(tensor, nan=0.0), count


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def main():
    torch.manual_seed(111)
    loader = DataLoader(
        Blobs(), batch_size=16, shuffle=True, num_workers=2, worker_init_fn=seed_worker,
        generator=torch.Generator().manual_seed(7), multiprocessing_context="fork",
    )
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(72, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        for image, count in loader:
            loss = nn.functional.cross_entropy(model(image), count)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("epoch", epoch, "loss", round(loss.item(), 4))
    sha = hashlib.sha256()
    for p in model.parameters():
        sha.update(p.detach().numpy().tobytes())
        for v in optimizer.state[p].values():
            sha.update(v.numpy().tobytes())
    print("digest", sha.hexdigest())


if __name__ == "__main__":
    main()
