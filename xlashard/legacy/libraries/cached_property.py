"""Module of the package `cached_property`, which programs of 2022 import."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any


class cached_property:
    """Attribute that a method computes once per instance; deleting it computes it again.

    Args:
        func: The method. A coroutine function becomes a future that can be awaited repeatedly.
    """

    def __init__(self, func: Callable[[Any], Any]) -> None:
        self.__doc__ = func.__doc__
        self.func = func

    def __get__(self, instance: Any, owner: type | None) -> Any:
        if instance is None:
            return self
        value = self.func(instance)
        if inspect.iscoroutine(value):
            value = asyncio.ensure_future(value)
        instance.__dict__[self.func.__name__] = value
        return value


class threaded_cached_property:
    """`cached_property` whose method runs once, also if several threads read it.

    Args:
        func: The method.
    """

    def __init__(self, func: Callable[[Any], Any]) -> None:
        self.__doc__ = func.__doc__
        self.func = func
        self.lock = threading.RLock()

    def __get__(self, instance: Any, owner: type | None) -> Any:
        if instance is None:
            return self
        values, name = instance.__dict__, self.func.__name__
        with self.lock:
            if name not in values:
                values[name] = self.func(instance)
            return values[name]


class cached_property_with_ttl:
    """Attribute that a method computes again after some seconds.

    Args:
        ttl: The seconds that a value is valid, or the method, whose value stays valid; 0 or None
            for values that stay valid.
    """

    def __init__(self, ttl: Any = None) -> None:
        self.ttl, self.lock = ttl, threading.RLock()
        if callable(ttl):
            self.ttl = None
            self(ttl)

    def __call__(self, func: Callable[[Any], Any]) -> "cached_property_with_ttl":
        """Set the method, as a decorator does."""
        self.func, self.__doc__, self.__name__ = func, func.__doc__, func.__name__
        return self

    def __get__(self, instance: Any, owner: type | None) -> Any:
        if instance is None:
            return self
        values, now = instance.__dict__, time.time()
        with self.lock:
            value, since = values.get(self.__name__, (None, None))
            if since is None or (self.ttl and now - since > self.ttl):
                value, since = values[self.__name__] = self.func(instance), now
            return value

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.__name__] = value, time.time()

    def __delete__(self, instance: Any) -> None:
        instance.__dict__.pop(self.__name__, None)


cached_property_ttl = timed_cached_property = cached_property_with_ttl


class threaded_cached_property_with_ttl(cached_property_with_ttl):
    """`cached_property_with_ttl` for several threads, which all of them are here."""


threaded_cached_property_ttl = timed_threaded_cached_property = threaded_cached_property_with_ttl
