"""Detects the shapes in a clip by plain image processing, independently of the renderer.

Colours are classified by hue, shapes by the harmonics of their outline, motions by centre and area.
Legend: F frames, H W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.floating]

_HUES = {0: "red", 50: "yellow", 125: "green", 225: "blue", 290: "purple", 360: "red"}
_SMALLEST = 12  # pixels; smaller areas are noise
_TURNS = 120  # directions in which an outline is measured


@dataclass(frozen=True)
class DetectedShape:
    """A detected shape; its motion is "none" if it cannot be classified."""

    colour: str
    shape: str
    motion: str


def detect_shapes(video: NDArray[np.uint8]) -> list[DetectedShape]:
    """Detects the shapes in a clip [F,H,W,3], largest first."""
    pixels = video.astype(np.float32)
    masks = find_foreground(pixels)
    names = _name_colours(pixels)
    detections = []
    for colour in sorted(set(names[masks])):
        part_masks = np.stack([find_largest_part(m) for m in masks & (names == colour)])
        areas = part_masks.sum((1, 2))
        if np.median(areas) >= _SMALLEST:
            detections.append((float(areas.mean()), _describe_shape(colour, part_masks)))
    # A rim that blends into the background may have another hue: it is no shape.
    detections.sort(key=lambda pair: -pair[0])
    return [shape for area, shape in detections if area > 0.2 * detections[0][0]]


def find_foreground(pixels: Floats) -> Bools:
    """Finds the pixels [F,H,W] that differ from the background, the median colour of the border."""
    masks = []
    for frame in pixels:
        border = np.concatenate((frame[0], frame[-1], frame[:, 0], frame[:, -1]))
        distance = np.linalg.norm(frame - np.median(border, axis=0), axis=-1)
        masks.append(distance > 60)
    return np.stack(masks)


def _name_colours(pixels: Floats) -> NDArray[np.str_]:
    """Names every pixel's colour by its hue, or white for low saturation."""
    high, low = pixels.max(-1), pixels.min(-1)
    spread = np.maximum(high - low, 1e-3)
    r, g, b = (pixels[..., i] for i in range(3))
    hue = np.select(
        [high == r, high == g],
        [((g - b) / spread) % 6, (b - r) / spread + 2],
        (r - g) / spread + 4,
    )
    angles = np.array(tuple(_HUES))
    nearest = np.abs(hue[..., None] * 60 - angles).argmin(-1)
    names = np.array(tuple(_HUES.values()))[nearest]
    named: NDArray[np.str_] = np.where(spread < 0.3 * high, "white", names)
    return named


def find_largest_part(mask: Bools) -> Bools:
    """Finds the largest 4-connected part of a mask [H,W]."""
    label = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:  # the highest number of each part spreads over it
        spread = label.copy()
        for axis, step in ((0, 1), (0, -1), (1, 1), (1, -1)):
            shifted = np.roll(label, step, axis)
            edge = 0 if step == 1 else -1
            shifted[(slice(None), edge) if axis else (edge, slice(None))] = 0
            spread = np.maximum(spread, shifted)
        spread[~mask] = 0
        if np.array_equal(spread, label):
            break
        label = spread
    if not mask.any():
        return mask
    values, counts = np.unique(label[mask], return_counts=True)
    largest: Bools = label == values[counts.argmax()]
    return largest


def _describe_shape(colour: str, masks: Bools) -> DetectedShape:
    return DetectedShape(colour, _classify_shape(masks), _classify_motion(masks))


def _compute_centre(mask: Bools) -> tuple[float, float]:
    """Computes the mean x and y of a mask's pixels, as fractions of the picture."""
    y, x = np.nonzero(mask)
    return float(x.mean() + 0.5) / mask.shape[1], float(y.mean() + 0.5) / mask.shape[0]


def measure_outline(mask: Bools) -> Floats:
    """Measures distances from the centre to the outline in _TURNS directions, scaled to mean 1."""
    height, width = mask.shape
    x, y = _compute_centre(mask)
    angles = np.arange(_TURNS) * 2 * np.pi / _TURNS
    steps = np.arange(0, max(mask.shape), 0.25)
    columns = np.rint(x * width - 0.5 + np.cos(angles)[:, None] * steps).astype(int)
    rows = np.rint(y * height - 0.5 + np.sin(angles)[:, None] * steps).astype(int)
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    hit = inside & mask[rows.clip(0, height - 1), columns.clip(0, width - 1)]
    radii = hit.sum(1) * 0.25
    return radii / max(float(radii.mean()), 1e-6)


def _classify_shape(masks: Bools) -> str:
    """Classifies a shape by its outline's strongest harmonic, over the frames where it is large."""
    areas = masks.sum((1, 2))
    large = masks[areas >= max(_SMALLEST, 0.7 * areas.max())]
    spectra = [np.abs(np.fft.rfft(measure_outline(mask))) * 2 / _TURNS for mask in large]
    three, four, five = np.median(spectra, axis=0)[3:6]
    if max(three, four, five) < 0.05:
        return "circle"
    return {three: "triangle", four: "square", five: "star"}[max(three, four, five)]


def _classify_motion(masks: Bools) -> str:
    areas = masks.sum((1, 2))
    visible = masks[areas >= _SMALLEST]
    x, y = np.array([_compute_centre(mask) for mask in visible]).T
    first, last = areas[: max(1, len(areas) // 6)].mean(), areas[-max(1, len(areas) // 6) :].mean()
    dx, dy = x[-1] - x[0], y[-1] - y[0]
    if last > 1.8 * first:
        return "grow"
    if max(abs(dx), abs(dy)) > 0.12:
        if min(abs(dx), abs(dy)) > 0.4 * max(abs(dx), abs(dy)):
            return "diagonal"
        if abs(dx) > abs(dy):
            return "right" if dx > 0 else "left"
        return "down" if dy > 0 else "up"
    if y.max() - max(y[0], y[-1]) > 0.1:
        return "bounce"
    return "rotate" if _measure_turning(visible) > 0.12 else "none"


def _measure_turning(masks: Bools) -> float:
    """Measures how much the outline changes between frames, independently of its size."""
    outlines = np.stack([measure_outline(mask) for mask in masks])
    return float(np.abs(outlines - outlines.mean(0)).max(0).mean())
