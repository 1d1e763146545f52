"""The config of a recipe on the command line: words become flags, flags a config, fields become text. What the flags of
a field say, and the help, is tyro's business; what is wrong with them is said here, all at once.
"""

import contextlib
import dataclasses
import difflib
import inspect
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from stovetop.checks import Problems, collecting
from stovetop.cli.field_names import NOT_HERE, FieldNames
from stovetop.cli.loading import RecipeModule, cookbook_names_of
from stovetop.errors import InvalidRequest
from stovetop.kitchen.run_config import ENGINE_FIELDS
from stovetop.rules import Unfit, rule_of
from stovetop.tracking.configs import changeable_fields

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OTHER_FLAGS = ("dry-run", "debug", "help")  # of a command that takes a config
_NO_FIELD = "a field is given as field=value or --field value: {!r}"
FIRST_FIELDS = ("dataset", "test_dataset", "test_size", "model_name", "log_path")  # of what is shown


# ---- from words ------------------------------------------------------------------------------------------------------


def as_flags(words: Iterable[str], aliases: Mapping[str, str]) -> list[str]:
    """`field=value` becomes `--field=value`, and an alias its field. The value that follows a flag is left alone.

    >>> as_flags(["epochs=2", "--system-prompt", "a=b"], {"epochs": "num_epochs"})
    ['--num_epochs=2', '--system_prompt', 'a=b']
    """
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
    recipe: RecipeModule,
    words: Sequence[str],
    prog: str,
    default: "DataclassInstance | None" = None,
    also: "Callable[[DataclassInstance], None]" = lambda config: None,
) -> "DataclassInstance":
    """The config that these words say; a field that they do not name has the value of `default`. `prog` is the command
    before them, for the help. `also` checks the config further.

    Everything that is wrong is one error. A field whose value is none does not hide what `also` finds in the others: it
    is given the config without that field."""
    names = FieldNames({field.name for field in dataclasses.fields(recipe.Config)}, cookbook_names_of(recipe))
    words = [word for word in words if word != "--dry-run"]
    flags = with_values_of_enums(as_flags(words, names.aliases), recipe.Config)
    if "-h" in flags or "--help" in flags:
        _show_help(recipe, prog, default)
    with collecting() as problem:
        with problem:
            names.check(flag[2:].partition("=")[0] for flag in as_flags(words, {}) if flag.startswith("--"))
        values = _values_of(_by_field(flags, names, prog, problem), recipe.Config, problem)
        config = _made(recipe.Config, values, default, problem)
        if config is None:  # what fits, so that more than one thing can be said
            config = _made(recipe.Config, _fitting(values, recipe.Config, default), default, Problems())
        if config is not None:
            with problem:
                also(config)
    assert config is not None, "else there was a problem"
    return config


def _show_help(recipe: RecipeModule, prog: str, default: "DataclassInstance | None") -> None:
    """Prints it and leaves the program."""
    import tyro

    about = (inspect.getdoc(recipe) or "").partition("\n\n")[0]
    hints = get_type_hints(recipe.Config, include_extras=True)
    shown = config_fields(recipe.Config)
    form: type[Any] = dataclasses.make_dataclass(
        "Config", [(each.name, Annotated[hints[each.name], tyro.conf.arg(help=each.meaning)]) for each in shown]
    )
    values = default or recipe.Config()
    tyro.cli(
        form,
        prog=prog,
        description=f"{about}\n\nfield=value is the same as --field value; --dry-run only checks.",
        args=["--help"],
        config=(tyro.conf.FlagConversionOff, tyro.conf.EnumChoicesFromValues),
        use_underscores=True,
        default=form(**{each.name: getattr(values, each.name) for each in shown}),
    )


def _by_field(flags: Iterable[str], names: FieldNames, prog: str, problem: Problems) -> dict[str, list[str]]:
    """The flags of each field, with the words that follow them. `--loss_fn_config.beta=1` is of loss_fn_config."""
    grouped: dict[str, list[str]] = {}
    of_this: list[str] | None = None
    for flag in flags:
        if not flag.startswith("--"):
            if of_this is None:
                with problem:
                    raise InvalidRequest(_NO_FIELD.format(flag))
            else:
                of_this.append(flag)
            continue
        name = re.split(r"[.=]", flag.removeprefix("--"), maxsplit=1)[0]
        of_this = []
        if name in names.fields:
            of_this = grouped.setdefault(name, [])
        else:
            with problem:
                raise InvalidRequest(_unknown_field(name, names, prog))
        of_this.append(flag)
    return grouped


def _unknown_field(name: str, names: FieldNames, prog: str) -> str:
    if name in NOT_HERE:
        return f"the cookbook's {name!r} is not here: {NOT_HERE[name]}"
    known = {each: each for each in (*names.fields, *names.aliases)}
    known |= {each.replace("-", "_"): f"--{each}" for each in OTHER_FLAGS}
    nearest = difflib.get_close_matches(name, known, n=1)
    suggestion = f"did you mean {known[nearest[0]]!r}? " if nearest else ""
    return f"unknown field {name!r}; {suggestion}`{prog} --help` lists them"


def _values_of(
    flags: Mapping[str, Sequence[str]], config: "type[DataclassInstance]", problem: Problems
) -> dict[str, object]:
    """The value that each field's flags say, of those that say one."""
    hints = get_type_hints(config, include_extras=True)
    values = _parsed({name: hints[name] for name in flags}, [each for own in flags.values() for each in own])
    if values is not None:
        return values
    those: dict[str, object] = {}
    for name, own in flags.items():
        parsed = _parsed({name: hints[name]}, own)
        if parsed is not None:
            those |= parsed
            continue
        last = max(index for index, word in enumerate(own) if word.startswith("--"))
        end = last + (1 if "=" in own[last] else 2)  # of the flag, with its value
        if own[end:] and (parsed := _parsed({name: hints[name]}, own[:end])) is not None:
            those |= parsed
            with problem:
                raise InvalidRequest(_NO_FIELD.format(own[end]))
            continue
        with problem:
            text = " ".join(own).removeprefix(f"--{name}").removeprefix("=").strip()
            raise InvalidRequest(f"{name} must be {_accepted(hints[name]) or rule_of(hints[name]).says}: {text!r}")
    return those


def _parsed(hints: Mapping[str, Any], flags: Sequence[str]) -> dict[str, object] | None:
    """The values of these fields; None where the flags make no sense."""
    import tyro

    form: type[Any] = dataclasses.make_dataclass("Fields", list(hints.items()))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # where it says of some errors what is said here
            parsed: Any = tyro.cli(
                form,
                args=with_entries(flags, form),
                config=(tyro.conf.FlagConversionOff, tyro.conf.EnumChoicesFromValues),
                use_underscores=True,
                console_outputs=False,
                add_help=False,
            )
    except SystemExit:
        return None
    return {name: getattr(parsed, name) for name in hints}


def _made(
    config: "type[DataclassInstance]",
    values: Mapping[str, object],
    default: "DataclassInstance | None",
    problem: Problems,
) -> "DataclassInstance | None":
    """The config with these values; None where it is refused."""
    with problem:
        missing = [name for name in _without_default(config) if name not in values]
        if missing and default is None:
            raise InvalidRequest(f"a value is needed for {', '.join(missing)}: {missing[0]}=...")
        try:
            return config(**values) if default is None else dataclasses.replace(default, **_for_service(values, config))
        except InvalidRequest:
            raise
        except ValueError as error:  # of a config of the user's own
            raise InvalidRequest(str(error)) from error
    return None


def _for_service(values: Mapping[str, object], config: "type[DataclassInstance]") -> dict[str, object]:
    """What a preset says of an engine in this process is not meant for another service, where `base_url` names one."""
    if values.get("base_url") in (None, "local"):
        return dict(values)
    own = {field.name for field in dataclasses.fields(config)} & set(ENGINE_FIELDS)
    return dict.fromkeys(own, None) | dict(values)


def _fitting(
    values: Mapping[str, object], config: "type[DataclassInstance]", default: "DataclassInstance | None"
) -> dict[str, object]:
    """Those that keep to the rules of their annotations; and where the config refuses these too (it has checks of its
    own, of a name that no table has, say), those that it takes one after another."""
    hints = get_type_hints(config, include_extras=True)
    fitting: dict[str, object] = {}
    for name, value in values.items():
        with contextlib.suppress(Unfit):
            fitting[name] = rule_of(hints[name]).taken(value)
    if _made(config, fitting, default, Problems()) is not None:
        return fitting
    needed = _without_default(config) if default is None else []
    taken = {name: fitting[name] for name in needed if name in fitting}
    for name, value in fitting.items():
        if _made(config, taken | {name: value}, default, Problems()) is not None:
            taken[name] = value
    return taken


def _without_default(config: "type[DataclassInstance]") -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(config)
        if field.default is field.default_factory is dataclasses.MISSING
    ]


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
    """In the order of `fields_in_order`. The meaning of a field is the comment on its line, or on that of a base class;
    what it takes, the rule in its annotation."""
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
        for field in fields_in_order(config)
    ]


def fields_in_order(config: "type[DataclassInstance]") -> list[dataclasses.Field[object]]:
    """What it learns from, what learns, and where; then as the class itself lists them; then those of each base class:
    what is a recipe's own comes before what all recipes have."""
    listed = [name for kind in config.__mro__ for name in vars(kind).get("__annotations__", {})]
    names = dict.fromkeys((*FIRST_FIELDS, *listed))
    fields = {field.name: field for field in dataclasses.fields(config)}
    return [fields[name] for name in names if name in fields]


def _default_of(field: dataclasses.Field[object]) -> str:
    return str(field.default if field.default_factory is dataclasses.MISSING else field.default_factory())


def _type_text(hint: Any) -> str:
    """A type without what is said of its values."""
    if get_origin(hint) is Annotated:
        return _type_text(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return " | ".join("None" if each is type(None) else _type_text(each) for each in get_args(hint))
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else inspect.formatannotation(hint)


def _accepted(hint: Any) -> str:
    """What a field takes, where its type does not say it all."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    if hint in (int, float, str, bool) or get_args(hint) in ((str, type(None)),):
        return ""
    return rule_of(hint).says
