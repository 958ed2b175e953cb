import json
import torch


def load(path):
    return json.load(path)
