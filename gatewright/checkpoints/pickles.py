"""Reading the data in a pickle without running it.

A pickle is a program for a small stack machine whose instructions can call any function.
`read` runs that machine on plain data only: a global stays a name, a call stays a `Record` of
what would have been called, and nothing is imported or executed.  Names outside the caller's
list are refused.  torch's weights_only reader does the same for weights, but pulls in 200 MB
of torch and cannot read the newer protocol of Megatron's `.metadata`.

Time and memory are bounded by the input's length: the memo holds references, and lengths are
checked by `pickletools` against what the input holds.
"""

from __future__ import annotations

import dataclasses
import pickletools
from collections.abc import Callable, Collection, Hashable
from typing import Any

from gatewright.errors import UserError


@dataclasses.dataclass
class Record:
    """An object that the pickle would have built: what it names, its arguments, its state."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """Entries set on it when it stands for a mapping (OrderedDict)."""

    def __getitem__(self, field: str) -> Any:
        """Return a field of a dataclass's state."""
        return self.state[field]

    def __hash__(self) -> int:
        return id(self)


@dataclasses.dataclass(frozen=True)
class Global:
    """A name that the pickle refers to: `module.qualified.name`."""

    name: str


_MARK = object()
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE"),
    *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}


class _Machine:
    def __init__(self, allowed: Callable[[str], bool], persistent: Callable[[Any], Any]) -> None:
        self.allowed, self.persistent = allowed, persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def pop_to_mark(self) -> list[Any]:
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is _MARK:
                items = self.stack[at + 1 :]
                del self.stack[at:]
                return items
        raise ValueError("no mark on the stack")

    def named(self, module: Any, name: Any) -> Global:
        full = f"{module}.{name}"
        if not self.allowed(full):
            raise ValueError(f"it refers to {full}, which weights have no use for")
        return Global(full)

    def call(self, target: Any, args: Any) -> Record:
        if not isinstance(target, Global) or not isinstance(args, tuple):
            raise ValueError("it calls something that is not a plain name")
        return Record(target.name, args)

    def set_items(self, target: Any, pairs: list[Any]) -> None:
        into = target.items if isinstance(target, Record) else target
        if not isinstance(into, dict) or len(pairs) % 2:
            raise ValueError("it sets items on something that is not a mapping")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, Hashable):
                raise ValueError("a mapping's key is not hashable")
            into[key] = value

    def step(self, op: str, arg: Any) -> bool:
        """Run one instruction; return True at the end of the program."""
        stack = self.stack
        if op in ("PROTO", "FRAME"):
            pass
        elif op == "STOP":
            return True
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op]())
        elif op in _LITERALS:
            stack.append(arg)
        elif op == "MARK":
            stack.append(_MARK)
        elif op == "POP":
            stack.pop()
        elif op == "POP_MARK":
            self.pop_to_mark()
        elif op == "DUP":
            stack.append(stack[-1])
        elif op in ("TUPLE1", "TUPLE2", "TUPLE3"):
            n = int(op[-1])
            if len(stack) < n:
                raise ValueError("the stack is too short")
            items = tuple(stack[-n:])
            del stack[-n:]
            stack.append(items)
        elif op == "TUPLE":
            stack.append(tuple(self.pop_to_mark()))
        elif op == "LIST":
            stack.append(self.pop_to_mark())
        elif op == "DICT":
            pairs = self.pop_to_mark()
            stack.append({})
            self.set_items(stack[-1], pairs)
        elif op == "FROZENSET":
            stack.append(frozenset(self.pop_to_mark()))
        elif op == "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        elif op == "APPENDS":
            values = self.pop_to_mark()
            stack[-1].extend(values)
        elif op == "ADDITEMS":
            values = self.pop_to_mark()
            stack[-1].update(values)
        elif op == "SETITEM":
            value, key = stack.pop(), stack.pop()
            self.set_items(stack[-1], [key, value])
        elif op == "SETITEMS":
            pairs = self.pop_to_mark()
            self.set_items(stack[-1], pairs)
        elif op in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[int(arg)] = stack[-1]
        elif op == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif op in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[int(arg)])
        elif op == "GLOBAL":
            stack.append(self.named(*str(arg).split(" ", 1)))
        elif op == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(self.named(module, name))
        elif op in ("REDUCE", "NEWOBJ"):
            args, target = stack.pop(), stack.pop()
            stack.append(self.call(target, args))
        elif op == "NEWOBJ_EX":
            _, args, target = stack.pop(), stack.pop(), stack.pop()
            stack.append(self.call(target, args))
        elif op == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], Record):
                raise ValueError("it sets the state of something that is not an object")
            stack[-1].state = state
        elif op == "BINPERSID":
            stack.append(self.persistent(stack.pop()))
        else:
            raise ValueError(f"instruction {op} has no place in weights")
        return False


def read(
    data: bytes,
    source: str,
    *,
    allowed: Collection[str],
    allowed_prefixes: tuple[str, ...] = (),
    persistent: Callable[[Any], Any] = lambda pid: Record("persistent", (pid,)),
) -> Any:
    """Return the data of a pickle: containers, literals, `Global` and `Record`.

    Args:
        source: what to call the file in an error message.
        allowed: full names that may occur.
        allowed_prefixes: beginnings of further names that may occur.
        persistent: turns a persistent id (torch's storages) into a value.

    Raises:
        UserError: cut short, malformed, or it refers to a name outside `allowed`.
    """

    def allow(name: str) -> bool:
        return name in allowed or name.startswith(allowed_prefixes)

    machine = _Machine(allow, persistent)
    try:
        for op, arg, _ in pickletools.genops(data):
            if machine.step(op.name, arg):
                (result,) = machine.stack
                return result
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as e:
        raise UserError(
            f"{source}: its pickle is not plain weights ({e}); nothing of it was run"
        ) from e
    raise UserError(f"{source}: its pickle is cut short")
