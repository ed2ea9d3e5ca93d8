"""The base class of every configuration section, `key`, which declares what a key means, and shared conditions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from astuner.system.gpus import visible_gpus

if TYPE_CHECKING:
    from astuner.config.root import AstunerConfig

BackboneName = Literal["debug", "local", "trinity", "verl"]
ALL: tuple[BackboneName, ...] = ("debug", "local", "trinity", "verl")
TRAINING: tuple[BackboneName, ...] = ("local", "trinity", "verl")
RAY: tuple[BackboneName, ...] = ("trinity", "verl")
MIN_GPUS_OF_TRINITY = 2
"""Engines and trainer need at least one GPU each."""

ResumeRule = Literal["same", "path", "more", "any"]
"""How a key's value in a resumed run may differ from the value in the run that it continues.

`same`: not at all, because samples or updates depend on it; with another value, the run is another run.
`path`: it names a file or a folder, which may have been moved.
`more`: it may be larger.
`any`: it may have any value.
"""

INT_MAX = 2**31 - 1
"""The largest number that every library behind the keys accepts."""
PositiveInt = Annotated[int, Field(gt=0, le=INT_MAX)]
NonNegativeInt = Annotated[int, Field(ge=0, le=INT_MAX)]
Count = Annotated[int, Field(gt=0, le=100_000)]
"""A number of things that exist at the same time: episodes, requests, processes, GPUs."""
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Number = Annotated[float, Field(ge=-1e9, le=1e9)]
Seconds = Annotated[float, Field(gt=0, le=1e8)]
"""At most three years, which every timer accepts."""

T = TypeVar("T")


def _function_path(path: str) -> str:
    if "->" not in path:
        raise ValueError("a function, `package.module->function`")
    return path


FunctionPath = Annotated[str, AfterValidator(_function_path)]


class Section(BaseModel):
    """A frozen section. Unknown keys are errors; the docstring under a field is the key's documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    chosen_by: ClassVar[str] = ""
    """The key that chooses the section's variant. `key(variant=...)` names the variant that another key belongs to."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_kind_of_number(cls, value: object, info: ValidationInfo) -> object:
        """Reject true and false where a number is expected, and read 1e6 as a whole number.

        pydantic would read true and false as 1 and 0. It would reject a large number such as 1e30 without naming the
        bounds.
        """
        if isinstance(value, bool | float) and info.field_name is not None:
            kinds = plain_kinds(cls.model_fields[info.field_name].annotation)
            if isinstance(value, bool):
                if bool not in kinds and (int in kinds or float in kinds):
                    raise ValueError("expected a number")
            elif value.is_integer() and int in kinds and float not in kinds:
                return int(value)
        return value


def plain_kinds(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows: the branches of a union, without bounds."""
    branches = get_args(annotation) if get_origin(annotation) in (UnionType, Union) else (annotation,)
    return [get_args(branch)[0] if get_origin(branch) is Annotated else branch for branch in branches]


@dataclass(frozen=True, slots=True)
class TrainerKey:
    """A key in verl's or Trinity's configuration whose value comes from an astuner key.

    Attributes:
        name: dotted name; with a leading `+` if the trainer reads the key and its configuration does not list it.
        rule: name of the function in the backbone's `rules` module that computes the value; None copies the value.
        kind: `sets`: the trainer implements the key. `mirrors`: astuner implements it, and the trainer's key is set so
            that the trainer's configuration describes the run. `from_run`: the rule reads a fact about the run (such as
            the number of steps) that the key contributes to.
    """

    name: str
    rule: str | None
    kind: Literal["sets", "mirrors", "from_run"]

    @property
    def bare_name(self) -> str:
        """The name without the leading `+`."""
        return self.name.removeprefix("+")


TrainerUse = str | tuple[TrainerKey, ...]
"""The trainer keys that an astuner key determines, or, if there is none, how astuner implements the key."""


def sets(*names: str, rule: str | None = None) -> tuple[TrainerKey, ...]:
    """Declare keys that the trainer implements."""
    return tuple(TrainerKey(name, rule, "sets") for name in names)


def mirrors(*names: str, rule: str | None = None) -> tuple[TrainerKey, ...]:
    """Declare keys that astuner implements and that the trainer's configuration shows."""
    return tuple(TrainerKey(name, rule, "mirrors") for name in names)


def from_run(*names: str, rule: str) -> tuple[TrainerKey, ...]:
    """Declare keys that are computed from a fact of the run."""
    return tuple(TrainerKey(name, rule, "from_run") for name in names)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition under which keys have no effect.

    Attributes:
        text: the condition in words, to follow "no effect".
        holds: whether a configuration meets it.
        at_default: whether a key that the user set to its default is reported, too.
    """

    text: str
    holds: Callable[[AstunerConfig], bool]
    at_default: bool = False


def when(name: str, value: object, *, section: str = "", at_default: bool = False) -> Condition:
    """Return the condition that a key has a value.

    Args:
        name: the key, as the notice shows it.
        value: the value.
        section: the section around the key, which the notice does not show.
        at_default: see `Condition`.
    """
    get = attrgetter(f"{section}.{name}" if section else name)
    shown = json.dumps(value).strip('"')
    return Condition(f"while {name} is {shown}", lambda run: bool(get(run) == value), at_default)


@dataclass(frozen=True, slots=True)
class Variant:
    """Values of the key that chooses a section's variant (`Section.chosen_by`).

    Attributes:
        otherwise: the condition that the key has another value, in words, with {} for the key.
        includes: whether a value is one of them.
    """

    otherwise: str
    includes: Callable[[Any], bool]

    def unless(self, name: str) -> Condition:
        """Return the condition that the key `name` has another value."""
        get = attrgetter(name)
        return Condition(self.otherwise.format(name), lambda run: not self.includes(get(run)))


ANY_CLASS = Variant("unless {} is `package.module->Class`", lambda path: "->" in path)
"""The variants that are classes of the user."""
NOT_NULL = Variant("while {} is null", lambda value: value is not None)


def only(value: str) -> Variant:
    """Return the variant of one value."""
    return Variant(f"unless {{}} is {value}", lambda chosen: bool(chosen == value))


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Values that some backbones do not support.

    Attributes:
        values: the values; None for every value but the default.
        by: the backbones.
        why: the reason and the fix.
        is_error: whether the value is an error; otherwise, it is ignored with a notice.
    """

    values: tuple[object, ...] | None
    by: tuple[BackboneName, ...]
    why: str
    is_error: bool = True


def unsupported(*values: object, by: tuple[BackboneName, ...] = ALL, why: str) -> tuple[Unsupported, ...]:
    """Declare values that the backbones `by` do not support; without values, every value but the default."""
    return (Unsupported(values or None, by, why),)


def set_aside(*values: object, by: tuple[BackboneName, ...], why: str) -> tuple[Unsupported, ...]:
    """Declare values that only other backbones use, which the backbones `by` ignore with a notice."""
    return (Unsupported(values, by, why, is_error=False),)


@dataclass(frozen=True, slots=True)
class KeyRule:
    """The declaration of a key or section, in addition to its type, default and documentation.

    Attributes:
        used_by: backbones that use the key; None inherits from the section.
        verl: the corresponding key of verl's configuration; None inherits from the section.
        trinity: the corresponding key of Trinity's configuration; None inherits from the section.
        unsupported: values that backbones do not support, in addition to the section's.
        no_effect: conditions under which the key has no effect, in addition to the section's.
        despite: conditions of the section that do not apply to this key.
        wrong_for: name of an algorithm that has no use for the key, and the reason.
        resume: how the key may differ when a run resumes; None inherits from the section. Every key has or inherits
            one.
        variant: the values of the section's key `chosen_by` that use the key: each variant has to include the value.
    """

    used_by: tuple[BackboneName, ...] | None = None
    verl: TrainerUse | None = None
    trinity: TrainerUse | None = None
    unsupported: tuple[Unsupported, ...] = ()
    no_effect: tuple[Condition, ...] = ()
    despite: tuple[Condition, ...] = ()
    wrong_for: Mapping[str, str] = field(default_factory=dict)
    resume: ResumeRule | None = None
    variant: tuple[Variant, ...] = ()


def key(
    default: T,
    *,
    used_by: tuple[BackboneName, ...] | None = None,
    verl: TrainerUse | None = None,
    trinity: TrainerUse | None = None,
    trainers: str | None = None,
    unsupported: tuple[Unsupported, ...] = (),
    no_effect: tuple[Condition, ...] = (),
    despite: tuple[Condition, ...] = (),
    wrong_for: Mapping[str, str] | None = None,
    resume: ResumeRule | None = None,
    variant: str | Variant | tuple[Variant, ...] = (),
) -> T:
    """Declare a key, or all keys in a section that is another section's field.

    Args:
        default: its value if nobody sets it.
        trainers: the same text for `verl` and `trinity`.
        variant: as in `KeyRule`, or the only value of `chosen_by` that uses the key. See there for the other arguments.
    """
    variants = (only(variant),) if isinstance(variant, str) else (variant,) if isinstance(variant, Variant) else variant
    rule = KeyRule(
        used_by=used_by,
        verl=verl or trainers,
        trinity=trinity or trainers,
        unsupported=unsupported,
        no_effect=no_effect,
        despite=despite,
        wrong_for=wrong_for or {},
        resume=resume,
        variant=variants,
    )
    declared: Any = Field(default)
    declared.metadata.append(rule)
    return cast(T, declared)


def _on_tinker_server(run: AstunerConfig) -> bool:
    """Return whether a Tinker server of the run's own samples and trains, as `trinity.backbone.on_gpus` decides."""
    device = run.trainer_common.device
    has_gpus = device == "cuda" or (device == "auto" and visible_gpus() >= MIN_GPUS_OF_TRINITY)
    return run.backbone == "trinity" and (run.model.lora.rank > 0 or not has_gpus)


def _verl_on_cpu(run: AstunerConfig) -> bool:
    device = run.trainer_common.device
    return run.backbone == "verl" and (device == "cpu" or (device == "auto" and visible_gpus() == 0))


FOR_SFT = Condition("for sft", lambda run: run.is_supervised)
TINKER_SERVER = Condition(
    "where a Tinker server samples and trains, as for trinity with adapters or fewer than two GPUs",
    _on_tinker_server,
)
VERL_ON_CPU = Condition("for verl on a CPU, whose memory holds everything anyway", _verl_on_cpu)
WITH_FRAMEWORK = when("rollout.use_agentscope_protocol", True, at_default=True)
SAMPLED_ELSEWHERE = Condition(
    "while debug.base_url names a server that samples",
    lambda run: run.backbone == "debug" and bool(run.debug.base_url),
)
