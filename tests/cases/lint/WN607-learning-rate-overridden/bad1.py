import torch


def resume(model, state):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.load_state_dict(state["optimizer"])  # expect: WN607
    return optimizer
