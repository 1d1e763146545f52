"""The config of a recipe on the command line: words become flags, fields become text. Understanding the flags is tyro's
business.
"""

import dataclasses
import inspect
import re
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from stovetop.cli.loading import RecipeModule
from stovetop.rules import rule_of
from stovetop.tracking.configs import changeable_fields

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FIELD_ALIASES = {"model": "model_name", "epochs": "num_epochs", "reference_model": "reference_model_name"}


# ---- from words ------------------------------------------------------------------------------------------------------


def as_flags(words: Iterable[str], fields: Collection[str]) -> list[str]:
    """`field=value` becomes `--field=value`, and an alias its field. The value that follows a flag is left alone.

    >>> as_flags(["epochs=2", "--system-prompt", "a=b"], {"num_epochs", "system_prompt"})
    ['--num_epochs=2', '--system_prompt', 'a=b']
    """
    aliases = {alias: field for alias, field in FIELD_ALIASES.items() if field in fields and alias not in fields}
    flags: list[str] = []
    value_comes_next = False
    for word in words:
        if not value_comes_next and re.match(r"[A-Za-z][\w.-]*=", word):
            word = f"--{word}"
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags.append(f"--{aliases.get(name, name)}{equals}{value}")
            value_comes_next = not equals
        else:
            flags.append(word)
            value_comes_next = False
    return flags


def with_values_of_enums(flags: Iterable[str], config: "type[DataclassInstance]") -> list[str]:
    """A member of an enumeration may be given by its value, as it is printed, or by its name, in letters of any size:
    `--train_on_what=ALL_TOKENS` becomes `--train_on_what=all_tokens`."""
    values: dict[str, dict[str, str]] = {}
    for name, hint in get_type_hints(config).items():
        if isinstance(hint, type) and issubclass(hint, Enum):
            values[name] = {member.name.lower(): str(member.value) for member in hint}
            values[name] |= {str(member.value).lower(): str(member.value) for member in hint}
    given: list[str] = []
    field = ""  # whose value comes next
    for flag in flags:
        name, equals, value = flag.partition("=")
        if field:
            given.append(values.get(field, {}).get(flag.lower(), flag))
        elif equals:
            given.append(f"{name}={values.get(name[2:], {}).get(value.lower(), value)}")
        else:
            given.append(flag)
        field = name[2:] if not field and not equals and name.startswith("--") else ""
    return given


def config_of(
    recipe: RecipeModule, words: Sequence[str], prog: str, default: "DataclassInstance | None" = None
) -> "DataclassInstance":
    """The config that these words say; a field that they do not name has the value of `default`. `prog` is the command
    before them, for the help."""
    import tyro

    fields = {field.name for field in dataclasses.fields(recipe.Config)}
    flags = as_flags([word for word in words if word != "--dry-run"], fields)
    about = (inspect.getdoc(recipe) or "").partition("\n\n")[0]
    config = tyro.cli(
        recipe.Config,
        prog=prog,
        description=f"{about}\n\nfield=value is the same as --field value; --dry-run only checks.",
        args=with_entries(with_values_of_enums(flags, recipe.Config), recipe.Config),
        config=(tyro.conf.FlagConversionOff, tyro.conf.EnumChoicesFromValues),
        use_underscores=True,
        default=default,
    )
    assert config is not None
    return config


def with_entries(flags: Iterable[str], config: "type[DataclassInstance]") -> list[str]:
    """Entries of a field that is a dict may be given one by one: `--loss_fn_config.beta=1` becomes `--loss_fn_config
    beta 1`, with those of other words."""
    dicts = [name for name, hint in get_type_hints(config).items() if get_origin(hint) is dict]
    entries: dict[str, list[str]] = {}
    others: list[str] = []
    for flag in flags:
        entry = re.fullmatch(r"--(\w+)\.([^=]+)=(.*)", flag)
        if entry is not None and entry[1] in dicts:
            entries.setdefault(entry[1], []).extend((entry[2], entry[3]))
        else:
            others.append(flag)
    return others + [word for name, pairs in entries.items() for word in (f"--{name}", *pairs)]


# ---- to text ---------------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """One field of a recipe's config, as text."""

    name: str
    type: str
    default: str
    meaning: str
    accepts: str  # the end of the sentence "it must be ..."
    may_change: str  # when a run that goes on may have another value: "always", "while ...", ""


def config_fields(config: "type[DataclassInstance]") -> list[Field]:
    """The meaning of a field is the comment on its line; what it takes, the rule in its annotation."""
    comments: dict[str, str] = {}
    for kind in reversed([each for each in config.__mro__ if dataclasses.is_dataclass(each)]):
        comments |= dict(re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(kind), re.MULTILINE))
    hints = get_type_hints(config, include_extras=True)
    changeable = changeable_fields(config)
    return [
        Field(
            field.name,
            _type_text(hints[field.name]),
            _default_of(field),
            comments.get(field.name, ""),
            _accepted(hints[field.name]),
            str(changeable[field.name]) if field.name in changeable else "",
        )
        for field in dataclasses.fields(config)
    ]


def _default_of(field: dataclasses.Field[object]) -> str:
    return str(field.default if field.default_factory is dataclasses.MISSING else field.default_factory())


def _type_text(hint: Any) -> str:
    """A type without what is said of its values."""
    if get_origin(hint) is Annotated:
        return _type_text(get_args(hint)[0])
    if type(None) in get_args(hint):
        return " | ".join("None" if each is type(None) else _type_text(each) for each in get_args(hint))
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else inspect.formatannotation(hint)


def _accepted(hint: Any) -> str:
    """What a field takes, where its type does not say it all."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    if hint in (int, float, str, bool) or get_args(hint) in ((str, type(None)),):
        return ""
    return rule_of(hint).says
