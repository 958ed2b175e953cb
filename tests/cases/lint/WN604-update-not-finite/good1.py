import torch


def main(net):
    model = net().bfloat16()
    return torch.optim.Adam(model.parameters(), lr=1e-3)
