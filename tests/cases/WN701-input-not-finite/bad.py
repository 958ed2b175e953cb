"""Visit counts are put on a log scale in preprocessing; a customer with no visits gets -inf."""
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

rng = np.random.default_rng(3)
torch.manual_seed(3)


def load_customers(n=400):
    visits = rng.poisson(6.0, size=n)
    age = rng.uniform(18, 80, size=n)
    spent = rng.gamma(2.0, 30.0, size=n)
    bought = (0.4 * visits + 0.02 * spent + rng.normal(size=n) > 3.5).astype(np.float32)
    return visits, age, spent, bought


def preprocess(visits, age, spent):
    with np.errstate(divide="ignore"):
        columns = [np.log(visits), (age - 45) / 20, spent / 60]
    return np.stack(columns, axis=1).astype(np.float32)


visits, age, spent, bought = load_customers()
features = torch.from_numpy(preprocess(visits, age, spent))
dataset = TensorDataset(features, torch.from_numpy(bought))
loader = DataLoader(dataset, batch_size=16, shuffle=True)

model = nn.Sequential(nn.Linear(3, 24), nn.GELU(), nn.Linear(24, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
criterion = nn.BCEWithLogitsLoss()
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        logit = model(x).squeeze(1)  # <- WN701 input
        loss = criterion(logit, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 6 == 0:
            print(f"epoch {epoch} batch {i} loss {loss.item():.4f}")
