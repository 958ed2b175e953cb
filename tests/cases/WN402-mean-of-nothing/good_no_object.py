"""A one-stage detector that averages the box error over matched anchors: a batch without objects adds nothing."""
import torch
import torch.nn as nn

torch.manual_seed(21)


class DetectionLoss(nn.Module):
    def __init__(self, box_weight=2.0):
        super().__init__()
        self.objectness = nn.BCEWithLogitsLoss()
        self.box_weight = box_weight

    def forward(self, score, boxes, has_object, true_boxes):
        matched = has_object.bool()
        error = (boxes[matched] - true_boxes[matched]).abs()
        box_term = error.sum() / max(error.numel(), 1)
        return self.objectness(score, has_object) + self.box_weight * box_term


class GridDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        )
        self.score = nn.Conv2d(16, 1, 1)
        self.box = nn.Conv2d(16, 4, 1)

    def forward(self, image):
        f = self.backbone(image)
        return self.score(f).squeeze(1), self.box(f).permute(0, 2, 3, 1)


def scene(n_objects, size=16):
    image = 0.1 * torch.randn(1, size, size)
    grid, boxes = torch.zeros(size // 4, size // 4), torch.zeros(size // 4, size // 4, 4)
    for _ in range(n_objects):
        r, c = torch.randint(0, size // 4, (2,)).tolist()
        image[0, 4 * r : 4 * r + 3, 4 * c : 4 * c + 3] += 1.0
        grid[r, c] = 1.0
        boxes[r, c] = torch.tensor([0.0, 0.0, 0.75, 0.75]) + 0.02 * torch.randn(4)
    return image, grid, boxes


def collate(scenes):
    return [torch.stack(part) for part in zip(*scenes)]


objects_per_image = torch.poisson(torch.full((22, 2), 1.6))
detector, criterion = GridDetector(), DetectionLoss()
optimizer = torch.optim.SGD(detector.parameters(), lr=0.05, momentum=0.9)
for i, counts in enumerate(objects_per_image):
    image, grid, boxes = collate([scene(int(k)) for k in counts])
    score, predicted = detector(image)
    loss = criterion(score, predicted, grid, boxes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{i:02d} objects={int(grid.sum())} loss={loss.item():.3f}")
