"""Scenes of the demo's clips: one or two plain shapes that move, and their captions.

Positions and radii are fractions of the picture's side; x grows to the right, y downwards. A scene
depends only on (seed, index).
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass

import numpy as np

COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
SHAPES = ("circle", "square", "triangle", "star")
BACKGROUNDS = ("black", "gray", "brown")
SIZES = {"small": 0.15, "large": 0.21}  # radius of the circle
VERBS = {  # the first of each is the plain one
    "left": ("moves left", "moves to the left", "is moving left", "slides left"),
    "right": ("moves right", "moves to the right", "is moving right", "slides right"),
    "up": ("moves up", "rises", "is moving up", "slides up"),
    "down": ("moves down", "falls", "is moving down", "slides down"),
    "diagonal": ("moves diagonally", "is moving diagonally", "slides diagonally"),
    "grow": ("grows", "is growing", "gets bigger"),
    "rotate": ("rotates", "spins", "is rotating"),
    "bounce": ("bounces", "is bouncing", "jumps"),
}
MOTIONS = tuple(VERBS)

REACH = 1.3  # no shape is wider than this many radii
PAIR_SHARE = 0.25
_PAIR_MOTIONS = {"rows": ("left", "right", "grow", "rotate"), "columns": ("up", "down", "bounce")}
_HELD_OUT_SHARE = 0.1

Point = tuple[float, float]


@dataclass(frozen=True)
class Actor:
    """A shape with its motion from `start` to `end`."""

    shape: str
    colour: str
    size: str
    motion: str
    start: Point
    end: Point


@dataclass(frozen=True)
class Scene:
    background: str
    actors: tuple[Actor, ...]


def is_held_out(scene: Scene) -> bool:
    """Returns whether the scene's colours, shapes, motions and background are held out."""
    keywords = [scene.background]
    for actor in scene.actors:
        keywords += [actor.colour, actor.shape, actor.motion]
    return zlib.crc32(" ".join(keywords).encode()) % 1000 < 1000 * _HELD_OUT_SHARE


def make_random_scene(seed: int, index: int, *, held_out: bool = False) -> Scene:
    """Makes scene number `index` of the training scenes or of the held-out scenes."""
    random = np.random.default_rng([seed, index, held_out])
    for _ in itertools.count():
        scene = _draw_scene(random)
        if is_held_out(scene) == held_out:
            return scene
    raise AssertionError("unreachable")


def make_caption(scene: Scene, random: np.random.Generator | None = None) -> str:
    """Makes the plain caption of a scene, or with `random` a random wording."""
    phrases = [_make_phrase(actor, random) for actor in scene.actors]
    text = " and ".join(phrases)
    if random is None or random.random() > 0.1:
        text += f" on a {scene.background} background"
    return text


def _make_phrase(actor: Actor, random: np.random.Generator | None) -> str:
    verbs = VERBS[actor.motion]
    if random is None:
        return f"a {actor.size} {actor.colour} {actor.shape} {verbs[0]}"
    size = f"{actor.size} " if random.random() < 0.6 else ""
    verb = verbs[0] if random.random() < 0.5 else str(random.choice(verbs))
    return f"a {size}{actor.colour} {actor.shape} {verb}"


def _draw_scene(random: np.random.Generator) -> Scene:
    background = str(random.choice(BACKGROUNDS))
    if random.random() >= PAIR_SHARE:
        colour, size = str(random.choice(COLOURS)), str(random.choice(tuple(SIZES)))
        shape, motion = _draw_shape_and_motion(random, MOTIONS)
        room = 0.49 - SIZES[size] * REACH
        start, end = _draw_path(random, motion, (room, room))
        return Scene(background, (Actor(shape, colour, size, motion, start, end),))
    lanes = str(random.choice(tuple(_PAIR_MOTIONS)))
    colours = random.choice(COLOURS, 2, replace=False)
    actors = [_draw_lane_actor(random, lanes, n, str(c)) for n, c in enumerate(colours)]
    return Scene(background, tuple(actors))


def _draw_shape_and_motion(
    random: np.random.Generator, motions: tuple[str, ...]
) -> tuple[str, str]:
    """Draws a shape and a motion. Circles do not rotate, since that would be invisible."""
    motion = str(random.choice(motions))
    return str(random.choice(SHAPES[1:] if motion == "rotate" else SHAPES)), motion


def _draw_lane_actor(random: np.random.Generator, lanes: str, number: int, colour: str) -> Actor:
    """Draws one of a pair: the first in the upper (or left) half, the second in the other half."""
    shape, motion = _draw_shape_and_motion(random, _PAIR_MOTIONS[lanes])
    room = 0.49 - SIZES["small"] * REACH
    along, across = (room, 0.06), 0.25 if number else -0.25
    if lanes == "rows":
        shift, room_xy = (0.0, across), along
    else:
        shift, room_xy = (across, 0.0), along[::-1]
    start, end = (
        (x + shift[0], y + shift[1])
        for x, y in _draw_path(random, motion, (room_xy[0], room_xy[1]))
    )
    return Actor(shape, colour, "small", motion, start, end)


def _draw_path(random: np.random.Generator, motion: str, room: Point) -> tuple[Point, Point]:
    """Draws start and end within `room` of the centre; both are equal for motions on the spot."""
    x, y = (0.5 + r * random.uniform(-0.7, 0.7) for r in room)
    dx, dy = (r * random.uniform(0.75, 1.0) for r in room)
    ways = {
        "left": ((0.5 + dx, y), (0.5 - dx, y)),
        "right": ((0.5 - dx, y), (0.5 + dx, y)),
        "up": ((x, 0.5 + dy), (x, 0.5 - dy)),
        "down": ((x, 0.5 - dy), (x, 0.5 + dy)),
        "diagonal": ((0.5 - dx, 0.5 + dy), (0.5 + dx, 0.5 - dy)),
        "bounce": ((x, 0.5 - dy), (x, 0.5 + dy)),
    }
    return ways.get(motion, ((x, y), (x, y)))
