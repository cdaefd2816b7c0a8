import pytest

from managed_cli.backends.base import BackendConfig
from managed_cli.backends.registry import DEFAULT_BASE_URLS, EMBEDDED, SERVER_TYPES, backend_class, make_backend
from managed_cli.errors import ConfigError


@pytest.mark.parametrize("name", SERVER_TYPES)
def test_every_server_type_names_a_class_that_knows_its_type(name: str) -> None:
    assert getattr(backend_class(name), "server_type") == name  # noqa: B009 # a plain `type` has no such attribute


@pytest.mark.parametrize("name", DEFAULT_BASE_URLS)
def test_every_server_with_an_address_can_be_made(name: str) -> None:
    backend = make_backend(name, BackendConfig(base_url=DEFAULT_BASE_URLS[name]))
    assert (backend.server_type, backend.base_url) == (name, DEFAULT_BASE_URLS[name])


def test_only_the_embedded_engine_has_no_address() -> None:
    assert SERVER_TYPES.keys() - DEFAULT_BASE_URLS.keys() == {EMBEDDED}
    with pytest.raises(ConfigError, match="has no address"):
        make_backend(EMBEDDED, BackendConfig(base_url="http://127.0.0.1:1"))


@pytest.mark.parametrize(("name", "hint"), [("vlm", "vllm"), ("SGLang", "sglang"), ("llama.cpp", "llamacpp")])
def test_an_unknown_type_is_answered_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="is not known") as caught:
        make_backend(name, BackendConfig(base_url="http://127.0.0.1:1"))
    assert f"did you mean {hint}?" in caught.value.report()


def test_a_type_like_no_other_is_answered_with_all_of_them() -> None:
    with pytest.raises(ConfigError) as caught:
        backend_class("zzz")
    assert caught.value.hint is None
    assert all(name in caught.value.report() for name in SERVER_TYPES)
