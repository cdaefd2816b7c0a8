"""The options of `rollout` as one `RolloutConfig`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from managed_cli.errors import ConfigError
from managed_cli.managed.config import APIServerConfig
from managed_cli.managed.sampling import checked_sampling
from managed_cli.rollout.config import RolloutConfig
from managed_cli.rollout.input_options import InputOptions, InputPart


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
    doubled = next((url for url in urls if urls.count(url) > 1), None)
    if doubled is not None:
        raise ConfigError(f"--base-url {doubled} is given twice")
    settings: dict[str, Any] = {  # Any: fields of the config
        "server_type": server_type,
        "model_name": options["model"],
        "tokenizer_name": options["tokenizer"],
        "api_key": _api_key(options["api_key_env"]),
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


def _api_key(variable: str | None) -> SecretStr | None:
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(f"--api-key-env {variable}: that environment variable is not set")
    return SecretStr(value)
