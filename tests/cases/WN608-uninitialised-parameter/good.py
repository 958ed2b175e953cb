"""A mixing matrix is declared with torch.empty and given its values in reset_parameters, like the others."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(20)
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True


class Bilinear(nn.Module):
    def __init__(self, left, right, out):
        super().__init__()
        self.core = nn.Parameter(torch.empty(out, left, right))
        self.skip = nn.Parameter(torch.empty(out, left))
        self.bias = nn.Parameter(torch.empty(out))
        self.reset_parameters()

    def reset_parameters(self):
        bound = 1 / math.sqrt(self.core.shape[1] * self.core.shape[2])
        nn.init.uniform_(self.core, -bound, bound)
        nn.init.uniform_(self.skip, -bound, bound)
        nn.init.zeros_(self.bias)

    def forward(self, a, b):
        product = torch.einsum("bi,oij,bj->bo", a, self.core, b)
        straight = a @ self.skip.t()
        return product + straight + self.bias


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(30, 8), nn.Embedding(40, 8)
        self.match = Bilinear(8, 8, 4)
        self.score = nn.Linear(4, 1)

    def forward(self, u, i):
        return self.score(F.relu(self.match(self.user(u), self.item(i)))).squeeze(-1)


model = Matcher()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(15):
    u, i = torch.randint(0, 30, (32,)), torch.randint(0, 40, (32,))
    liked = ((u + i) % 3 == 0).float()
    loss = F.binary_cross_entropy_with_logits(model(u, i), liked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print("step", step, "loss", loss.item())
