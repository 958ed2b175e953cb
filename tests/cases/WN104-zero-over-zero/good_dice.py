"""Segmentation with a smoothed Dice loss: an empty slice predicted empty scores 1."""
import torch
import torch.nn as nn

torch.manual_seed(8)


class HardTanhUNet(nn.Module):
    """very small encoder/decoder, output clipped to [0, 1]"""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False)
        self.up = nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1)
        nn.init.constant_(self.up.bias, 0.05)

    def forward(self, x):
        return self.up(torch.relu(self.down(x))).clamp(0, 1)


class DiceLoss(nn.Module):
    def forward(self, pred, mask):
        inter = (pred * mask).sum(dim=(1, 2, 3))
        total = pred.sum(dim=(1, 2, 3)) + mask.sum(dim=(1, 2, 3))
        dice = (2 * inter + 1) / (total + 1)
        return 1 - dice.mean()


def slice_batch(n, empty):
    img = 0.05 * torch.rand(n, 1, 16, 16)
    mask = torch.zeros(n, 1, 16, 16)
    for j in range(n):
        r, c = torch.randint(2, 10, (2,)).tolist()
        mask[j, 0, r:r + 4, c:c + 4] = 1
    img = img + mask
    if empty:  # a slice above the organ: nothing but black
        img[0], mask[0] = 0.0, 0.0
    return img, mask


model, criterion = HardTanhUNet(), DiceLoss()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
ACCUM = 2
for it in range(40):
    img, mask = slice_batch(6, empty=(it == 25))
    loss = criterion(model(img), mask) / ACCUM
    loss.backward()
    if (it + 1) % ACCUM == 0:
        opt.step()
        opt.zero_grad()
    if it % 5 == 0:
        print(f"iter {it} dice loss {loss.item() * ACCUM:.4f}")
final = torch.cat([p.detach().flatten() for p in model.parameters()])
print("final weight norm", final.norm().item())
