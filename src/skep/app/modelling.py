"""The models of the settings, with the keys of the environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from skep.config import Environment, Settings
from skep.config.settings import ChatModel
from skep.models.models import Models, never
from skep.models.spec import REHEARSAL, ModelSpec


def specs_of(settings: Settings, environment: Environment) -> list[ModelSpec]:
    """Describe each chat model, in the order of the settings; one without its key names the variable it lacks."""
    return [_spec(model, environment) for model in settings.chat_models]


def build_models(settings: Settings, environment: Environment, *, is_open: Callable[[str], bool] = never) -> Models:
    """Make the models of a program. A model without its key is left alone, and named where no other can answer.

    `is_open` says of a provider that it fails too often to be asked now.
    """
    specs = specs_of(settings, environment)
    for spec in specs:
        if spec.lacks:
            structlog.get_logger("skep.models").warning("model_lacks_key", model=spec.name, variable=spec.lacks)
    return Models(specs, timeout_s=settings.tasks.model_timeout_s, is_open=is_open)


def _spec(model: ChatModel, environment: Environment) -> ModelSpec:
    key = None if model.provider == REHEARSAL else environment.key(model.key_variable)
    return ModelSpec(
        provider=model.provider,
        id=_script(model.id, environment) if model.provider == REHEARSAL else model.id,
        level=model.intelligence_level,
        base_url=model.base_url,
        key=key,
        supports_json=model.supports_json,
        vision=model.vision,
        lacks=None if key or model.is_local else model.key_variable,
    )


def _script(name: str, environment: Environment) -> str:
    """Name a built-in script as it is, and any other by a path that starts at the folder of config.json."""
    from skep.models.script import built_in

    return name if name in built_in() else str(environment.paths.config.parent / Path(name).expanduser())
