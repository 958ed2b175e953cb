import torch


def resume(model, state, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer.load_state_dict(state["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] = lr
    return optimizer
