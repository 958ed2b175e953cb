"""Read a pickle without running it: a small machine of our own, with a list of allowed opcodes and with limits.

A global is only ever a name. What is known (tensors, storages, numpy arrays, plain containers) becomes a record, anything else an
inert `Thing` that keeps its arguments and state.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

from whynan.forensics.addresses import NotLookedAt, Unreadable
from whynan.forensics.checkpoints.known import call, dangers_in, integers, is_dangerous
from whynan.forensics.checkpoints.stubs import Array, Global, NumpyType, Pairs, TensorStub, Thing

MOST_OPCODES = 5_000_000
MOST_OBJECTS = 1_000_000  # containers and instances: each takes some hundred bytes
MOST_MEMOS = 2_000_000
MOST_HANDED = 1_000_000
LONGEST = 1 << 27  # bytes of one string
_LONGEST_INTEGER = 1024
_TOO_MANY = "the pickle holds too many objects to be looked at"

Persistent = Callable[[object], object]


class Reader(Protocol):
    """Where a pickle is read from."""

    def read(self, size: int, /) -> bytes: ...

    def readline(self, size: int = -1, /) -> bytes: ...


def _refuse(identity: object) -> object:
    raise NotLookedAt("a pickle that refers to something outside itself")


class Danger(IntEnum):
    """What a pickle does with a name that runs code."""

    NAMES = 0
    HANDS_ON = 1  # to something that is called
    CALLS = 2


@dataclass(slots=True)
class Machine:
    """Reads one or more pickles from one stream, and remembers what was noticed."""

    reader: Reader
    left: int  # bytes that can still come: no declared size may be larger
    persistent: Persistent = _refuse
    dangers: dict[str, Danger] = field(default_factory=dict)
    opcodes: int = 0
    objects: int = 0
    handed: int = 0  # things handed to calls that were looked through for names
    copied: int = 0  # bytes of strings and lists made from others
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, object] = field(default_factory=dict)

    def load(self) -> object:
        """Return what the next pickle holds; raises `Unreadable`."""
        self.stack, self.marks, self.memo = [], [], {}
        try:
            return self._run()
        except Unreadable:
            raise
        except (IndexError, KeyError, TypeError, AttributeError):
            raise Unreadable("a damaged pickle") from None
        except (ValueError, OverflowError, struct.error, UnicodeError):
            raise Unreadable("a damaged pickle: a number or text in it cannot be read") from None

    def _run(self) -> object:
        read, table = self.reader.read, _TABLE
        while (opcode := read(1)) != b".":
            action = table.get(opcode)
            if action is None:
                raise Unreadable(f"pickle opcode {opcode!r} is not allowed" if opcode else "cut short: the pickle has no end")
            self.opcodes += 1
            if self.opcodes > MOST_OPCODES:
                raise NotLookedAt(_TOO_MANY)
            action(self)
        return self.pop()

    def take(self, size: int) -> bytes:
        """Read so many bytes."""
        if size > self.left:
            raise Unreadable(f"a pickle declares a string of {size} bytes")
        if size > LONGEST:
            raise NotLookedAt(f"a pickle holds a string of {size} bytes, more than is looked at")
        data = self.reader.read(size)
        if len(data) != size:
            raise Unreadable("cut short in the middle of a pickle")
        return data

    def number(self, form: str) -> int:
        """Read a little-endian integer."""
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def line(self) -> bytes:
        """Read a line of the old text opcodes."""
        text = self.reader.readline(1 << 16)
        if not text.endswith(b"\n"):
            raise Unreadable("cut short in the middle of a pickle")
        return text[:-1]

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise Unreadable("a damaged pickle")
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def push(self, thing: object) -> None:
        self.objects += 1
        if self.objects > MOST_OBJECTS:
            raise NotLookedAt(_TOO_MANY)
        self.stack.append(thing)

    def put(self, index: int) -> None:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise Unreadable("a damaged pickle")
        self.memo[index] = self.stack[-1]
        if len(self.memo) > MOST_MEMOS:
            raise NotLookedAt(_TOO_MANY)

    def name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise Unreadable("a damaged pickle: a class has no name")
        found = Global(module[:200], name[:200])
        if is_dangerous(found):
            self.dangers.setdefault(str(found), Danger.NAMES)
        self.push(found)

    def make(self, kind: object, arguments: object) -> None:
        """Do what stands for calling something."""
        if self.dangers:
            self.mark_dangers(kind, arguments)
        made = call(kind, arguments)
        if isinstance(made, bytes):
            self.spend(len(made))
        elif isinstance(made, list):
            self.spend(8 * len(made))
        elif isinstance(made, Pairs):
            self.spend(8 * len(made.items))
        self.push(made)

    def mark_dangers(self, kind: object, arguments: object) -> None:
        """Take note of the names that are called or handed on; where too much is handed on to be looked at, all of them may be."""
        found, looked = dangers_in([kind, arguments], MOST_HANDED - self.handed)
        self.handed += looked
        handed = self.dangers if self.handed >= MOST_HANDED else map(str, found)
        for name in list(handed):
            self.dangers[name] = max(Danger.HANDS_ON, self.dangers.get(name, Danger.NAMES))
        if isinstance(kind, Global) and is_dangerous(kind):
            self.dangers[str(kind)] = Danger.CALLS

    def spend(self, size: int) -> None:
        """Bound what copies of strings may take: a text that is encoded is not needed as a text."""
        self.copied += size
        if self.copied > min(self.left, LONGEST) + (1 << 20):
            raise NotLookedAt("the pickle holds too much text to be looked at")

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if isinstance(target, Array | NumpyType):
            _set_numpy(target, state)
            self.spend(len(target.data or b"") if isinstance(target, Array) else 0)
        elif isinstance(target, Thing):
            target.states.extend(state if isinstance(state, tuple) and len(state) == 2 else (state,))
        elif isinstance(target, TensorStub):
            target.beside.append(("", state))
        elif isinstance(target, Pairs):
            target.attributes = [*target.attributes, state]

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Thing):
            target.elements.extend(values)
        else:
            raise Unreadable("a damaged pickle: something is added to what is no list")

    def store(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, Pairs | Thing):
            raise Unreadable("a damaged pickle: something is stored in what is no dictionary")
        target.items.extend(zip(values[::2], values[1::2], strict=True))


def _set_numpy(target: Array | NumpyType, state: object) -> None:
    if not isinstance(state, tuple):
        raise Unreadable("a damaged pickle: an array without its state")
    if isinstance(target, NumpyType):
        target.order = state[1] if len(state) > 1 and isinstance(state[1], str) else "="
        return
    _, shape, kind, _, data = state[-5:]
    target.kind = kind if isinstance(kind, NumpyType) else None
    target.shape = integers(shape)
    if isinstance(data, list):
        target.others = data
    elif isinstance(data, str):
        target.data = data.encode("latin1")
    elif isinstance(data, bytes | bytearray):
        target.data = data


def _constant(value: object) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(value)


def _packed(form: str) -> Callable[[Machine], None]:
    size = struct.calcsize(form)
    return lambda m: m.stack.append(struct.unpack(form, m.take(size))[0])


def _sized(form: str, turn: Callable[[bytes], object]) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(turn(m.take(m.number(form))))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _old_text(data: bytes) -> str:
    return data.decode("latin1")


def _integer(data: bytes) -> int:
    if len(data) > _LONGEST_INTEGER:
        raise NotLookedAt(f"a pickle holds an integer of {len(data)} bytes")
    return int.from_bytes(data, "little", signed=True)


def _text_integer(machine: Machine) -> None:
    line = machine.line()
    machine.stack.append({b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line.rstrip(b"L")[:_LONGEST_INTEGER]))


def _quoted(machine: Machine) -> None:
    line = machine.line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise Unreadable("a damaged pickle: a text without quotes")
    machine.stack.append(line[1:-1].decode("unicode_escape"))


def _tuple(size: int) -> Callable[[Machine], None]:
    def action(machine: Machine) -> None:
        found = [machine.pop() for _ in range(size)]
        machine.push(tuple(reversed(found)))

    return action


def _reduce(machine: Machine) -> None:
    arguments, kind = machine.pop(), machine.pop()
    machine.make(kind, arguments)


def _new_object(machine: Machine) -> None:
    arguments, kind = machine.pop(), machine.pop()
    machine.make(kind, arguments)


def _new_object_with_keywords(machine: Machine) -> None:
    keywords, arguments, kind = machine.pop(), machine.pop(), machine.pop()
    machine.make(kind, arguments)
    if isinstance(keywords, Pairs) and isinstance(machine.stack[-1], Thing):
        machine.stack[-1].states.append(keywords)


def _instance(machine: Machine) -> None:
    module, name = machine.line().decode("ascii"), machine.line().decode("ascii")
    arguments = tuple(machine.pop_mark())
    machine.name(module, name)
    machine.make(machine.pop(), arguments)


def _object(machine: Machine) -> None:
    kind, *arguments = machine.pop_mark()
    machine.make(kind, tuple(arguments))


def _global(machine: Machine) -> None:
    machine.name(machine.line().decode("utf-8"), machine.line().decode("utf-8"))


def _stack_global(machine: Machine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.name(module, name)


def _mapping(machine: Machine) -> None:
    values = machine.pop_mark()
    machine.push(Pairs(list(zip(values[::2], values[1::2], strict=True))))


def _set_item(machine: Machine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.store([key, value])


def _pop(machine: Machine) -> None:
    if machine.marks and len(machine.stack) == machine.marks[-1]:
        machine.marks.pop()
    else:
        machine.pop()


def _frame(machine: Machine) -> None:
    if machine.number("<Q") > machine.left:
        raise Unreadable("cut short: a pickle declares more than is there")


def _protocol(machine: Machine) -> None:
    if machine.take(1)[0] > 5:
        raise Unreadable("a pickle of a protocol that does not exist")


def _persistent(machine: Machine, identity: object) -> None:
    machine.push(machine.persistent(identity))


_TABLE: dict[bytes, Callable[[Machine], object]] = {
    b"\x80": _protocol,
    b"\x95": _frame,
    b"(": lambda m: m.marks.append(len(m.stack)),
    b"0": _pop,
    b"1": lambda m: m.pop_mark(),
    b"2": lambda m: m.push(m.stack[-1]),
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"I": _text_integer,
    b"L": _text_integer,
    b"J": _packed("<i"),
    b"K": _packed("<B"),
    b"M": _packed("<H"),
    b"\x8a": _sized("<B", _integer),
    b"\x8b": _sized("<I", _integer),
    b"F": lambda m: m.stack.append(float(m.line())),
    b"G": _packed(">d"),
    b"S": _quoted,
    b"T": _sized("<I", _old_text),
    b"U": _sized("<B", _old_text),
    b"V": lambda m: m.stack.append(m.line().decode("raw-unicode-escape")),
    b"X": _sized("<I", _text),
    b"\x8c": _sized("<B", _text),
    b"\x8d": _sized("<Q", _text),
    b"B": _sized("<I", bytes),
    b"C": _sized("<B", bytes),
    b"\x8e": _sized("<Q", bytes),
    b"\x96": _sized("<Q", bytes),
    b"]": lambda m: m.push([]),
    b"a": lambda m: m.append([m.pop()]),
    b"e": lambda m: m.append(m.pop_mark()),
    b"l": lambda m: m.push(m.pop_mark()),
    b")": lambda m: m.stack.append(()),
    b"t": lambda m: m.push(tuple(m.pop_mark())),
    b"\x85": _tuple(1),
    b"\x86": _tuple(2),
    b"\x87": _tuple(3),
    b"}": lambda m: m.push(Pairs()),
    b"d": _mapping,
    b"s": _set_item,
    b"u": lambda m: m.store(m.pop_mark()),
    b"\x8f": lambda m: m.push([]),
    b"\x90": lambda m: m.append(m.pop_mark()),
    b"\x91": lambda m: m.push(m.pop_mark()),
    b"c": _global,
    b"\x93": _stack_global,
    b"i": _instance,
    b"o": _object,
    b"R": _reduce,
    b"\x81": _new_object,
    b"\x92": _new_object_with_keywords,
    b"b": lambda m: m.build(),
    b"P": lambda m: _persistent(m, m.line().decode("ascii")),
    b"Q": lambda m: _persistent(m, m.pop()),
    b"p": lambda m: m.put(int(m.line())),
    b"q": lambda m: m.put(m.take(1)[0]),
    b"r": lambda m: m.put(m.number("<I")),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"g": lambda m: m.stack.append(m.memo[int(m.line())]),
    b"h": lambda m: m.stack.append(m.memo[m.take(1)[0]]),
    b"j": lambda m: m.stack.append(m.memo[m.number("<I")]),
}
