"""From an environment's dotted path and arguments, or its class, to an instance, with errors that a person can act on.

Arguments are checked against the constructor's signature before it runs: their names (with the nearest spelling) and,
where the annotations allow it, their types.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Protocol, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from penstock.environments.base import Environment
from penstock.types import ConfigError
from penstock.types.errors import errors_of_user_code
from penstock.types.importing import load_attribute, nearest


class SpecLike(Protocol):
    """What `load_environment` reads: `penstock.types.EnvironmentSpec` or a config of the same fields."""

    @property
    def env_class(self) -> str:
        """Dotted path of the class, or ``path/to/file.py:Class``."""
        ...

    @property
    def env_args(self) -> Mapping[str, Any]:
        """Keyword arguments."""
        ...


def load_environment(spec: SpecLike) -> Environment:
    """Makes the environment that a config names.

    Raises:
        ConfigError: unknown module, class or argument (with the nearest spelling), a missing argument, a wrong type,
            or a class that is no concrete `Environment`.
    """
    cls = _checked_class(load_attribute(spec.env_class, "env_class"), f"env_class {spec.env_class!r}")
    arguments = _checked_arguments(cls, spec.env_class, dict(spec.env_args))
    with errors_of_user_code(ConfigError, f"env_class {spec.env_class!r} refused env_args:"):  # by its own checks
        return _complete(cls(**arguments), f"env_class {spec.env_class!r}")


def takes_argument(env_class: str, name: str) -> bool:
    """Whether the class that a config names is made with an argument of that name.

    Raises:
        ConfigError: it cannot be imported.
    """
    parameters = _signature(load_attribute(env_class, "env_class")).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def given_environment(given: Any) -> Environment:
    """The environment that was given as an object: an instance, or a class that is called without arguments.

    Raises:
        ConfigError: it is neither, or the class cannot be called so.
    """
    if isinstance(given, Environment):
        return _complete(given, f"environment {type(given).__name__}")
    called = f"environment {given.__name__}" if inspect.isclass(given) else f"environment {given!r:.60}"
    if not inspect.isclass(given):
        raise ConfigError(
            f"{called} is neither an environment nor a class of them: give one of the two; what a path or a function "
            "stands for is named in a configuration, env_class: tasks.py:MyEnvironment"
        )
    cls = _checked_class(given, called)
    told, remedy = f"{called} cannot be made without arguments:", f"; give an instance, environment={given.__name__}(…)"
    with errors_of_user_code(ConfigError, told, remedy):
        return _complete(cast(Any, cls)(), called)


def _complete(environment: Environment, called: str) -> Environment:
    if not hasattr(environment, "name"):
        raise ConfigError(f"{called}: its __init__ does not begin with super().__init__(): add that")
    if not isinstance(environment.name, str):
        raise ConfigError(f"{called}: its name is {environment.name!r:.60}: it must be text")
    return environment


def _checked_class(cls: Any, called: str) -> type[Environment]:
    if not inspect.isclass(cls) or not issubclass(cls, Environment):
        raise ConfigError(f"{called} is not a subclass of penstock.environments.Environment")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise ConfigError(f"{called} is abstract: it does not define {missing}")
    return cls


def _checked_arguments(cls: type, path: str, arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = _signature(cls).parameters
    named = {name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in arguments:
        if name not in named and not accepts_any:
            known = ", ".join(sorted(named)) or "none"
            raise ConfigError(f"env_args.{name}: {path} has no such argument{nearest(name, named)}: it takes {known}")
    for name in named - arguments.keys():
        if parameters[name].default is inspect.Parameter.empty:
            raise ConfigError(f"env_args.{name} is missing: {path} requires it")
    annotations = {name: parameters[name].annotation for name in arguments if name in parameters}
    return {name: _checked_value(name, value, annotations.get(name)) for name, value in arguments.items()}


def _checked_value(name: str, value: Any, annotation: Any) -> Any:
    """The value as the annotation wants it, e.g. a list as a tuple; unchecked where pydantic cannot read it."""
    if annotation in (None, inspect.Parameter.empty) or isinstance(annotation, str):
        return value
    adapter = _adapter(annotation)
    if adapter is None:
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["env_args", name, *(str(part) for part in first["loc"])])
        raise ConfigError(f"{where} is {first['input']!r}: {first['msg'].lower()}") from error


def _adapter(annotation: Any) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(annotation)
    except PydanticSchemaGenerationError:  # a class that pydantic does not know: checked by isinstance
        return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:
        return None


def _signature(cls: type) -> inspect.Signature:
    try:
        return inspect.signature(cls, eval_str=True)
    except NameError:  # an annotation that exists for type checkers only
        return inspect.signature(cls)
