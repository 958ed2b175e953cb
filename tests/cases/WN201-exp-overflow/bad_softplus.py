"""A pairwise ranking loss with softplus written by hand: log(1 + exp(gap)) overflows on one badly ranked pair."""
import torch

torch.manual_seed(83)
N_USERS, N_ITEMS, K = 30, 40, 6
user_vecs = torch.nn.Embedding(N_USERS, K)
item_vecs = torch.nn.Embedding(N_ITEMS, K)
popularity = torch.ones(N_ITEMS)
popularity[17] = 500.0  # one blockbuster, raw play count in thousands
weights = [*user_vecs.parameters(), *item_vecs.parameters()]
optimizer = torch.optim.SGD(weights, lr=0.05)


def score(u, i):
    return (user_vecs(u) * item_vecs(i)).sum(-1) + 0.2 * popularity[i]


def bpr(u, liked, other):
    gap = score(u, other) - score(u, liked)
    soft = torch.exp(gap) + 1  # <- WN201 loss
    return soft.log().mean()


for step in range(40):
    u = torch.randint(0, N_USERS, (16,))
    liked = (u + torch.randint(0, 3, (16,))) % 10
    # negatives: the long tail first, the whole catalogue later
    other = torch.randint(20, 40, (16,)) if step < 15 else torch.randint(10, 40, (16,))
    loss = bpr(u, liked, other)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print("step", step, "bpr", loss.item())
