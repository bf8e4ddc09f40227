"""Rendering of scenes to pixels, with smooth edges.

Legend: F frames, P pixels of one frame, V corners of a polygon.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.demo.scenes import SIZES, Actor, Scene

Floats = NDArray[np.floating[Any]]

RGB = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 90, 235),
    "yellow": (240, 215, 50),
    "purple": (170, 60, 200),
    "white": (245, 245, 245),
    "black": (10, 10, 10),
    "gray": (115, 115, 115),
    "brown": (95, 65, 40),
}
_TURN = math.radians(100)


def render_scene(scene: Scene, frames: int, side: int) -> NDArray[np.uint8]:
    """Renders a scene, [F, side, side, 3]."""
    pixel = (np.arange(side, dtype=np.float32) + 0.5) / side
    x_P, y_P = (axis.ravel() for axis in np.meshgrid(pixel, pixel))
    video = np.broadcast_to(_get_rgb(scene.background), (frames, side * side, 3))
    for actor in scene.actors:
        poses = np.array(
            [_compute_pose(actor, n / max(frames - 1, 1)) for n in range(frames)], np.float32
        )
        inside = np.clip(0.5 - side * _compute_distance(actor.shape, poses, x_P, y_P), 0, 1)[
            ..., None
        ]
        video = video * (1 - inside) + _get_rgb(actor.colour) * inside
    return np.rint(video).astype(np.uint8).reshape(frames, side, side, 3)


def _get_rgb(name: str) -> Floats:
    return np.array(RGB[name], np.float32)


def _compute_pose(actor: Actor, time: float) -> tuple[float, float, float, float]:
    """Computes x, y, radius and angle at `time`, which runs from 0 to 1 over the clip."""
    radius, angle, along = SIZES[actor.size], 0.0, time
    if actor.motion == "grow":
        radius *= 0.4 + 0.6 * time
    elif actor.motion == "rotate":
        angle = _TURN * time
    elif actor.motion == "bounce":
        along = 1 - abs(math.cos(math.pi * time))
    x, y = (a + (b - a) * along for a, b in zip(actor.start, actor.end, strict=True))
    return x, y, radius, angle


def _compute_distance(shape: str, poses_F4: Floats, x_P: Floats, y_P: Floats) -> Floats:
    """Computes the signed distance to the outline, [F, P], negative inside."""
    x, y, radius, angle = (poses_F4[:, i, None] for i in range(4))
    dx, dy = x_P - x, y_P - y
    if shape == "circle":
        distance: Floats = np.hypot(dx, dy) - radius
        return distance
    cos, sin = np.cos(angle), np.sin(angle)
    local = np.stack((dx * cos + dy * sin, dy * cos - dx * sin), axis=-1) / radius[..., None]
    return _compute_polygon_distance(_make_corners(shape), local) * radius


def _make_corners(shape: str) -> Floats:
    """Makes the corners for radius 1, [V, 2]: about the circle's area, one corner on top."""
    if shape == "square":
        return np.array([(-0.87, -0.87), (0.87, -0.87), (0.87, 0.87), (-0.87, 0.87)], np.float32)
    radii = (1.3, 1.3, 1.3) if shape == "triangle" else (1.3, 0.55) * 5
    turns = np.arange(len(radii)) * 2 * np.pi / len(radii)
    corners = np.stack((np.sin(turns), -np.cos(turns)), axis=-1) * np.array(radii)[:, None]
    return corners.astype(np.float32)


def _compute_polygon_distance(corners_V2: Floats, points: Floats) -> Floats:
    """Computes the signed distance of points [..., 2] to a closed polygon (even-odd rule)."""
    nearest = np.full(points.shape[:-1], np.inf, np.float32)
    inside = np.zeros(points.shape[:-1], bool)
    for a, b in zip(corners_V2, np.roll(corners_V2, -1, axis=0), strict=True):
        edge, to = b - a, points - a
        share = np.clip(to @ edge / (edge @ edge), 0, 1)[..., None]
        nearest = np.minimum(nearest, ((to - share * edge) ** 2).sum(-1))
        crosses = (a[1] > points[..., 1]) != (b[1] > points[..., 1])
        if a[1] != b[1]:
            slope = edge[0] / edge[1]
            inside ^= crosses & (to[..., 0] < to[..., 1] * slope)
    signed: Floats = np.where(inside, -1, 1).astype(np.float32) * np.sqrt(nearest)
    return signed
