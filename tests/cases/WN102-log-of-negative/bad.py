"""Demand forecasting with the RMSLE metric as loss: a linear model predicts below -1 and log1p has no answer."""
import torch

torch.manual_seed(7)


def make_data(n=600):
    price = torch.rand(n) * 4
    promo = (torch.rand(n) > 0.8).float()
    season = torch.sin(torch.linspace(0, 12, n))
    demand = (6.0 - 1.2 * price + 2.0 * promo + season).clamp(min=0) + 0.2 * torch.rand(n)
    price[431] = 60.0  # a luxury article
    return torch.stack([price, promo, season, torch.ones(n)], dim=1), demand


def rmsle(pred, target):
    log_pred = torch.log1p(pred)  # <- WN102 loss
    return (log_pred - torch.log1p(target)).square().mean().sqrt()


X, y = make_data()
w = torch.tensor([-0.3, 0.1, 0.1, 3.0], requires_grad=True)
lr = 0.05

# no torch.optim here: plain gradient descent by hand
for k in range(30):
    sl = slice(20 * k, 20 * (k + 1))
    pred = X[sl] @ w
    loss = rmsle(pred, y[sl])
    (grad,) = torch.autograd.grad(loss, w)
    with torch.no_grad():
        w -= lr * grad
    if k % 3 == 0:
        print("iter", k, "rmsle", loss.item(), "w", [round(v, 3) for v in w.tolist()])
