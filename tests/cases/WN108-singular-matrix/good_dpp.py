"""A determinantal point process for diverse playlists: a little identity keeps the log-determinant finite."""
import torch
from torch import nn
import torch.nn.functional as F


class DiversityKernel(nn.Module):
    def __init__(self, n_songs, rank):
        super().__init__()
        self.features = nn.Embedding(n_songs, rank)
        self.quality = nn.Parameter(torch.zeros(n_songs))

    def log_unnormalised(self, songs):
        v = F.normalize(self.features(songs), dim=-1)
        q = self.quality[songs].exp()
        sub = (v * q[:, None]) @ (v * q[:, None]).T
        return torch.logdet(sub + 1e-3 * torch.eye(len(songs)))

    def log_partition(self):
        v = F.normalize(self.features.weight, dim=-1) * self.quality.exp()[:, None]
        gram = torch.eye(v.shape[1]) + v.T @ v
        return gram.logdet()


def playlists(n):
    for i in range(n):
        p = torch.randperm(50)[:3]
        if i == 22:
            p = p[[0, 1, 1]]  # on repeat
        yield p


torch.manual_seed(59)
dpp = DiversityKernel(50, 8)
opt = torch.optim.Adam(dpp.parameters(), lr=0.01)
running = 0.0
for i, songs in enumerate(playlists(40)):
    loss = dpp.log_partition() - dpp.log_unnormalised(songs)
    opt.zero_grad()
    loss.backward()
    opt.step()
    running = 0.9 * running + 0.1 * loss.item()
    if i % 5 == 0:
        print(f"playlist {i} loss {loss.item():.4f} running {running:.4f}")
