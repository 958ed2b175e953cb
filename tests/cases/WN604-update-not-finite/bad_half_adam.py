"""A model trained purely in float16 with Adam's default eps: 1e-8 is 0 in float16 and so are small squared gradients."""
import torch
from torch import nn

EPOCHS = 4


def make_data():
    g = torch.Generator().manual_seed(100)
    x = torch.randn(256, 16, generator=g)
    y = x[:, :4].sum(1, keepdim=True).tanh() * 0.5
    return x.half(), y.half()


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 1)

    def forward(self, x):
        return self.b(torch.sigmoid(self.a(x)))


def train():
    x, y = make_data()
    model = Regressor().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x))
        for rows in order.split(32):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x[rows]).float(), y[rows].float())
            loss.backward()
            optimizer.step()  # <- WN604 optimizer
        print(f"epoch {epoch}: {loss.item():.5f}")


if __name__ == "__main__":
    torch.manual_seed(10)
    train()
