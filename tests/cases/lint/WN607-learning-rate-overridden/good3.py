import torch


def restore(scaler, state):
    scaler.load_state_dict(state)
