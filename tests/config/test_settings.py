"""Settings are frozen, and the published schema says the same as the program."""

from __future__ import annotations

import json

import jsonschema
import pytest
from pydantic import ValidationError

from skep.config.environment import Environment
from skep.config.file import judge
from skep.config.paths import Paths
from skep.config.settings import ChatModel, Settings, json_schema

EXAMPLE = {
    "$schema": "config.schema.json",
    "state_url": "postgresql://skep@db.example.org/skep",
    "chat_models": [
        {"id": "claude-sonnet-4-5", "provider": "anthropic", "intelligence_level": "super", "vision": True},
        {
            "id": "llama3",
            "provider": "ollama",
            "base_url": "http://127.0.0.1:11434/v1",
            "supports_json": False,
        },
    ],
    "embedding_models": [{"id": "text-embedding-3-small", "provider": "openai", "dimensions": 512}],
    "sandbox": {"mechanism": "bubblewrap", "limits": {"cpus": 0.5, "memory_mb": 512}},
    "workspace": {
        "template": "python",
        "layering": "copy",
        "archive_url": "s3://bees/archive?endpoint=http://127.0.0.1:9000",
        "archive_after_days": 7,
    },
    "packages": {
        "python_index": "http://index.example.org/simple",
        "node_registry": "http://registry.example.org",
        "upstreams": {"index.example.org": "127.0.0.1:8080"},
    },
    "policy": {"allowed_hosts": ["pypi", "*.example.org"]},
    "budgets": {"usd_per_task": None, "steps_per_task": 10},
}


def test_an_example_with_every_section_is_valid_for_the_program_and_for_the_schema() -> None:
    assert isinstance(judge(json.dumps(EXAMPLE).encode()), Settings)
    jsonschema.validate(EXAMPLE, json_schema(), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    "wrong",
    [
        {"unknown": 1},
        {"chat_models": [{"id": "m"}]},
        {"sandbox": {"limits": {"cpus": 0}}},
        {"chat_models": [{"id": "m", "provider": "p", "intelligence_level": "smart"}]},
    ],
)
def test_the_schema_refuses_what_the_program_refuses(wrong: dict[str, object]) -> None:
    assert isinstance(judge(json.dumps(wrong).encode()), list)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, json_schema())


@pytest.mark.parametrize(
    "url", ["/var/archives", "file:///var/archives", "s3://bees", "s3://bees/a?endpoint=http://h:1"]
)
def test_archives_go_to_a_folder_or_a_bucket(url: str) -> None:
    assert isinstance(judge(json.dumps({"workspace": {"archive_url": url}}).encode()), Settings)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"workspace": {"archive_url": "archives"}}, "absolute path"),
        ({"workspace": {"archive_url": "ftp://host/archives"}}, "s3://bucket"),
        ({"workspace": {"archive_url": "file://host/archives"}}, "file:///path"),
        ({"workspace": {"archive_url": "s3://name:word@bees"}}, "SKEP_S3_SECRET_ACCESS_KEY"),
        ({"workspace": {"layering": "magic"}}, "'auto', 'overlay' or 'copy'"),
        ({"packages": {"python_index": "index.example.org"}}, "http:// or https://"),
        ({"packages": {"node_registry": "https://me:word@registry.example.org"}}, "user name or a password"),
        ({"packages": {"upstreams": {"index.example.org": "elsewhere"}}}, "not an address"),
        ({"packages": {"upstreams": {"in dex": "10.0.0.1"}}}, "in dex"),
    ],
)
def test_a_wrong_place_is_refused_with_what_it_should_be(section: dict[str, object], said: str) -> None:
    judged = judge(json.dumps(section).encode())
    assert isinstance(judged, list)
    assert said in judged[0].message


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().budgets.steps_per_task = 3  # type: ignore[misc]


def test_a_model_on_this_machine_needs_no_key() -> None:
    assert ChatModel(id="m", provider="ollama", base_url="http://127.0.0.1:1/v1").is_local
    assert not ChatModel(id="m", provider="openai").is_local
    assert not ChatModel(id="m", provider="x", base_url="https://127.evil.example").is_local


def test_the_environment_gives_keys_by_name_and_never_shows_them() -> None:
    variables = {"HOME": "/h", "OPENAI_API_KEY": "planted-secret", "BLANK_API_KEY": "  "}
    environment = Environment(Paths.of(variables), variables)
    assert environment.key("OPENAI_API_KEY") == "planted-secret"
    assert environment.key("BLANK_API_KEY") is None
    assert environment.secrets == ("planted-secret",)
    assert "planted-secret" not in repr(environment)


def test_the_keys_of_a_store_come_from_the_environment_and_are_not_shown() -> None:
    variables = {
        "HOME": "/h",
        "SKEP_S3_ACCESS_KEY_ID": "bees",
        "SKEP_S3_SECRET_ACCESS_KEY": "planted-secret",
        "SKEP_S3_REGION": " ",
    }
    environment = Environment(Paths.of(variables), variables)
    keys = environment.store_keys
    assert (keys.access_key_id, keys.secret_access_key, keys.region) == ("bees", "planted-secret", None)
    assert environment.secrets == ("planted-secret",)
    assert "planted-secret" not in repr(keys)


@pytest.mark.parametrize(
    ("sandbox", "field", "said"),
    [
        ({"isolation": "kernel"}, "sandbox.mechanism", "bubblewrap: its isolation is namespaces"),
        ({"mechanism": "gvisor", "isolation": "kernel", "fallback": ["docker"]}, "sandbox.fallback", "docker"),
        ({"mechanism": "local"}, "sandbox.mechanism", "its isolation is none"),
        ({"mechanism": "local", "isolation": "none"}, "sandbox.mechanism", "allow_unsafe"),
        ({"fallback": ["local"], "isolation": "none"}, "sandbox.fallback", "allow_unsafe"),
        ({"fallback": ["bubblewrap"]}, "sandbox.fallback", "twice"),
        ({"fallback": ["disabled"]}, "sandbox.fallback[0]", "should be"),
        ({"mechanism": "magic"}, "sandbox.mechanism", "should be"),
        ({"docker": {"host": "tcp://10.0.0.1:2375"}}, "sandbox.docker.host", "unix:///"),
        ({"docker": {"image": "debian", "rootfs": "/srv/root"}}, "sandbox.docker.rootfs", "image"),
        ({"gvisor": {"path": "runsc"}}, "sandbox.gvisor.path", "absolute path"),
        ({"e2b": {"api_key": "abc"}}, "sandbox.e2b.api_key", "secret"),
    ],
)
def test_a_mechanism_that_is_too_weak_or_wrongly_told_is_refused(
    sandbox: dict[str, object], field: str, said: str
) -> None:
    judged = judge(json.dumps({"sandbox": sandbox}).encode())
    assert isinstance(judged, list)
    assert (judged[0].field, said in judged[0].message) == (field, True), judged[0]


def test_what_isolates_nothing_can_be_had_by_whoever_asks_twice() -> None:
    asked = {"mechanism": "local", "isolation": "none", "allow_unsafe": True}
    assert isinstance(judge(json.dumps({"sandbox": asked}).encode()), Settings)


def test_the_keys_of_clouds_come_from_the_environment_and_are_not_shown() -> None:
    variables = {"HOME": "/h", "E2B_API_KEY": "planted-secret", "DAYTONA_API_KEY": " "}
    environment = Environment(Paths.of(variables), variables)
    assert (environment.cloud_keys.e2b, environment.cloud_keys.daytona) == ("planted-secret", None)
    assert "planted-secret" not in repr(environment.cloud_keys)
