"""Signatures that are written once and taken by several methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

_P = ParamSpec("_P")
_A = TypeVar("_A")
_T = TypeVar("_T")
_SELF: Final = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)


def takes(made: Callable[_P, _A]) -> Callable[[Callable[[Any, _A], _T]], Callable[Concatenate[Any, _P], _T]]:
    """Return a decorator: callers pass the arguments of ``made``, and the method receives what it returns.

    Type checkers and ``help`` show the signature of ``made``.
    """
    signature = inspect.signature(made)

    def decorate(method: Callable[[Any, _A], _T]) -> Callable[Concatenate[Any, _P], _T]:
        @wraps(method)
        def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            return method(self, made(*args, **kwargs))

        parameters = [_SELF, *signature.parameters.values()]
        returned = inspect.signature(method).return_annotation
        vars(call)["__signature__"] = signature.replace(parameters=parameters, return_annotation=returned)
        return call

    return decorate
