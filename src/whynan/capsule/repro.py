"""Write `repro.py`: the calls of the step as a person would type them, on a loader that needs torch and safetensors only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from whynan.records import Json

_COPIED = ("names", "read", "rebuild", "statements", "stepped", "trusted")
_SEVERAL = frozenset(  # functions whose one tensor may come in a tuple
    {"split", "split_with_sizes", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind", "meshgrid", "max", "min", "unique", "where",
     "nonzero", "broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d", "grad"}
)  # fmt: skip
_HERE = Path(__file__).parent


def write(folder: Path, program: dict[str, Any], incident: dict[str, Any]) -> None:
    """Write the script and what it stands on into a capsule."""
    loader = folder / "loader"
    loader.mkdir()
    for name, to in (("standalone", "__init__"), *((n, n) for n in _COPIED)):
        text = (_HERE / f"{name}.py").read_text(encoding="utf-8").replace("from whynan.capsule.", "from loader.")
        (loader / f"{to}.py").write_text(text, encoding="utf-8")
    (folder / "repro.py").write_text(script(program, incident), encoding="utf-8")


def script(program: dict[str, Any], incident: dict[str, Any]) -> str:
    """Return the text of the script."""
    writer = _Writer(program)
    body = [line for entry in program["entries"] for line in writer.call(entry)]
    origin, cause = incident["origin"], incident["cause"]
    place = f"born at {origin['file']}:{origin['line']}:\n\n    {origin['code']}" if origin["file"] else "its place is not known."
    head = _quoted(f"{cause['code']}, {cause['title']}, {place}")
    return "\n".join([
        f'"""Step {incident["step"]} of a training run, once more: prints what is not finite and exits with status 1.',
        "",
        head,
        "",
        "Written by whynan. Needs torch and safetensors. It runs the definitions in source/, which are the code of that run.",
        '"""',
        "",
        "import torch",
        "from loader import Step, out",
        "",
        "step = Step(__file__)",
        "get = step.get",
        *writer.named,
        "",
        *body,
        "",
        f"step.verdict({', '.join(writer.losses)})",
        "",
    ])  # fmt: skip


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', "'''")


class _Writer:
    """Turns calls of program.json into lines."""

    def __init__(self, program: dict[str, Any]) -> None:
        self.nodes: list[Any] = program["objects"]
        self.calls = {e["number"]: e for e in program["entries"]}
        self.named: list[str] = []
        self.losses: list[str] = []
        self._names: dict[int, str] = {}

    def call(self, entry: dict[str, Any]) -> list[str]:
        """Return the lines of one call."""
        args = [self.text(a) for a in entry["args"]]
        kwargs = [f"{k}={self.text(v)}" for k, v in entry["kwargs"].items()]
        call = f"{self._callee(entry)}({', '.join([*args, *kwargs])})"
        if entry["kind"] in ("backward", "derivative"):
            self.losses += (args or [kwargs[0].partition("=")[2]])[:1]
        if entry["kind"] in ("function", "derivative") or (entry is list(self.calls.values())[-1] and not self.losses):
            self.losses.append(f"v{entry['number']}")
        site = entry["site"]
        where = f"  # {site['shown']}:{site['at'][0]}" if site is not None else ""
        line = f"v{entry['number']} = {call}{where}"
        if entry["kind"] == "write" and entry["outputs"]:
            line = f"v{entry['number']} = {call}{where}" if not self._returns_nothing(entry) else f"{call}{where}\nv{entry['number']} = {args[0]}"
        if entry["rng"] is None and entry["grad"] and not entry["autocast"] and not entry["wanted"]:
            return line.split("\n")
        return [f"with step.mode({entry['number']}):", *(f"    {part}" for part in line.split("\n"))]

    def _returns_nothing(self, entry: dict[str, Any]) -> bool:
        name = str(entry["fn"].get("torch", "")) if isinstance(entry["fn"], dict) else ""
        return name.endswith(("__setitem__", "__set__", "__delete__"))

    def _callee(self, entry: dict[str, Any]) -> str:
        fn = entry["fn"]
        if entry["kind"] == "grad" and entry["outputs"]:
            return "step.gradient"
        if "torch" in fn and not fn["torch"].startswith("aten::"):
            return str(fn["torch"])
        if "$" in fn and self.nodes[fn["$"]].get("is") == "object":
            return self._name(fn["$"])
        return f"step.fn({entry['number']})"

    def _name(self, number: int) -> str:
        """Give a model a name of its own."""
        if number not in self._names:
            node = self.nodes[number]
            kind = str(next(iter(node["class"].values()))) if "class" in node["class"] else str(node["class"].get("name", "model"))
            stem = re.sub(r"\W", "", kind.rpartition(":")[2].rpartition(".")[2]).lower() or "model"
            taken = stem in self._names.values() or stem in ("step", "get", "out", "torch")
            self._names[number] = f"{stem}_{number}" if taken else stem
            self.named.append(f"{self._names[number]} = get({number})")
        return self._names[number]

    def text(self, value: Any) -> str:
        """Return a value as Python."""
        if not isinstance(value, dict):
            return repr(value)
        if "$" in value:
            return self._node(value["$"])
        if "slot" in value:
            return self._slot(*value["slot"])
        if "inner" in value:
            return f"step.caught[{', '.join(map(str, value['inner']))}]"
        if "kept" in value:
            return self._kept(value)
        if "rebuild" in value:
            return f"step.rebuild({self.text(value['rebuild'])}, {self.text(value['attributes'])}, {self.text(value['items'])})"
        return self._inline(value)

    def _inline(self, value: dict[str, Any]) -> str:
        for key, form in (("dtype", "torch.{}"), ("format", "torch.{}"), ("torch", "{}"), ("float", "float('{}')")):
            if key in value and not str(value[key]).startswith("aten::"):
                return form.format(value[key])
        return "..." if "ellipsis" in value else f"step.decoder.decode({value!r})"

    def _slot(self, number: int, index: int) -> str:
        entry = self.calls[number]
        name = str(entry["fn"].get("torch", "")) if isinstance(entry["fn"], dict) else ""
        single = entry["outputs"] == 1 and name and name.rpartition(".")[2] not in _SEVERAL
        return f"v{number}" if single else f"out(v{number}, {index})"

    def _kept(self, value: dict[str, Any]) -> str:
        if value["kept"] == "dict":
            return "{" + ", ".join(f"{self.text(k)}: {self.text(v)}" for k, v in value["items"]) + "}"
        items = ", ".join(self.text(v) for v in value["items"])
        return f"[{items}]" if value["kept"] == "list" else f"({items},)" if items else "()"

    def _node(self, number: int) -> str:
        node: dict[str, Json] = self.nodes[number]
        if node.get("is") in ("slice", "range"):
            ends = node["ends"]
            assert isinstance(ends, list)
            return f"{node['is']}({', '.join(self.text(e) for e in ends)})"
        return f"get({number})"
