"""Where the settings of `rollout` come from: flag > environment (`MANAGED_CLI_*`) > `--config FILE` > default.

A setting has the name of its option: `--max-tokens` is `MANAGED_CLI_MAX_TOKENS`, and `max-tokens` or `max_tokens` in a
file. A file is checked as a whole; a variable only where no flag takes its place. What asks for one look (`--dry-run`,
`--json`, …) belongs on the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from managed_cli.cli.console import printable, say
from managed_cli.errors import ConfigError

PREFIX = "MANAGED_CLI_"
"""Every variable begins with it."""

CONFIG_VARIABLE = f"{PREFIX}CONFIG"
"""Names the file where `--config` does not."""

TABLE = "rollout"
"""The table that may hold all settings of a file."""

COMMAND_LINE_ONLY = frozenset({"config", "print-config", "dry-run", "json", "help"})
"""Options that are no settings of a run; of them, only `MANAGED_CLI_CONFIG` is read from the environment."""

INPUTS = "inputs"
"""The setting that INPUT... are; in files only, since a name may hold any character that would separate two."""

NEAR_MISS = 0.75
"""How alike (0 to 1) a variable and a known one are for a warning: a slip or two; what merely begins alike is not."""

_SECRET_NAMES = frozenset(
    {"apikey", "key", "token", "secret", "password", "authorization", "bearer", "openaiapikey", "hftoken"}
)
"""Names of settings, without `-` and `_`, under which people would write a key."""

_EXAMPLES = {"a string": '["a", "b"]', "an integer": "[1, 2]"}
"""What a JSON list in a variable looks like."""

_WHERE_KEYS_BELONG = 'name the place that holds the key: api-key-env = "VARIABLE" or api-key-file = "FILE"'

_PRECEDENCE = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)
"""Flag, environment, file, as click calls them."""

_META = "managed_cli.rollout_settings"
"""Under this key, click's context keeps what was found for one command line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it was found: `MANAGED_CLI_MAX_TOKENS`, or the name of a file."""

    value: Any  # Any: what click's parameter takes
    place: str
    source: ParameterSource


class Elsewhere:
    """What the environment and the file say, and in `places` where each parameter's value came from in the end."""

    def __init__(self, ctx: click.Context, config: object) -> None:
        self._settings = {setting_name(parameter): parameter for parameter in settings_of(ctx.command)}
        by_flag = isinstance(config, str)
        path = config if isinstance(config, str) else os.environ.get(CONFIG_VARIABLE) or None
        named_by = "--config" if by_flag else CONFIG_VARIABLE
        self._file = {} if path is None else _settings_in_file(path, named_by, self._settings, ctx)
        self.places: dict[str, str] = {}
        _warn_of_near_misses(self._settings)

    @classmethod
    def of(cls, ctx: click.Context, given: Mapping[str, Any]) -> Elsewhere:  # Any: click's raw values
        """What was found for this command line, of which `given` are the flags; looked for once.

        Raises:
            ConfigError: the file cannot be read, or says something that cannot be meant.
        """
        if _META not in ctx.meta:
            ctx.meta[_META] = cls(ctx, given.get("config"))
        found: Elsewhere = ctx.meta[_META]
        return found

    def find_setting(self, parameter: click.Parameter, ctx: click.Context) -> Setting | None:
        """What the environment, else the file says, noted as the parameter's value; None where neither does.

        Raises:
            ConfigError: the variable's value cannot be meant.
        """
        name = setting_name(parameter)
        if name not in self._settings:
            return None
        setting = None if name == INPUTS else _setting_in_environment(parameter, ctx)
        if setting is None:
            setting = self._file.get(name)
        if setting is not None and parameter.name is not None:
            self.places[parameter.name] = setting.place
        return setting


def settings_of(command: click.Command) -> list[click.Parameter]:
    """The parameters that are settings of a run, in the order of the command line's help."""
    return [parameter for parameter in command.params if setting_name(parameter) not in COMMAND_LINE_ONLY]


def setting_name(parameter: click.Parameter) -> str:
    """The long name of an option without its dashes (`n` for `-n`); for INPUT..., `inputs`."""
    if isinstance(parameter, click.Argument):
        return INPUTS
    return max(parameter.opts, key=len).lstrip("-")


def flag_name(parameter: click.Parameter) -> str:
    """The option as it is written on a command line."""
    return "INPUT" if isinstance(parameter, click.Argument) else max(parameter.opts, key=len)


def variable_name(parameter: click.Parameter) -> str:
    """The environment variable of an option."""
    return PREFIX + setting_name(parameter).replace("-", "_").upper()


def with_places(error: ConfigError, ctx: click.Context) -> ConfigError:
    """`error`, with the place of every setting that its message names and that was not given as a flag."""
    elsewhere = Elsewhere.of(ctx, {})
    told = [
        f"{flag_name(parameter)} is set by {elsewhere.places[parameter.name]}"
        for parameter in settings_of(ctx.command)
        if parameter.name in elsewhere.places and _is_named(parameter, error.message)
    ]
    return type(error)(error.message, details=[*error.details, *told], hint=error.hint)


def _is_named(parameter: click.Parameter, message: str) -> bool:
    name = setting_name(parameter)
    spellings = {name, name.replace("-", "_"), name.replace("-", " ")}
    return any(re.search(rf"(?<![\w-]){re.escape(each)}s?(?![\w-])", message) for each in (*parameter.opts, *spellings))


def settle_key_place(options: dict[str, Any], ctx: click.Context) -> None:  # Any: values that click has converted
    """Keep the place of the key that has precedence: two of one rank are left for the run to refuse."""
    names = ("api_key_env", "api_key_file")
    if any(options[name] is None for name in names):
        return
    ranks = [_PRECEDENCE.index(ctx.get_parameter_source(name) or ParameterSource.COMMANDLINE) for name in names]
    if ranks[0] != ranks[1]:
        options[names[ranks.index(max(ranks))]] = None


def _setting_in_environment(parameter: click.Parameter, ctx: click.Context) -> Setting | None:
    """The value of the option's variable; None where it is not set, or empty, as an unset one often arrives."""
    variable = variable_name(parameter)
    text = os.environ.get(variable)
    if not text:
        return None
    value: object = text.strip() if _is_flag(parameter) else text
    if _takes_several(parameter):
        value = _json_list(text)
        if value is None:
            value = text.split() if setting_name(parameter) == "base-url" else [text]
        elif not _is_of_type(value, parameter):
            raise ConfigError(
                f"{variable}: expected a JSON list as in {_EXAMPLES[_one(parameter)]}, or one value as it is"
            )
    return Setting(_converted(value, parameter, ctx, variable), variable, ParameterSource.ENVIRONMENT)


def _json_list(text: str) -> object | None:
    """The list that `text` is in JSON, or is meant to be; None for any other text, such as the stop string `[INST]`."""
    if not text.lstrip().startswith("["):
        return None
    try:
        return json.loads(text)  # type: ignore[no-any-return] # checked by the caller
    except (ValueError, RecursionError):
        return text if re.match(r'\s*\[\s*"', text) else None


def _settings_in_file(
    path: str, named_by: str, known: Mapping[str, click.Parameter], ctx: click.Context
) -> dict[str, Setting]:
    """Every setting of a file, checked.

    Raises:
        ConfigError: it cannot be read, is no TOML, or has an unknown key or a value that cannot be meant.
    """
    shown = _on_one_line(path)
    settings: dict[str, Setting] = {}
    for key, value in _keys_in_file(path, named_by).items():
        name = key.replace("_", "-")
        place = f"`{_on_one_line(key)}` in {shown}"
        if name not in known:
            raise _unknown(name, place, known)
        if name in settings:
            raise ConfigError(f"{place} is there twice, as `{name}` and as `{name.replace('-', '_')}`")
        parameter = known[name]
        given = [value] if _takes_several(parameter) and not isinstance(value, list) else value
        if not _is_of_type(given, parameter):
            raise ConfigError(f"{place}: expected {_expected(parameter)}, came {_described(value)}")
        settings[name] = Setting(_converted(given, parameter, ctx, place), shown, ParameterSource.DEFAULT_MAP)
    return settings


def _keys_in_file(path: str, named_by: str) -> dict[str, Any]:  # Any: TOML values
    """The settings of a file as TOML has them: all at its top, or all in the table."""
    shown = _on_one_line(path)
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a ValueError: the name holds a NUL
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{named_by} {shown}: {reason}", hint="--print-config > FILE writes one") from error
    try:
        text = content.decode("utf-8-sig")
        document = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{shown} is not valid TOML: line {line} is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        end = f"at line {text.rstrip().count(chr(10)) + 1}, the end of the file"
        raise ConfigError(f"{shown} is not valid TOML: {error}".replace("at end of document", end)) from error
    table = document.get(TABLE)
    if not isinstance(table, dict):
        return document
    outside = next((key for key in document if key != TABLE), None)
    if outside is not None:
        raise ConfigError(
            f"`{_on_one_line(outside)}` in {shown} stands outside of the table [{TABLE}], expected all settings inside"
        )
    return table


def _unknown(name: str, place: str, known: Iterable[str]) -> ConfigError:
    if re.sub(r"[-_]", "", name.lower()) in _SECRET_NAMES:
        return ConfigError(f"{place}: a key does not belong in a settings file", hint=_WHERE_KEYS_BELONG)
    if name in COMMAND_LINE_ONLY:
        return ConfigError(f"{place} is no setting of a run: --{name} belongs on the command line")
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    hint = f"did you mean `{near[0]}`?" if near else "`managed-cli rollout --print-config` lists every setting"
    return ConfigError(f"{place} is no setting", hint=hint)


def _is_flag(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and parameter.is_flag


def _takes_several(parameter: click.Parameter) -> bool:
    return parameter.multiple or parameter.nargs == -1


def _is_of_type(value: object, parameter: click.Parameter) -> bool:
    if _takes_several(parameter):
        return isinstance(value, list) and all(_is_one(each, parameter) for each in value)
    return isinstance(value, bool) if _is_flag(parameter) else _is_one(value, parameter)


def _is_one(value: object, parameter: click.Parameter) -> bool:
    """Whether a TOML or JSON value is what this type of click's takes; never a text for a number."""
    kind = _one(parameter)
    if kind == "a number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "an integer":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str)


def _expected(parameter: click.Parameter) -> str:
    one = "true or false" if _is_flag(parameter) else _one(parameter)
    return f"{one} or a list of them" if _takes_several(parameter) else one


def _one(parameter: click.Parameter) -> str:
    if isinstance(parameter.type, click.types.FloatParamType):
        return "a number"
    return "an integer" if isinstance(parameter.type, click.types.IntParamType) else "a string"


def _described(value: object) -> str:
    """A value of the wrong type, in words; never a text in full, which may be a key in the wrong place."""
    kinds = {bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list"}
    return kinds.get(type(value), "a table" if isinstance(value, dict) else "a date or a time")


def _converted(value: object, parameter: click.Parameter, ctx: click.Context, place: str) -> Any:  # Any: as click's
    """The value as click would have it from the command line."""
    try:
        return parameter.type_cast_value(ctx, value)
    except click.BadParameter as error:
        raise ConfigError(f"{place}: {error.message.rstrip('.')}") from error


def _warn_of_near_misses(known: Mapping[str, click.Parameter]) -> None:
    """One line on stderr for each variable that is almost a known one: its value is not used, and data would differ."""
    variables = [variable_name(known[name]) for name in known if name != INPUTS] + [CONFIG_VARIABLE]
    for name in sorted(os.environ):
        if not name.upper().startswith(PREFIX) or name in variables:
            continue
        option = name.upper().removeprefix(PREFIX).lower().replace("_", "-")
        near = _nearest(name.upper(), variables)
        if option in COMMAND_LINE_ONLY - {"config"}:
            say(f"warning: the environment variable {name} is not used; --{option} belongs on the command line")
        elif near is not None:
            say(f"warning: the environment variable {printable(name)} is not used; did you mean {near}?")


def _nearest(name: str, variables: Sequence[str]) -> str | None:
    if name == f"{PREFIX}API_KEY":
        return f"{PREFIX}API_KEY_ENV"
    endings = [variable.removeprefix(PREFIX) for variable in variables]
    near = difflib.get_close_matches(name.removeprefix(PREFIX), endings, n=1, cutoff=NEAR_MISS)
    return PREFIX + near[0] if near else None


def toml_text(ctx: click.Context, options: Mapping[str, Any]) -> str:  # Any: values that click has converted
    """Every setting as a line of TOML that `--config` takes; what is not set stands there as a comment."""
    elsewhere = Elsewhere.of(ctx, {})
    lines = []
    for parameter in settings_of(ctx.command):
        assert parameter.name is not None, "click names every parameter that has an option"
        value = options[parameter.name]
        is_flag = ctx.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
        place = flag_name(parameter) if is_flag else elsewhere.places.get(parameter.name, "default")
        written = f"{setting_name(parameter)} = "
        if value is None or value == ():
            rest = "default: drawn for each run" if parameter.name == "seed" else "default: not set"
            lines.append(f"# {written}{_placeholder(parameter)}  # {rest}")
        else:
            lines.append(f"{written}{toml_value(value)}  # {place}")
    return "\n".join(lines)


def _placeholder(parameter: click.Parameter) -> str:
    metavar = "FILE" if isinstance(parameter, click.Argument) else parameter.metavar or "VALUE"
    one = toml_string(metavar) if _one(parameter) == "a string" else metavar
    return f"[{one}]" if _takes_several(parameter) else one


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
"""The short ones of TOML that people know."""


def toml_value(value: object) -> str:
    """A flag, number, text, or several, as TOML.

    Raises:
        ConfigError: a text with bytes that are no characters, which TOML cannot hold.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(each) for each in value)}]"
    return toml_string(value) if isinstance(value, str) else repr(value)  # repr: the shortest that reads back the same


def toml_string(text: str) -> str:
    """`text` as a basic string of TOML; what is not printable is escaped, the escape of a terminal included."""
    return f'"{"".join(_toml_character(character) for character in text)}"'


def _toml_character(character: str) -> str:
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise ConfigError("a setting holds bytes that are not UTF-8, which TOML cannot hold")
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _on_one_line(text: str) -> str:
    """A name as it is shown, in messages and in comments of TOML."""
    return " ".join(printable(text).split())
