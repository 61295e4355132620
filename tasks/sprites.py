"""Moving discs, squares and triangles in front of a grey texture, drawn here, with exact masks."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

SHAPES = ("disc", "square", "triangle")
SPRITE_COUNTS = (2, 4)  # fewest and most in a clip
# Half a side, as a share of the image's: 6 to 10 pixels across at 24. Masks are found on a grid of half the
# resolution, on which smaller ones would be a cell or two.
HALF_SIDE = (1 / 8, 1 / 5)
MOST_SPEED = 1 / 12  # most, as a share of the image's side a frame, along each axis
TEXTURE = 0.1  # standard deviation of the background around its grey, of a range of 2


@dataclass
class Scene:
    """What is drawn, for N clips of up to S sprites; a later sprite lies in front of an earlier one.

    place, speed [N, S, 2]: centre (x, y) in pixels in the first frame, and pixels a frame; half [N, S]: half
    a side, in pixels; shape [N, S]: index of SHAPES; colour [N, S, 3] in [-1, 1]; there [N, S]: whether the
    clip has this sprite; ground [N, 3, H, W]: the background.
    """

    place: torch.Tensor
    speed: torch.Tensor
    half: torch.Tensor
    shape: torch.Tensor
    colour: torch.Tensor
    there: torch.Tensor
    ground: torch.Tensor

    @classmethod
    def drawn(cls, clips, side, generator):
        """A Scene of `clips` clips of side x side pixels, a function of the generator's state."""
        fewest, most = SPRITE_COUNTS

        def uniform(*shape, low=0.0, high=1.0):
            return low + (high - low) * torch.rand(clips, *shape, generator=generator)

        half = uniform(most, low=side * HALF_SIDE[0], high=side * HALF_SIDE[1])
        room = side - 2 * half  # what the centre may move in
        place = half[..., None] + uniform(most, 2) * room[..., None]
        speed = uniform(most, 2, low=-side * MOST_SPEED, high=side * MOST_SPEED)
        shape = (uniform(most) * len(SHAPES)).long()
        # Hues of one clip lie evenly around the circle, so that its sprites differ.
        hue = (uniform(1) + (torch.arange(most) + uniform(most, low=-0.25, high=0.25)) / most) % 1
        colour = _colour(hue, uniform(most, low=0.7, high=1.0)) * 2 - 1
        count = fewest + (uniform() * (most - fewest + 1)).long()
        there = torch.arange(most) < count[:, None]
        return cls(place, speed, half, shape, colour, there, _texture(clips, side, generator))

    def at(self, t):
        """Centres [N, S, 2] in frame t. A sprite turns round where it touches a border."""
        low = self.half[..., None]
        room = self.ground.shape[-1] - 2 * low
        travelled = (self.place - low + self.speed * t) % (2 * room)  # there and back again
        return low + torch.minimum(travelled, 2 * room - travelled)

    def frames(self, count):
        """(clips fp32 [N, count, 3, H, W], masks int64 [N, count, H, W])."""
        images, masks = [], []
        for t in range(count):
            image, mask = self._frame(t)
            images.append(image)
            masks.append(mask)
        return torch.stack(images, 1), torch.stack(masks, 1)

    def _frame(self, t):
        """(images [N, 3, H, W], masks [N, H, W]) of frame t."""
        image = self.ground.clone()
        side = image.shape[-1]
        mask = torch.zeros(len(image), side, side, dtype=torch.int64)
        pixels = torch.arange(side) + 0.5  # their centres, along either axis
        centres = self.at(t)
        for s in range(self.half.shape[1]):  # from the back to the front
            dx = pixels[None, None, :] - centres[:, s, 0, None, None]  # [N, 1, W]
            dy = pixels[None, :, None] - centres[:, s, 1, None, None]  # [N, H, 1]
            inside = _covers(dx, dy, self.half[:, s, None, None], self.shape[:, s, None, None])
            inside = inside & self.there[:, s, None, None]
            mask = torch.where(inside, s + 1, mask)
            image = torch.where(inside[:, None], self.colour[:, s, :, None, None], image)
        return image, mask


def _covers(dx, dy, half, shape):
    """Whether a pixel's centre, dx to the right of and dy below a sprite's, lies in it. A triangle stands on
    its base and is as high as wide.
    """
    square = (dx.abs() <= half) & (dy.abs() <= half)
    disc = dx.square() + dy.square() <= half.square()
    triangle = square & (2 * dx.abs() <= dy + half)
    return torch.where(shape == 0, disc, torch.where(shape == 1, square, triangle))


def _colour(hue, value):
    """RGB [..., 3] in [0, 1] of full saturation less a little. hue, value [...] in [0, 1]."""
    angle = (hue[..., None] + torch.tensor([0, 2, 1]) / 3) % 1
    ramp = (6 * (angle - 0.5).abs() - 1).clamp(0, 1)
    return value[..., None] * (0.1 + 0.9 * ramp)


def _texture(n, side, generator):
    """Backgrounds [n, 3, side, side]: a grey, coarse blotches on it, and fine noise."""
    grey = torch.rand(n, 1, 1, 1, generator=generator) * 0.8 - 0.4
    coarse = torch.randn(n, 1, 4, 4, generator=generator)
    coarse = F.interpolate(coarse, (side, side), mode="bilinear", align_corners=True)
    fine = torch.randn(n, 1, side, side, generator=generator)
    return (grey + TEXTURE * (coarse + 0.3 * fine)).expand(-1, 3, -1, -1).clamp(-1, 1)
