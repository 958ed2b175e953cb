"""Stand at the doors of torch while watching: module calls, backward, optimizers, clipping, loaders, opaque transforms.

Every door is one attribute of torch replaced by a wrapper and put back on leaving. A wrapper does nothing but ask
"is this call to be recorded here?" and otherwise calls the original.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling  # dynamo knows the answers and leaves out what stands behind them

from whynan.capsule.doors.collectives import watch_collectives
from whynan.capsule.doors.compiled import CompiledFunctions, skip_frame
from whynan.capsule.doors.engine import Doors
from whynan.capsule.doors.following import watch_followers, watch_moves, watch_scaler
from whynan.capsule.doors.hooks import Hooks
from whynan.capsule.doors.labels import watch_labels
from whynan.capsule.doors.loaders import watch_loaders
from whynan.capsule.recorder import Recorder
from whynan.capsule.stack import ELSEWHERE, modes
from whynan.capsule.unseen import leave_out, stand_for, unseen

_MISSING = object()
_BACKWARD_NAMES = {"gradient": "grad_tensors"}  # what `Tensor.backward` calls otherwise than `torch.autograd.backward`


class _Compiler:
    """Answers like `torch.compiler` of a version that has no such flag."""

    @property
    def _is_compiling_flag(self) -> bool:
        return is_compiling()


compiler: Any = torch.compiler if hasattr(torch.compiler, "_is_compiling_flag") else _Compiler()  # two calls less at every door


@dataclass(slots=True, eq=False)
class _Door:
    """One replaced attribute."""

    owner: Any
    name: str
    original: Any
    wrapper: Any
    lasting: bool  # stands until the guard is closed, also when watching is off


class Reach:
    """What the wrappers on the program's own classes hold of the engine.

    cloudpickle takes such a class by value, wrappers and all, to a process that may have no whynan: there nothing is within
    reach (`recorder` is None), and a wrapper calls the original.
    """

    __slots__ = ("doors", "interception", "recorder")
    leave_out = staticmethod(leave_out)

    def __init__(self, interception: Interception) -> None:
        self.interception = interception
        self.doors = interception.doors
        self.recorder: Recorder | None = interception.doors.recorder

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, (), {"recorder": None}


class _Recipe:
    """How a function was transformed, to do the same to one made anew; as of `Reach`, nothing of it travels."""

    __slots__ = ("function", "kwargs", "rest", "transform")
    uncarried = "a function that is made anew with results of the step"

    def __init__(self, transform: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        self.function: Any = args[0] if args else None
        self.rest: tuple[Any, ...] = args[1:]
        self.transform, self.kwargs = transform, kwargs

    def made_anew(self, function: Callable[..., Any], *inner: Any, **named: Any) -> Any:
        return self.transform(function, *self.rest, **self.kwargs)(*inner, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, ()


@unseen
class Interception:
    """The set of replaced attributes; `remove` leaves torch exactly as it was."""

    def __init__(self, doors: Doors) -> None:
        self.doors = doors
        self.reach = Reach(self)
        self._undo: list[_Door] = []
        self._registered: list[Any] = []  # handles of torch's own hooks
        _made.add(self)
        self.hooks = Hooks(doors.recorder)
        self._compiled = CompiledFunctions(doors, self.hooks)

    def install(self) -> None:
        """Replace the doors."""
        recorder = self.doors.recorder
        self._module_calls(recorder)
        self._functions(recorder)
        self._gradients()
        self._optimizers()
        self._schedulers()
        watch_scaler(self)
        watch_followers(self)
        self._opaque_calls(recorder)
        watch_loaders(self)
        watch_collectives(self)
        watch_labels(self)
        self._hooks()
        self._layers(recorder)
        self._imported_before()

    def remove(self, lasting: bool = True) -> None:
        """Put every original back, last first; those that must stand for the other ranks' sake only if told to."""
        self.hooks.remove()
        self._compiled.remove()
        for handle in self._registered:
            handle.remove()
        self._registered.clear()
        doors, self._undo = self._undo, [door for door in self._undo if door.lasting and not lasting]
        for door in reversed([door for door in doors if door not in self._undo]):
            _take_down(door)

    def _layers(self, recorder: Recorder) -> None:
        """Hear of layers and buffers that a model gets after its first call. Cost: nothing while none is made."""

        def layer(parent: torch.nn.Module, name: str, child: object) -> None:
            if not is_dynamo_compiling() and not recorder.replaying:
                recorder.roots.altered(parent)

        def buffer(parent: torch.nn.Module, name: str, value: object) -> None:
            if not is_dynamo_compiling() and not recorder.replaying and name not in parent._buffers:
                recorder.roots.altered(parent)

        self._registered += [
            torch.nn.modules.module.register_module_module_registration_hook(layer),
            torch.nn.modules.module.register_module_buffer_registration_hook(buffer),
        ]
        for cls in (torch.nn.Sequential, torch.nn.ModuleList):
            self.replace(cls, "insert", _inserting(cls.insert, recorder))

    def replace(self, owner: Any, name: str, wrapper: Any, lasting: bool = False) -> None:
        """Put a wrapper in place of an attribute, remembering what stood there."""
        held = owner.__dict__ if hasattr(owner, "__dict__") else {}
        self._undo.append(_Door(owner, name, held.get(name, _MISSING), wrapper, lasting))
        skip_frame(wrapper)
        setattr(owner, name, wrapper)

    def _imported_before(self) -> None:
        """Do the same for functions that the program's own files have imported by name before watching began: `from torch.func import grad`.

        Not where the program has compiled something already, which might use these names: it would be compiled again.
        """
        dynamo: Any = sys.modules.get("torch._dynamo.utils")
        if dynamo is not None and dynamo.counters["stats"]["unique_graphs"]:
            return
        doors = {id(door.original): door for door in self._undo if isinstance(door.owner, ModuleType)}
        for module in list(sys.modules.values()):
            if type(module) is not ModuleType or "-packages" in (getattr(module, "__file__", None) or "") or module.__name__.startswith("whynan."):
                continue
            for name, value in list(vars(module).items()):
                if (door := doors.get(id(value))) is not None:
                    self.replace(module, name, door.wrapper)

    def _module_calls(self, recorder: Recorder) -> None:
        original = torch.nn.Module.__call__
        plain = original is torch.nn.Module._wrapped_call_impl  # which does nothing but what is done for it below

        def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # dynamo traces through this wrapper: it folds the first test and sees only the original
            if is_dynamo_compiling():
                return original(self, *args, **kwargs)
            call: Callable[..., Any] = self._call_impl if plain and self._compiled_call_impl is None else functools.partial(original, self)
            if recorder.inside:  # every submodule comes this way
                return call(*args, **kwargs)
            try:
                result = ELSEWHERE if compiler._is_compiling_flag else recorder.outermost(recorder.module_called, self, call, args, kwargs)
                return call(*args, **kwargs) if result is ELSEWHERE else result
            except BaseException:
                leave_out()
                raise

        if plain:
            stand_for(__call__, original)
        outputs = recorder.outputs
        if outputs is None:
            self.replace(torch.nn.Module, "__call__", __call__)
            return

        def heard_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return __call__(self, *args, **kwargs)
            try:
                result = __call__(self, *args, **kwargs)
            except BaseException:
                leave_out()
                raise
            if id(self) in outputs.now:
                outputs.hear(self, result)
            return result

        skip_frame(__call__)
        self.replace(torch.nn.Module, "__call__", heard_call)

    def _functions(self, recorder: Recorder) -> None:
        """Those functions of torch that are written in Python ask for modes themselves."""
        handled = recorder.short_way(torch.overrides.handle_torch_function)
        for owner in (torch.nn.functional, torch.functional, torch._tensor):
            self.replace(owner, "handle_torch_function", handled)

    def _gradients(self) -> None:
        doors, recorder = self.doors, self.doors.recorder
        backward, grad = torch.autograd.backward, torch.autograd.grad
        clip = torch.nn.utils.clip_grad_norm_
        clip_module = torch.nn.utils.clip_grad

        @functools.wraps(backward)
        def watched_backward(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or compiler._is_compiling_flag:
                return backward(*args, **kwargs)
            try:
                if (result := recorder.outermost(doors.going_back.backward, backward, args, kwargs)) is not ELSEWHERE:
                    return result
                if recorder.replays_here and recorder.replayed is not None:
                    recorder.replayed(args[0] if args else kwargs["tensors"])
                elif recorder.inside:
                    recorder.goes_back()
                return backward(*args, **kwargs)
            except BaseException:
                leave_out()
                raise

        @functools.wraps(grad)
        def watched_grad(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or compiler._is_compiling_flag:
                return grad(*args, **kwargs)
            try:
                result = recorder.outermost(doors.going_back.grad, grad, args, kwargs)
                return grad(*args, **kwargs) if result is ELSEWHERE else result
            except BaseException:
                leave_out()
                raise

        @functools.wraps(clip)
        def watched_clip(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or compiler._is_compiling_flag:
                return clip(*args, **kwargs)
            try:
                result = recorder.outermost(doors.clipping.clip, clip, args, kwargs)
                return clip(*args, **kwargs) if result is ELSEWHERE else result
            except BaseException:
                leave_out()
                raise

        tensor_backward = torch.Tensor.backward

        def through(self: torch.Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
            return recorder.outermost(doors.going_back.backward, backward, (self, *args), kwargs)

        stand_for(through, tensor_backward)

        @functools.wraps(tensor_backward)
        def watched_tensor_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # the same as the mode would come to, without its detour; a mode of the user's wants to see every call
            if is_dynamo_compiling() or compiler._is_compiling_flag or len(args) > 3 or type(self) is not torch.Tensor or modes() != 1:
                return tensor_backward(self, *args, **kwargs)  # type: ignore[no-untyped-call]
            renamed = {_BACKWARD_NAMES.get(name, name): value for name, value in kwargs.items()} if kwargs else kwargs
            try:
                result = through(self, args, renamed)
                return tensor_backward(self, *args, **kwargs) if result is ELSEWHERE else result  # type: ignore[no-untyped-call]
            except BaseException:
                leave_out()
                raise

        self.replace(torch.Tensor, "backward", watched_tensor_backward)
        self.replace(torch.autograd, "backward", watched_backward)
        self.replace(torch.autograd, "grad", watched_grad)
        self.replace(torch.nn.utils, "clip_grad_norm_", watched_clip)
        self.replace(clip_module, "clip_grad_norm_", watched_clip)

    def _optimizers(self) -> None:
        doors, recorder = self.doors, self.doors.recorder
        cls = torch.optim.Optimizer
        patch_step, zero, load = cls._patch_step_function, cls.zero_grad, cls.load_state_dict
        interception = self

        def _patch_step_function(self: torch.optim.Optimizer) -> None:
            patch_step(self)
            interception.watch_step_of(type(self))
            if recorder.mine or doors.may_meet():
                doors.optimizer_made(self)

        @functools.wraps(zero)
        def zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            if is_dynamo_compiling():
                zero(self, *args, **kwargs)
                return
            try:
                result = ELSEWHERE if compiler._is_compiling_flag else recorder.outermost(doors.zeroing.zeroed, zero, self, args, kwargs)
                if result is ELSEWHERE and (not recorder.replays_here or self not in recorder.stepped):
                    zero(self, *args, **kwargs)
            except BaseException:
                leave_out()
                raise

        @functools.wraps(load)
        def load_state_dict(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                before = doors.loading.loading(self)
                result = recorder.suspended(load, self, *args, **kwargs)
                doors.loading.loaded(self, before)
                return result
            except BaseException:
                leave_out()
                raise

        self.replace(cls, "_patch_step_function", _patch_step_function)
        self.replace(cls, "zero_grad", zero_grad)
        self.replace(cls, "load_state_dict", load_state_dict)
        module_zero, module_load = torch.nn.Module.zero_grad, torch.nn.Module.load_state_dict

        @functools.wraps(module_zero)
        def module_zero_grad(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            if is_dynamo_compiling():
                module_zero(self, *args, **kwargs)
                return
            try:
                if not is_compiling() and recorder.here:
                    recorder.suspended(doors.zeroing.zeroed, module_zero, self, args, kwargs)
                elif not recorder.replays_here or not recorder.stepped:
                    module_zero(self, *args, **kwargs)
            except BaseException:
                leave_out()
                raise

        @functools.wraps(module_load)
        def module_load_state(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            try:
                before = doors.loading.loading(self)
                if recorder.here:
                    recorder.suspended(recorder.about_to_load, self)
                result = recorder.suspended(module_load, self, *args, **kwargs)
                doors.loading.loaded(self, before)
                return result
            except BaseException:
                leave_out()
                raise

        self.replace(torch.nn.Module, "zero_grad", module_zero_grad)
        self.replace(torch.nn.Module, "load_state_dict", module_load_state)

    def _schedulers(self) -> None:
        """A loaded scheduler brings its own base rates; several classes have a loader of their own."""
        base = torch.optim.lr_scheduler.LRScheduler
        for cls in [c for c in vars(torch.optim.lr_scheduler).values() if isinstance(c, type) and issubclass(c, base) and "load_state_dict" in vars(c)]:
            self.replace(cls, "load_state_dict", _loader(vars(cls)["load_state_dict"], self.doors))

    def watch_step_of(self, cls: type[torch.optim.Optimizer]) -> None:
        """Wrap the `step` of an optimizer class, once."""
        original, reach = cls.step, self.reach
        if getattr(original, "_whynan", None) is reach:
            return

        @functools.wraps(original)
        def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or compiler._is_compiling_flag or (recorder := reach.recorder) is None:
                return original(self, *args, **kwargs)
            try:
                if (result := recorder.outermost(reach.doors.step, original, self, args, kwargs)) is not ELSEWHERE:
                    return result
                if recorder.replays_here:
                    return recorder.left_out(self, args, kwargs)
                if recorder.running and not reach.doors.session.stepping:
                    return reach.doors.elsewhere.step(original, self, args, kwargs)
                return original(self, *args, **kwargs)
            except BaseException:
                reach.leave_out()
                raise

        step._whynan = reach  # type: ignore[attr-defined]
        self.replace(cls, "step", step)

    def watch_moves_of(self, cls: type[torch.optim.lr_scheduler.LRScheduler]) -> None:
        """Do the same for a scheduler class and those it is made of: one written after watching began."""
        for own in cls.__mro__:
            if issubclass(own, torch.optim.lr_scheduler.LRScheduler):
                watch_moves(self, own, "step")

    def watch_step_on(self, optimizer: torch.optim.Optimizer) -> None:
        """Wrap a `step` that hangs on the optimizer itself: a scheduler made before watching began put it there."""
        original, reach = vars(optimizer).get("step"), self.reach
        if original is None:
            return

        def call(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            if (recorder := reach.recorder) is None:
                return original(*args, **kwargs)
            if is_compiling():
                return original(*args, **kwargs)
            try:
                if recorder.here:
                    optimizer._opt_called = True  # type: ignore[attr-defined]  # what the scheduler's wrapper notes, also for a step that is left out
                    return recorder.suspended(reach.doors.step, call, optimizer, args, kwargs)
                if recorder.replays_here:
                    return recorder.left_out(optimizer, args, kwargs)
                if recorder.running and not reach.doors.session.stepping:
                    return reach.doors.elsewhere.step(call, optimizer, args, kwargs)
                return original(*args, **kwargs)
            except BaseException:
                reach.leave_out()
                raise

        self.replace(optimizer, "step", step)

    def _opaque_calls(self, recorder: Recorder) -> None:
        """Calls a function mode cannot look through are recorded whole."""
        apply = torch.autograd.Function.__dict__["apply"]  # a Python classmethod up to torch 2.14, then one of C

        @classmethod  # type: ignore[misc]
        def watched_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            bound = apply.__get__(None, cls)
            if is_compiling():
                return bound(*args, **kwargs)
            try:
                if recorder.here:
                    return recorder.opaque("call", bound, bound, args, kwargs)
                return bound(*args, **kwargs)
            except BaseException:
                leave_out()
                raise

        self.replace(torch.autograd.Function, "apply", watched_apply)
        as_subclass = torch.Tensor.as_subclass  # which no function mode is asked about

        @functools.wraps(as_subclass)
        def watched_as_subclass(self: torch.Tensor, cls: Any) -> Any:
            if not is_compiling() and recorder.here:
                return recorder.opaque("call", as_subclass, as_subclass, (self, cls), {})
            return as_subclass(self, cls)

        self.replace(torch.Tensor, "as_subclass", watched_as_subclass)
        script: Any = torch.jit.ScriptFunction.__call__

        def script_call(self: Any, *args: Any, **kwargs: Any) -> Any:
            python = getattr(self, "_torchdynamo_inline", None)  # the function it was made of: a replay sees its lines
            if recorder.replays_here and python is not None:
                return python(*args, **kwargs)
            bound = functools.partial(script, self)
            try:
                if recorder.here:
                    return recorder.opaque("call", python or bound, bound, args, kwargs)
                return bound(*args, **kwargs)
            except BaseException:
                leave_out()
                raise

        self.replace(torch.jit.ScriptFunction, "__call__", script_call)
        for name in ("vmap", "grad", "grad_and_value", "vjp", "jvp", "jacrev", "jacfwd", "hessian"):
            self._transform(recorder, torch.func, name)
        self._transform(recorder, torch, "vmap")
        self._compiler()

    def _transform(self, recorder: Recorder, owner: Any, name: str) -> None:
        original = getattr(owner, name)
        immediate = name in ("vjp", "jvp")
        reach = self.reach

        @functools.wraps(original)
        def transform(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():  # it knows the original
                return original(*args, **kwargs)
            if immediate:
                return recorder.opaque("call", original, original, args, kwargs) if recorder.here else original(*args, **kwargs)
            made = original(*args, **kwargs)
            recipe = _Recipe(original, args, kwargs)
            derives = name != "vmap" or getattr(recipe.function, "_whynan_derives", False)

            @functools.wraps(made)
            def call(*inner: Any, **named: Any) -> Any:
                if is_dynamo_compiling():
                    return made(*inner, **named)
                if (recorder := reach.recorder) is None or not recorder.here:
                    return made(*inner, **named)
                try:
                    if derives:
                        return recorder.suspended(reach.doors.going_back.derived, made, inner, named)
                    if recorder.arguments.takes_results(recipe.function):
                        return recorder.opaque("call", recipe.made_anew, lambda _, *inner, **named: made(*inner, **named), (recipe.function, *inner), named)
                    return recorder.opaque("call", made, made, inner, named)
                except BaseException:
                    reach.leave_out()
                    raise

            call._whynan_derives = derives  # type: ignore[attr-defined]
            return call

        self.replace(owner, name, transform)

    def _compiler(self) -> None:
        original: Any = torch.compile
        self._compiled.find()

        @functools.wraps(original)
        def watched_compile(model: Any = None, **kwargs: Any) -> Any:
            if model is None:  # used as a decorator with options
                return lambda fn: watched_compile(fn, **kwargs)
            made = original(model, **kwargs)
            self._compiled.add(made)
            return made

        self.replace(torch, "compile", watched_compile)

    def _hooks(self) -> None:
        for name in ("register_forward_hook", "register_forward_pre_hook"):
            self.replace(torch.nn.Module, name, self.hooks.registrar(getattr(torch.nn.Module, name)))


def _inserting(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return an `insert` of a container, which sets its new member past the hooks of torch."""

    @functools.wraps(original)
    def insert(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            recorder.roots.altered(self)
        return original(self, *args, **kwargs)

    return insert


@unseen
def _loader(original: Callable[..., Any], doors: Doors) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            before = doors.loading.loading(self)
            result = original(self, *args, **kwargs)
            doors.loading.loaded(self, before)
            return result
        except BaseException:
            leave_out()
            raise

    return load_state_dict


_made: weakref.WeakSet[Interception] = weakref.WeakSet()


def _take_down(door: _Door) -> None:
    """Put an original back; where another thread's guard stands on top, it is the one that will."""
    for other in list(_made):
        for above in other._undo:
            if above.original is door.wrapper and above.owner is door.owner and above.name == door.name:
                above.original = door.original
                return
    if door.original is _MISSING:
        delattr(door.owner, door.name)
    else:
        setattr(door.owner, door.name, door.original)
