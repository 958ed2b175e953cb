"""Image embeddings, computed once and cached; every image comes with its nearest neighbours."""

from pathlib import Path

import torch

SAMPLES, DIM, KINDS, NEIGHBOURS = 1536, 64, 12, 8


def images(seed: int, blank: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of KINDS kinds as vectors, and the kind of each; a blank image is the same grey everywhere."""
    g = torch.Generator().manual_seed(1234 + seed)
    centres = torch.randn(KINDS, DIM, generator=g)
    kinds = torch.randint(0, KINDS, (SAMPLES,), generator=g)
    pixels = centres[kinds] + 0.7 * torch.randn(SAMPLES, DIM, generator=g)
    if blank is not None:
        pixels[blank] = 0.5
    return pixels, kinds


def embed(pixels: torch.Tensor) -> torch.Tensor:
    """Stand in for a frozen backbone: standardise each image, then a fixed random layer."""
    standard = (pixels - pixels.mean(-1, keepdim=True)) / pixels.std(-1, keepdim=True)
    g = torch.Generator().manual_seed(7)
    return 4 * torch.tanh(standard @ torch.randn(DIM, DIM, generator=g) / 8)


def cached(folder: Path, seed: int, blank: int | None) -> dict[str, torch.Tensor]:
    """Return features, neighbours and kinds from the cache, which is filled on the first call."""
    path = folder / "features.pt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pixels, kinds = images(seed, blank)
        features = embed(pixels)
        unit = torch.nn.functional.normalize(pixels, dim=-1)
        near = (unit @ unit.T).fill_diagonal_(-2).topk(NEIGHBOURS, dim=-1).indices
        torch.save({"features": features, "neighbours": near, "kinds": kinds}, path)
    return torch.load(path, weights_only=True)


def batches(cache: dict[str, torch.Tensor], size: int, seed: int):
    """Yield pairs of an image and one of its neighbours, for ever."""
    g = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(SAMPLES, generator=g).split(size)[: SAMPLES // size]:
            choice = torch.randint(0, NEIGHBOURS, (size,), generator=g)
            yield cache["features"][rows], cache["features"][cache["neighbours"][rows, choice]]
