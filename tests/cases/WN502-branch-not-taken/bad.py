"""Click rates fitted with 0 log 0 := 0 by where: the branch that is thrown away still sends a NaN back."""
import torch
from torch import nn

torch.manual_seed(1)


def multinomial_divergence(counts, rates):
    """KL(rates || empirical), by hand; an item with rate 0 contributes nothing."""
    empirical = (counts + 0.5) / (counts + 0.5).sum(dim=1, keepdim=True)
    terms = torch.where(rates > 0, rates * torch.log(rates / empirical), 0.0)  # <- WN502 backward
    return terms.sum(dim=1).mean()


class SlateModel(nn.Module):
    """Scores a slate of items; scores below zero mean "never clicked"."""

    def __init__(self, items=7, width=20):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(5, width), nn.GELU(), nn.Linear(width, items))
        nn.init.constant_(self.score[2].bias, 1.0)

    def forward(self, user):
        s = self.score(user)
        s = s * (s > 0)
        return s / s.sum(dim=1, keepdim=True)


def clicks(user, taste):
    return torch.poisson(20 * torch.softmax(user @ taste, dim=1))


taste = torch.randn(5, 7)
model = SlateModel()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(40):
    user = torch.randn(32, 5)
    loss = multinomial_divergence(clicks(user, taste), model(user))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step:2d} divergence {loss.item():.4f}")
