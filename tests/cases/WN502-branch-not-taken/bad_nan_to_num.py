"""A Poisson rate model with log(0) repaired by nan_to_num: the loss looks healed, the gradient of log(0) is not."""
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(14)


def make_counts(n=300):
    exposure = torch.rand(n, 3) * 2
    rate = (exposure @ torch.tensor([1.5, 0.2, 0.7])).clamp(min=0.01)
    return TensorDataset(exposure, torch.poisson(rate))


class AdditiveRate(torch.nn.Module):
    """Rates add up: each exposure has a coefficient, an exposure of zero gives a rate of zero."""

    def __init__(self):
        super().__init__()
        self.coefficient = torch.nn.Parameter(torch.full((3,), 0.5))

    def forward(self, exposure):
        return exposure @ torch.nn.functional.softplus(self.coefficient)


def negative_log_likelihood(rate, count):
    log_rate = torch.nan_to_num(torch.log(rate), neginf=0.0)  # <- WN502 backward
    return (rate - count * log_rate).mean()


data = make_counts()
data.tensors[0][205] = 0.0  # a device that was never switched on
data.tensors[1][205] = 0.0
model = AdditiveRate()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.2)
step = 0
for epoch in range(2):
    for exposure, count in DataLoader(data, batch_size=20):
        loss = negative_log_likelihood(model(exposure), count)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            print(step, f"nll {loss.item():.4f}", model.coefficient.detach().numpy().round(3))
        step += 1
