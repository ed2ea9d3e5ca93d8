"""Maps a configuration to verl's or Trinity's and back, from the declared keys and `fixed_settings.yaml`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Literal

from astuner.config.keys import MISSING, KeyPath, dotted, get_at, parts, schema, value_at, with_value
from astuner.config.root import RunConfig
from astuner.config.section import TrainerKey, TrainerUse
from astuner.config.validation import Draft, Problem, origin_of
from astuner.config.yaml_file import SHIPPED_FOLDER, read_yaml

TrainerName = Literal["verl", "trinity"]


@dataclass(frozen=True, slots=True)
class FixedSetting:
    """A trainer key that astuner's integration requires to have a certain value.

    Attributes:
        value: the value.
        why: the reason.
    """

    value: object
    why: str


@dataclass(frozen=True, slots=True)
class SameThing:
    """Astuner keys that name the same thing as a trainer key.

    Attributes:
        keys: the keys of astuner.
        factor: an astuner key whose value, times the value of `keys`, is the trainer's value.
        quotient: an astuner key whose value, divided by the value of `keys`, is the trainer's value.
        values: trainer value to astuner value, where they differ.
    """

    keys: tuple[KeyPath, ...]
    factor: str = ""
    quotient: str = ""
    values: Mapping[str, object] = field(default_factory=dict)

    @property
    def other(self) -> str:
        """The other key of astuner in a product or quotient; empty for neither."""
        return self.factor or self.quotient


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """Trainer key values for a kind of machine; the user's section can change them.

    Attributes:
        when: the kind of machine, in words.
        values: trainer key to value.
        rules: trainer key to the name of the rule that computes its value.
    """

    when: str
    values: Mapping[str, object]
    rules: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TrainerMapping:
    """The mapping of one trainer.

    Attributes:
        trainer: the backbone's name, and the name of the user's section that is passed to the trainer.
        uses: the declared use of each astuner key or section, in schema order.
        facts: trainer key to rule, for values that no key of astuner determines.
        fixed: trainer key to its fixed value.
        reserved: trainer key or section that users cannot set, to the reason.
        machine: settings by kind of machine.
        same: trainer key to the keys of astuner that name the same thing, besides those whose value is copied to it;
            None for a copy that names something else.
    """

    trainer: TrainerName
    uses: Mapping[KeyPath, TrainerUse]
    facts: Mapping[str, str]
    fixed: Mapping[str, FixedSetting]
    reserved: Mapping[str, str]
    machine: Mapping[str, MachineSettings]
    same: Mapping[str, SameThing | None]

    @property
    def aliases(self) -> dict[str, SameThing]:
        """Trainer key, without `+`, to the keys of astuner that name the same thing."""
        copied = {
            key.bare_name: SameThing((path,))
            for path, keys in self.trainer_keys.items()
            for key in keys
            if key.rule is None
        }
        return {name: same for name, same in {**copied, **self.same}.items() if same is not None}

    @property
    def trainer_keys(self) -> dict[KeyPath, tuple[TrainerKey, ...]]:
        """Key of astuner to the trainer keys that it determines."""
        return {path: use for path, use in self.uses.items() if not isinstance(use, str)}

    def setters(self, name: str) -> list[KeyPath]:
        """Return the keys of astuner that determine a trainer key, given without `+`."""
        return [path for path, keys in self.trainer_keys.items() if any(key.bare_name == name for key in keys)]

    def rule(self, name: str) -> Callable[..., object]:
        """Return a function of the backbone's `rules` module, which this package must not import statically."""
        rule: Callable[..., object] = getattr(import_module(f"astuner.backbone.{self.trainer}.rules"), name)
        return rule

    def values(self, config: RunConfig, run_facts: object, machine: Iterable[str]) -> dict[str, Any]:
        """Return trainer key (a leading `+` included) to value.

        Args:
            config: the configuration.
            run_facts: second argument of the rules.
            machine: names of the groups in `machine` that apply; a later group overrides an earlier one.
        """
        copied: dict[str, Any] = {}
        rules: dict[str, str] = {}
        for path, keys in self.trainer_keys.items():
            for key in keys:
                if key.rule is None:
                    value = value_at(config, path)
                    copied[key.name] = list(value) if isinstance(value, tuple) else value
                else:
                    rules[key.name] = key.rule
        groups = [self.machine[name] for name in machine]
        rules |= self.facts
        values = copied | {name: self.rule(rule)(config.astuner, run_facts) for name, rule in rules.items()}
        values |= {name: deepcopy(fixed.value) for name, fixed in self.fixed.items()}
        for group in groups:
            values |= group.values
            values |= {name: self.rule(rule)(config.astuner, run_facts) for name, rule in group.rules.items()}
        return values


def _same_thing(entry: str | dict[str, Any]) -> SameThing:
    """Convert an entry of `aliases` in fixed_settings.yaml: key names, or a mapping that has them under `keys`."""
    options = {"keys": entry} if isinstance(entry, str) else dict(entry)
    names = options.pop("keys").split()
    return SameThing(tuple(parts(name) for name in names), **options)


@cache
def trainer_mapping(trainer: TrainerName) -> TrainerMapping:
    """Return the mapping of `verl` or `trinity`."""
    tree = read_yaml(SHIPPED_FOLDER / trainer / "fixed_settings.yaml").tree
    declared = {path: getattr(rule, trainer) for path, rule in schema().declarations.items()}
    return TrainerMapping(
        trainer=trainer,
        uses={path: use for path, use in declared.items() if use is not None},
        facts=tree["facts"],
        fixed={name: FixedSetting(**setting) for name, setting in tree["fixed"].items()},
        reserved=tree["reserved"],
        machine={
            name: MachineSettings(group["when"], group.get("values", {}), group.get("rules", {}))
            for name, group in tree["machine"].items()
        },
        same={name: entry and _same_thing(entry) for name, entry in tree["aliases"].items()},
    )


def with_trainer_aliases(draft: Draft, mapping: TrainerMapping) -> Draft:
    """Replace keys in a trainer's section by the astuner keys that name the same thing.

    The astuner key gets its alias's place, and each alias a notice; one that contradicts a key that is also set is a
    problem.
    """
    section = draft.tree.get(mapping.trainer)
    if not isinstance(section, Mapping):
        return draft
    rest, taken = _split_section(section, (mapping.trainer,), mapping.aliases)
    tree: Mapping[str, Any] = {**draft.tree, mapping.trainer: rest}
    origins = dict(draft.origins)
    notices, problems = list(draft.notices), list(draft.problems)
    # Products and quotients are processed last, because their other key may also have an alias.
    for written, name, value in sorted(taken, key=lambda item: bool(mapping.aliases[item[1]].other)):
        same = mapping.aliases[name]
        where = origin_of(origins, written)
        alias = dotted((mapping.trainer, *parts(name)))
        own = _own_value(tree, same, value)
        if own is MISSING:
            relation = f"{'a multiple' if same.factor else 'a divisor'} of {same.other} ({_present(tree, same)})"
            text = f"{alias} is {value!r}; expected {relation}; change it, or set {dotted(same.keys[0])} instead"
            problems.append(Problem(text, where, keys=same.keys))
            continue
        for key in same.keys:
            if key not in origins:
                tree = with_value(tree, key, own)
                origins[key] = where
                text = f"{alias} is read as {dotted(key)}; write {dotted(key)}"
                notices.append(str(Problem(text, origin_of(origins, written))))
            elif get_at(tree, key) != own:
                text = (
                    f"{alias} is {value!r}, and {dotted(key)}, which is the same thing, is {get_at(tree, key)!r} "
                    f"({origins[key]}); remove one of them"
                )
                problems.append(Problem(text, where, keys=(key,)))
    return Draft(tree, origins, tuple(notices), tuple(problems))


def _split_section(
    section: Mapping[str, Any], written: KeyPath, aliases: Mapping[str, SameThing]
) -> tuple[dict[str, Any], list[tuple[KeyPath, str, object]]]:
    """Return a section without its aliases, nested or dotted, and each alias: as written, its name, and its value.

    An alias that is null is the trainer's default and has no effect on the key.
    """
    rest: dict[str, Any] = {}
    taken: list[tuple[KeyPath, str, object]] = []
    for key, value in section.items():
        path = (*written, str(key))
        name = ".".join(part.removeprefix("+") for part in path[1:])
        if name in aliases:
            taken += [(path, name, value)] if value is not None else []
        elif isinstance(value, Mapping) and value:
            below, taken_below = _split_section(value, path, aliases)
            rest |= {key: below} if below else {}
            taken += taken_below
        else:
            rest[key] = value
    return rest, taken


def _own_value(tree: Mapping[str, Any], same: SameThing, value: object) -> object:
    """Return the value of astuner's key that means the same as a trainer's; MISSING if there is none."""
    if same.values:
        return same.values.get(value, value) if isinstance(value, str) else value
    if not same.other:
        return value
    other = _present(tree, same)
    if type(value) is not int or type(other) is not int or value < 1 or other < 1:
        return value  # reported as a value of astuner's key
    numerator, denominator = (value, other) if same.factor else (other, value)
    return MISSING if numerator % denominator else numerator // denominator


def _present(tree: Mapping[str, Any], same: SameThing) -> object:
    """Return the value of the other key in a product or quotient."""
    key = parts(same.other)
    value = get_at(tree, key, MISSING)
    return schema().keys[key].default if value is MISSING else value
