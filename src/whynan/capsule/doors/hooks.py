"""Hooks of modules: training code may live in a hook of another model, so recording goes on inside them.

A hook is exchanged in its module's dictionary for one that resumes the recording. The compiler guards hooks by what they
are, so wherever compiled code runs the plain ones stand in their places.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from whynan.capsule.doors.compiled import is_compiled_module, skip_frame
from whynan.capsule.recorder import Recorder
from whynan.capsule.unseen import leave_out, unseen


@unseen
class Hooks:
    """The hooks that are watched, and where they stand."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._held: list[tuple[Any, int, WatchedHook]] = []

    def wrap(self, model: torch.nn.Module) -> None:
        """Watch the hooks that a model has already; those of compiled modules are part of the graph and cannot be recorded."""
        compiled = {id(m) for top in model.modules() if is_compiled_module(top) for m in top.modules()}
        for module in (m for m in model.modules() if id(m) not in compiled):
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for key, hook in list(hooks.items()):
                    if not isinstance(hook, WatchedHook):
                        watched = WatchedHook(hook, self._recorder)
                        hooks[key] = watched
                        self._held.append((hooks, key, watched))

    def registrar(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `register_forward_hook` that watches what is registered."""

        @functools.wraps(original)
        def register(module: torch.nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if getattr(hook, "__module__", "").startswith("torch."):
                return original(module, hook, *args, **kwargs)
            watched = WatchedHook(hook, self._recorder)
            handle = original(module, watched, *args, **kwargs)
            hooks = handle.hooks_dict_ref()
            if hooks is not None:
                self._held.append((hooks, handle.id, watched))
            return handle

        return register

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Put the plain hooks in their places for a while."""
        changed = [item for item in self._held if item[0].get(item[1]) is item[2]]
        for hooks, key, watched in changed:
            hooks[key] = watched.plain
        try:
            yield
        finally:
            for hooks, key, watched in changed:
                if hooks.get(key) is watched.plain:
                    hooks[key] = watched

    def remove(self) -> None:
        """Put the plain hooks back for good."""
        for hooks, key, watched in self._held:
            if key in hooks:
                hooks[key] = watched.plain
        self._held.clear()

    def __bool__(self) -> bool:
        return bool(self._held)


@unseen
class WatchedHook:
    """A user's hook with recording on inside it; copied and pickled as the plain hook."""

    def __init__(self, hook: Callable[..., Any], recorder: Recorder) -> None:
        functools.update_wrapper(self, hook)
        self.plain, self._recorder = hook, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self.plain(*args, **kwargs)
        try:
            return self._recorder.resumed(self.plain, *args, **kwargs)
        except BaseException:
            leave_out()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((self.plain,), 0)  # nothing of ours: it may be read where whynan is not installed


skip_frame(WatchedHook.__call__)
