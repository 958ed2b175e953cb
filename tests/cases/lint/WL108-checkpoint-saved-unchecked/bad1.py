import torch


def train(model, data, opt):
    for x in data:
        model(x).mean().backward()
        opt.step()
    torch.save(model.state_dict(), "last.pt")  # expect: WL108
