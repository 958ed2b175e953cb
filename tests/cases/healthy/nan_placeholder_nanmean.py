"""Missing ratings are NaN placeholders: nanmean gives the starting biases and isnan selects what the loss may see."""
import hashlib

import torch

torch.manual_seed(21)
USERS, ITEMS, RANK = 30, 20, 3
truth = 3 + torch.randn(USERS, RANK) @ torch.randn(RANK, ITEMS)
ratings = torch.full((USERS, ITEMS), float("nan"))
seen = torch.rand(USERS, ITEMS) < 0.35
ratings[seen] = truth[seen]
assert torch.isnan(ratings).any()

overall = ratings.nanmean()
item_bias = (ratings.nanmean(0) - overall).nan_to_num(0.0).requires_grad_()
user_bias = (ratings.nanmean(1) - overall).nan_to_num(0.0).requires_grad_()
user = (0.3 * torch.randn(USERS, RANK)).requires_grad_()
item = (0.3 * torch.randn(ITEMS, RANK)).requires_grad_()
weights = [user, item, user_bias, item_bias]
optimizer = torch.optim.Adagrad(weights, lr=0.2)

error_by_epoch = torch.full((25,), torch.nan)
for epoch in range(25):
    optimizer.zero_grad()
    predicted = overall + user_bias[:, None] + item_bias[None, :] + user @ item.T
    known = ~torch.isnan(ratings)
    residual = predicted[known] - ratings[known]
    penalty = sum(w.square().mean() for w in weights)
    loss = residual.square().mean() + 0.01 * penalty
    loss.backward()
    optimizer.step()
    error_by_epoch[epoch] = residual.detach().abs().mean()
    if epoch % 6 == 0:
        print(f"epoch {epoch} loss {loss:.4f} mean error so far {error_by_epoch.nanmean():.4f}")

digest = hashlib.sha256(b"".join(w.detach().numpy().tobytes() for w in weights))
for w in weights:
    digest.update(optimizer.state[w]["sum"].numpy().tobytes())
print("digest", digest.hexdigest())
