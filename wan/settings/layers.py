"""Layers of settings, and how they are merged: which one wins, and which settings it replaces.

Each source of settings is a layer: the command line, a line of a prompt file, a request, keywords,
a record, variables, a recipe, a checkpoint, the signature of `generate`. A front end reads its
layers and merges them, the highest first (`docs/cli.md` lists them); this module has all rules.
A setting that no layer sets has the default of the task's preset, or of the option.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from wan.settings import rules
from wan.settings.errors import FlagNaming, InputError, name_settings
from wan.settings.flags import (
    FLAGS,
    NEEDS_RULES,
    is_python_setting,
    make_keyword_error,
)
from wan.settings.recipes import RECIPE_SETTINGS, RECIPES
from wan.settings.removed import refuse_removed
from wan.settings.solvers import SOLVERS
from wan.settings.step_cache import list_unused_parameters
from wan.settings.values import Reader, switch


@dataclass(frozen=True)
class Layer:
    """The settings of one source, read and checked by themselves; `read_layer` reads them.

    Attributes:
        source: Name of the source: "the command line", "line 3", "record.json".
        naming: How errors write a setting of this layer.
        values: Setting -> value; also `boundary` and `max_area`, which are no flags.
        kind: "user": settings that a user has given. "record": all settings of an earlier video,
            those of its recipe included. "default": of a recipe, a checkpoint or a signature.
    """

    source: str
    naming: FlagNaming
    values: Mapping[str, Any]
    kind: Literal["user", "record", "default"] = "user"

    def select(self, names: Iterable[str]) -> Layer:
        """Returns the layer with only these settings."""
        return replace(self, values={name: self.values[name] for name in names if name in self})

    def drop(self, names: Iterable[str]) -> Layer:
        """Returns the layer without these settings."""
        dropped = {*names}
        return self.select([name for name in self.values if name not in dropped])

    def with_values(self, values: Mapping[str, Any]) -> Layer:
        """Returns the layer with further, or other, checked values."""
        return replace(self, values={**self.values, **values})

    def __contains__(self, name: object) -> bool:
        return name in self.values


@dataclass(frozen=True, eq=False)
class Settings(Mapping[str, Any]):
    """Merged layers: a mapping of settings that knows which layer each comes from.

    Attributes:
        origins: Setting -> the layer that sets it.
        unset_naming: How errors write a setting that no layer sets.
    """

    origins: Mapping[str, Layer]
    unset_naming: FlagNaming

    def __getitem__(self, name: str) -> Any:
        return self.origins[name].values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.origins)

    def __len__(self) -> int:
        return len(self.origins)

    @property
    def naming(self) -> FlagNaming:
        """Names of settings in errors, each as the layer that set it writes it.

        A remedy names those of records and defaults as the user would set them.
        """

        def write_setting(name: str, value: str | None) -> str:
            layer = self.origins.get(name)
            return (self.unset_naming if layer is None else layer.naming).render_setting(
                name, value
            )

        def write_remedy(name: str, value: str | None) -> str:
            is_users = name in self.origins and self.origins[name].kind == "user"
            naming = self.origins[name].naming if is_users else self.unset_naming
            return naming.render_setting(name, value)

        return FlagNaming(write_setting, remedies=FlagNaming(write_remedy))

    def list_sources(self) -> dict[str, str]:
        """Returns the source of each setting that a layer sets."""
        return {name: layer.source for name, layer in self.origins.items()}

    def add_below(self, lower: Layer) -> Settings:
        """Merges a layer below these settings.

        Settings that these ones supersede are dropped: `sample_steps` supersedes the timesteps of a
        record, a recipe or a shared command line. Settings that need a dropped one, or one that is
        off now, go with it: with `use_prompt_extend=false`, a record's `prompt_extend_model`.

        Raises:
            InputError: A setting has no effect with one of the lower layer.
        """
        superseded = {*_list_superseded(self, lower)}
        origins = dict.fromkeys((n for n in lower.values if n not in superseded), lower)
        merged = replace(self, origins={**origins, **self.origins})
        useless = [
            name
            for name in origins.keys() - self.keys()
            if (needs := FLAGS[name].needs if name in FLAGS else None) is not None
            and (lower.kind == "record" or lower.values.get(needs))
            and not merged.get(needs)
        ]
        merged = merged.drop(useless)
        if lower.kind == "record":
            merged = merged.drop({*list_unused_parameters(merged)} - self.keys())
        if "sample_solver" not in self and "sample_shift" in self:
            with name_settings(merged.naming):
                rules.check_rules((rules.SHIFT_OF_RCM_RULE,), merged, None)
        return merged

    def add_above(self, layer: Layer) -> Settings:
        """Returns the settings with those of a layer, which supersede no others."""
        return replace(self, origins={**self.origins, **dict.fromkeys(layer.values, layer)})

    def drop(self, names: Iterable[str]) -> Settings:
        """Returns the settings without these."""
        dropped = {*names}
        return replace(self, origins={n: o for n, o in self.origins.items() if n not in dropped})


def read_layer(
    raw: Mapping[str, Any],
    source: str,
    naming: FlagNaming,
    kind: Literal["user", "record", "default"] = "user",
    readers: Mapping[str, Reader] | None = None,
) -> Layer:
    """Reads and checks the settings of one source.

    Args:
        raw: Flag -> value as text or JSON.
        source, naming, kind: As for `Layer`.
        readers: Setting -> its reader where this is not that of the flag.

    Raises:
        InputError: A name is unknown, a value is missing or not allowed, or two settings exclude
            each other.
    """
    readers = {name: flag.reader for name, flag in FLAGS.items()} | dict(readers or {})
    values: dict[str, Any] = {}
    with name_settings(naming):
        for name, value in raw.items():
            subject = f"`{name}`"
            if value is None:
                raise InputError(subject, why="has no value", remedy="give one or leave it out")
            refuse_removed(name)
            if name not in readers:
                unknown = naming.render_setting(name)
                raise InputError(unknown, why="is not a known setting", remedy="remove it")
            values[name] = readers[name](subject, value)
        if kind == "user":
            rules.check_rules(rules.USER_SETTING_RULES, values, None)
    return Layer(source, naming, values, kind)


def read_constructor(keywords: Mapping[str, Any], naming: FlagNaming) -> Layer:
    """Reads the keywords of a constructor. None, or False for no switch, counts as not given."""
    for name in keywords:
        if not is_python_setting(name, "load"):
            raise make_keyword_error(name, "load")
    raw = {
        name: value
        for name, value in keywords.items()
        if value is not None and (value is not False or FLAGS[name].reader is switch)
    }
    return read_layer(raw, "the constructor", naming)


def merge(*layers: Layer) -> Settings:
    """Merges layers, the highest first.

    Raises:
        InputError: Settings of two layers do not fit together, or one lacks a setting it needs.
    """
    settings = Settings({}, layers[0].naming)
    for layer in layers:
        settings = settings.add_below(layer)
    with name_settings(settings.naming):
        rules.check_rules(NEEDS_RULES, settings, None)
    return settings


def _list_exclusive_settings() -> Iterator[tuple[str, str]]:
    """Lists the pairs of settings of which one layer may set only one."""
    for rule in rules.USER_SETTING_RULES:
        if all(condition in FLAGS for condition in rule.conditions):
            name, other = rule.conditions
            yield from ((name, other), (other, name))


_SUPERSEDED_SETTINGS = [
    *_list_exclusive_settings(),
    ("sample_solver", "timesteps"),
    ("sample_steps", "boundary_step"),
    ("timesteps", "boundary_step"),
    ("timesteps", "sigma_max"),
    ("sigma_max", "timesteps"),
    ("clip_prompts", "num_clip"),
    ("dit", "dit_high_noise"),
    ("dit", "dit_low_noise"),
    ("dit_high_noise", "dit"),
    ("dit_low_noise", "dit"),
]
"""(a setting, the one of lower layers that it replaces where it differs from theirs)."""
_LATENTS_SUPERSEDED = [("src_video", "fixed_latents"), ("fixed_latents", "src_video")]
"""As `_SUPERSEDED_SETTINGS`, where both give the latents that denoising starts from."""
_NEED_TWO_BRANCHES = {"guider", "slg_blocks"}
_SUPERSEDED_BY_VALUE: dict[str, Iterable[str]] = {
    **{f"sample_solver={name}": ("ode", "sigma_max") for name in SOLVERS if name != "rcm"},
    "sample_solver=rcm": ("sigmas",),
    "step_cache": ("use_attentioncache",),
    "use_attentioncache": ("step_cache",),
}
"""Condition of a rule -> the settings of lower layers that have no effect where it holds."""


def _list_superseded(settings: Mapping[str, Any], layer: Layer) -> Iterator[str]:
    """Lists the names of the settings of a lower layer that higher settings supersede."""
    higher, lower = dict(settings), layer.values
    recipe = RECIPES.get(higher.get("recipe", ""))
    if layer.kind != "default":
        if recipe is not None:  # counts as the settings it selects
            selected = {n: recipe.values[n] for n in RECIPE_SETTINGS if n in recipe.values}
            selected = {"sample_guide_scale": (1.0, 1.0), **selected}
            yield from selected
            higher = {**selected, **higher}
        if higher.get("sample_solver") == "rcm":
            yield "sample_shift"
    if "recipe" in higher and layer.kind == "record":
        yield from RECIPE_SETTINGS
    task = higher.get("task", lower.get("task", "t2v-A14B"))
    latents = _LATENTS_SUPERSEDED if task in FLAGS["strength"].tasks else []
    for name, other in (*_SUPERSEDED_SETTINGS, *latents):
        is_on = name in higher and higher[name] is not False
        if is_on and (name not in lower or lower[name] != higher[name]):
            yield other
    for condition, names in _SUPERSEDED_BY_VALUE.items():
        if rules.is_condition_met(condition, higher):
            yield from names
    if {*higher.get("sample_guide_scale", ())} == {1.0}:  # only one guidance branch is computed
        yield from _NEED_TWO_BRANCHES
