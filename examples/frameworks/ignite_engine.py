"""An Ignite Engine. `--fault` gives a batch of identical rows: its variance is 0, and a value over it is inf.

whynan run ignite_engine.py --fault
"""

import sys

import torch
from ignite.engine import Engine, Events

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
batches = [torch.randn(8, 4) for _ in range(12)]
if "--fault" in sys.argv:
    batches[7][:] = batches[7][0].clone()


def update(engine, batch):
    model.train()
    optimizer.zero_grad()
    error = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    loss = error / batch.var(0).sum()
    loss.backward()
    optimizer.step()
    return loss.item()


trainer = Engine(update)


@trainer.on(Events.EPOCH_COMPLETED)
def tell(engine):
    print(f"loss {engine.state.output!r}")


trainer.run(batches, max_epochs=1)
