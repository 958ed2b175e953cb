"""A mixture of experts with an entropy bonus on its gates: top-k sets gates to 0, where x log x has no finite slope."""
import torch
from torch import nn


class TopKRouter(nn.Module):
    def __init__(self, width, experts, k):
        super().__init__()
        self.score = nn.Linear(width, experts)
        self.k = k

    def forward(self, x):
        weight = torch.softmax(self.score(x), dim=-1)
        kth = weight.topk(self.k, dim=-1).values[:, -1:]
        weight = weight * (weight >= kth)
        return weight / weight.sum(dim=-1, keepdim=True)


class MoE(nn.Module):
    def __init__(self, width=8, experts=4, k=4):
        super().__init__()
        self.router = TopKRouter(width, experts, k)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(width, 16), nn.SiLU(), nn.Linear(16, 1)) for _ in range(experts)])

    def forward(self, x):
        gate = self.router(x)
        answers = torch.cat([expert(x) for expert in self.experts], dim=1)
        entropy = -torch.xlogy(gate, gate).sum(dim=1)  # <- WN501 backward
        return (gate * answers).sum(dim=1), entropy.mean()


def sparsify(model, epoch):
    """Curriculum: start dense, end with two experts per token."""
    model.router.k = 4 if epoch < 3 else 2


torch.manual_seed(60)
x = torch.randn(192, 8)
y = torch.where(x[:, 0] > 0, x[:, 1] * 2, x[:, 2].sin())
model = MoE()
optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
for epoch in range(6):
    sparsify(model, epoch)
    for rows in torch.randperm(192).split(48):
        prediction, entropy = model(x[rows])
        loss = nn.functional.mse_loss(prediction, y[rows]) - 0.01 * entropy
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(f"epoch {epoch} loss {loss.item():.4f} gate entropy {entropy.item():.3f}")
