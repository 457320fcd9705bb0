"""Models come from the settings, their keys from the environment and from nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic_ai.messages import ModelRequest
from tests.models.servers import Fault, ModelServer, Say

from skep.app.modelling import build_models, specs_of
from skep.config import Environment, Paths, Settings
from skep.errors import ModelMissing
from skep.models.exchange import Request
from skep.models.failures import ModelFailure


def environment(folder: Path, **variables: str) -> Environment:
    return Environment(Paths.of({"HOME": str(folder)}), variables)


def settings(*models: Mapping[str, object]) -> Settings:
    return Settings.model_validate({"chat_models": list(models)})


def test_each_model_gets_the_key_of_its_provider_and_shows_it_to_nobody(tmp_path: Path) -> None:
    wanted = settings(
        {"provider": "anthropic", "id": "one", "intelligence_level": "super", "vision": True},
        {"provider": "openai", "id": "two", "base_url": "http://127.0.0.1:8080/v1", "supports_json": False},
        {"provider": "google", "id": "three", "intelligence_level": "light"},
    )
    one, two, three = specs_of(wanted, environment(tmp_path, ANTHROPIC_API_KEY="secret-a", GEMINI_API_KEY="secret-g"))
    assert (one.key, one.level, one.vision, one.lacks) == ("secret-a", "super", True, None)
    assert (two.key, two.base_url, two.supports_json, two.lacks) == (None, "http://127.0.0.1:8080/v1", False, None)
    assert (three.key, three.level) == ("secret-g", "light")
    assert "secret" not in repr([one, two, three])


def test_a_model_without_its_key_is_passed_over_and_named_when_no_other_is_left(tmp_path: Path) -> None:
    openai, hello = {"provider": "openai", "id": "gpt"}, {"provider": "rehearsal", "id": "hello"}
    both = build_models(settings(openai, hello), environment(tmp_path))
    assert [spec.name for spec in both.choose("work")] == ["rehearsal/hello"]
    with pytest.raises(ModelMissing, match="OPENAI_API_KEY is not set") as caught:
        build_models(settings(openai), environment(tmp_path, OPENAI_API_KEY="  ")).choose("work")
    assert caught.value.hint == "export OPENAI_API_KEY=…"


async def test_a_model_is_asked_at_its_address_with_its_key(tmp_path: Path) -> None:
    key = "AIza-this-key-stays-here"
    with ModelServer([Say("Hello."), Fault(400, f"API key {key} is not valid")]) as server:
        wanted = settings({"provider": "google", "id": "gemini-2.5-flash", "base_url": server.base_url("google")})
        request = Request("work", [ModelRequest.user_text_prompt("Hello")])
        async with build_models(wanted, environment(tmp_path, GEMINI_API_KEY=key)) as models:
            assert (await models.ask(request)).response.text == "Hello."
            with pytest.raises(ModelFailure) as caught:
                await models.ask(request)
    assert {asked.key for asked in server.received} == {key}
    assert caught.value.kind == "refused" and key not in caught.value.message


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("hello", "hello"),
        ("play.yaml", "{home}/.config/skep/play.yaml"),
        ("scripts/play.yaml", "{home}/.config/skep/scripts/play.yaml"),
        ("/srv/play.yaml", "/srv/play.yaml"),
    ],
)
def test_a_script_is_looked_for_beside_the_settings(tmp_path: Path, name: str, path: str) -> None:
    (spec,) = specs_of(settings({"provider": "rehearsal", "id": name}), environment(tmp_path))
    assert spec.id == path.format(home=tmp_path)
