"""A ray tracer that learns a sphere: the missing rays get a harmless discriminant before the root."""
import torch


def camera(n):
    pixel = torch.stack(torch.meshgrid(torch.linspace(-0.7, 0.7, n), torch.linspace(-0.7, 0.7, n), indexing="ij"), dim=-1)
    ray = torch.cat([pixel.reshape(-1, 2), torch.ones(n * n, 1)], dim=1)
    return ray / ray.norm(dim=1, keepdim=True)


def depth_image(rays, centre, radius, far=6.0):
    along = rays @ centre
    disc = along.square() - centre.square().sum() + radius.square()
    hit = disc > 0
    safe = torch.where(hit, disc, 1.0)
    return torch.where(hit, along - torch.sqrt(safe), far)


class Scene(torch.nn.Module):
    def __init__(self, centre, radius):
        super().__init__()
        self.centre = torch.nn.Parameter(torch.tensor(centre))
        self.radius = torch.nn.Parameter(torch.tensor(radius))

    def forward(self, rays):
        return depth_image(rays, self.centre, self.radius)


if __name__ == "__main__":
    rays = camera(12)
    with torch.no_grad():
        photo = depth_image(rays, torch.tensor([0.1, -0.1, 4.0]), torch.tensor(2.4))
    scene = Scene([0.0, 0.0, 4.0], 4.6)  # the first guess fills the whole picture
    optimizer = torch.optim.SGD(scene.parameters(), lr=0.1)
    for step in range(40):
        difference = scene(rays) - photo
        loss = difference.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step:2d} loss {loss.item():.4f} radius {scene.radius.item():.3f}")
