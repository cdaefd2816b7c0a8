"""The options of `rollout` as one `RolloutConfig`."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from managed_cli.backends._http import normalised_base_url
from managed_cli.backends.secrecy import checked_key
from managed_cli.cli.console import printable, say
from managed_cli.errors import ConfigError
from managed_cli.managed.config import APIServerConfig
from managed_cli.managed.sampling import checked_sampling
from managed_cli.rollout.config import RolloutConfig
from managed_cli.rollout.input_options import InputOptions, InputPart

LONGEST_KEY_BYTES = 16_384
"""No key is longer; a file that is (a model, given by mistake) is not read to its end."""

_ORDINARY_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
"""What variables are called; anything else may be the key itself, given in the wrong place, and is not shown."""


def rollout_config(options: Mapping[str, Any]) -> RolloutConfig:  # Any: values that click has converted
    """The run that these options mean.

    Raises:
        ConfigError: options that cannot be meant, alone or together.
    """
    sampling = checked_sampling(
        n=options["n"],
        max_tokens=options["max_tokens"],
        temperature=options["temperature"],
        top_p=options["top_p"],
        top_k=options["top_k"],
        min_p=options["min_p"],
        repetition_penalty=options["repetition_penalty"],
        seed=options["seed"],
        stop=options["stop"],
        stop_token_ids=options["stop_token_id"],
    )
    part = None if options["part"] is None else InputPart.parse(options["part"])
    return RolloutConfig(
        out=options["out"],
        servers=_server_configs(options),
        sampling=sampling,
        input=InputOptions(
            prompt_field=options["prompt_field"],
            id_field=options["id_field"],
            system=options["system"],
            limit=options["limit"],
            sampling=sampling,
            input_format=options["input_format"],
            keep_last_assistant=options["keep_last_assistant"],
            on_bad_line=options["on_bad_line"],
            part=part,
        ),
        max_total_tokens=options["max_total_tokens"],
        concurrency=options["concurrency"],
        rows_per_shard=options["rows_per_shard"],
        grace_seconds=options["grace"],
        overwrite=options["overwrite"],
        resume=options["resume"],
        retry_failed=options["retry_failed"],
        history=options["history"],
        track_tree=options["track_tree"],
        max_failures=options["max_failures"],
        max_consecutive_failures=options["max_consecutive_failures"],
    )


def check_without_a_server(config: RolloutConfig) -> None:
    """Raise what a run with these settings would, as far as it can be known before anything is asked or written.

    Raises:
        ConfigError: options that contradict each other, or that servers of this type cannot take.
        NotImplementedError: an OpenAI endpoint, and placeholders are not allowed.
    """
    from managed_cli.backends.registry import make_backend
    from managed_cli.managed.dummy import require_opt_in
    from managed_cli.storage.shards import refuse_contradictions

    refuse_contradictions(overwrite=config.overwrite, resume=config.resume, retry_failed=config.retry_failed)
    server_type = config.server.server_type
    if server_type == "openai":
        require_opt_in()
    if server_type in ("llamacpp", "openai"):  # what others take, they say themselves
        make_backend(server_type, config.server.backend_config()).check_sampling(config.sampling)


def earlier_seed(out: str) -> int | None:
    """The run seed that an output to be resumed was sampled with; None where nothing stands there yet."""
    from managed_cli.errors import OutputError
    from managed_cli.storage.reader import open_recording

    try:
        sampling = open_recording(out).run_facts.get("sampling")
    except OutputError:
        return None  # nothing to resume, or nothing readable: opening the output will say which
    seed = sampling.get("seed") if isinstance(sampling, dict) else None
    return seed if isinstance(seed, int) else None


def _server_configs(options: Mapping[str, Any]) -> tuple[APIServerConfig, ...]:  # Any: as above
    server_type, urls = options["server_type"], list(options["base_url"])
    if server_type == "local" and urls:
        raise ConfigError(
            "--base-url names a server, but the embedded engine has no address",
            hint="say what runs there: --server-type vllm, sglang, trl or llamacpp",
        )
    for url in urls:
        normalised_base_url(url)
    doubled = next((url for url in urls if urls.count(url) > 1), None)
    if doubled is not None:
        raise ConfigError(f"--base-url {doubled} is given twice")
    settings: dict[str, Any] = {  # Any: fields of the config
        "server_type": server_type,
        "model_name": options["model"],
        "tokenizer_name": options["tokenizer"],
        "api_key": api_key(options["api_key_env"], options["api_key_file"]),
        "timeout": options["request_timeout"],
        "wait_for_server": options["wait_for_server"],
        "context_length": options["context_length"],
        "nonfinite": options["nonfinite"],
    }
    if options["concurrency"] is not None:
        settings["max_connections"] = options["concurrency"] + 8  # room for checks beside the samples
        if server_type == "local":
            settings["slots"] = options["concurrency"]
    return tuple(APIServerConfig(**settings, base_url=url) for url in urls or [None])


def api_key(variable: str | None, file: str | None) -> SecretStr | None:
    """The server's key from where it is kept.

    Raises:
        ConfigError: two places are named, nothing is there, or it cannot be sent; nothing of it is shown.
    """
    if variable is not None and file is not None:
        raise ConfigError("--api-key-env and --api-key-file cannot be given together", hint="the server takes one key")
    if variable is not None:
        return SecretStr(_key_of_variable(variable))
    return None if file is None else SecretStr(_key_of_file(Path(file)))


def _key_of_variable(variable: str) -> str:
    is_ordinary = _ORDINARY_VARIABLE.fullmatch(variable) is not None
    value = os.environ.get(variable)
    if not value and is_ordinary:
        raise ConfigError(f"--api-key-env {variable}: that environment variable is not set")
    if not value:
        raise ConfigError(
            "--api-key-env: there is no environment variable of that name",
            hint="it takes the name of a variable; what was given is not shown, in case it is the key itself",
        )
    return checked_key(value, f"--api-key-env {variable}" if is_ordinary else "--api-key-env")


def _key_of_file(path: Path) -> str:
    option = f"--api-key-file {printable(str(path))}"
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(LONGEST_KEY_BYTES + 1)
    except (PermissionError, IsADirectoryError) as error:
        raise ConfigError(f"{option}: {error.strerror}") from error
    except (OSError, ValueError):  # a ValueError: the name holds a NUL
        raise ConfigError(
            "--api-key-file: there is no file of that name",
            hint="it takes the name of a file; what was given is not shown, in case it is the key itself",
        ) from None
    if len(content) > LONGEST_KEY_BYTES:
        raise ConfigError(f"{option}: expected an API key, the file is longer than {LONGEST_KEY_BYTES:,} bytes")
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        say(f"warning: {option} can be read by other users; `chmod 600` keeps it to you")
    return checked_key(content.decode("utf-8", "replace"), option)
