"""A depth-map autoencoder that stretches every frame to [0, 1]: a frame with the lens cap on has no range."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class DepthFrames(Dataset):
    """Ramps and discs; frame 70 was recorded with the lens cap on (every pixel reads the maximum, 8 m)."""

    def __init__(self, n=96, side=12):
        g = torch.Generator().manual_seed(31)
        yy, xx = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        tilt = torch.rand(n, 2, 1, 1, generator=g)
        self.frames = 1.0 + 0.3 * (tilt[:, 0] * yy + tilt[:, 1] * xx)
        disc = ((yy - side / 2) ** 2 + (xx - side / 2) ** 2) < 9
        self.frames = self.frames - 0.8 * disc
        self.frames[70] = 8.0

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, i):
        return self.frames[i].unsqueeze(0)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 6, 4, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 1, 4, stride=2, padding=1)

    def stretch(self, x):
        lo, hi = x.amin(dim=(1, 2, 3), keepdim=True), x.amax(dim=(1, 2, 3), keepdim=True)
        return (x - lo) / (hi - lo)  # <- WN404 forward

    def forward(self, depth):
        x = self.stretch(depth)
        return self.up(torch.relu(self.down(x))), x


torch.manual_seed(30)
net = Autoencoder()
adam = torch.optim.Adam(net.parameters(), lr=1e-2)
for epoch in range(2):
    for i, depth in enumerate(DataLoader(DepthFrames(), batch_size=8)):
        rebuilt, wanted = net(depth)
        loss = nn.functional.l1_loss(rebuilt, wanted)
        adam.zero_grad()
        loss.backward()
        adam.step()
        if i % 4 == 0:
            print(epoch, i, loss.item())
