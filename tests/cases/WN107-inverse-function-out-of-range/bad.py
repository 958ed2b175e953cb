"""ArcFace-style margin loss: the cosine of a perfectly aligned embedding rounds to 1.0000001, outside of acos."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(41)
N_CLASS, DIM = 6, 64


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 48), nn.PReLU(), nn.Linear(48, DIM))

    def forward(self, x):
        return self.net(x)


class AngularMargin(nn.Module):
    def __init__(self, margin=0.2, scale=8.0):
        super().__init__()
        self.margin, self.scale = margin, scale
        # prototypes: running directions of the classes, refreshed from the data
        self.register_buffer("proto", F.normalize(torch.randn(N_CLASS, DIM), dim=1))

    def forward(self, emb, y):
        cos = F.normalize(emb, dim=1) @ self.proto.T
        theta = torch.acos(cos)  # <- WN107 forward
        hot = F.one_hot(y, N_CLASS)
        return self.scale * torch.cos(theta + self.margin * hot)

    @torch.no_grad()
    def refresh(self, emb, y):
        self.proto[y] = F.normalize(emb, dim=1)


anchors = torch.randn(N_CLASS, 20)
net, head = Backbone(), AngularMargin()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
for step in range(40):
    y = torch.randint(0, N_CLASS, (24,))
    x = anchors[y] + 0.5 * torch.randn(24, 20)
    if step % 10 == 9:
        # every tenth step: prototypes from the current batch, then trained on the same batch
        head.refresh(net(x), y)
    loss = F.cross_entropy(head(net(x), y), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 0:
        print(f"{step:3d} {loss.item():.4f}")
