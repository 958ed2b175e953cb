"""What calling a name in a pickle stands for, where it is known; and the names that no checkpoint has a reason to hold."""

from __future__ import annotations

from collections.abc import Callable

from whynan.forensics.addresses import Unreadable
from whynan.forensics.checkpoints.dtypes import FORMATS
from whynan.forensics.checkpoints.stubs import Array, Global, NamedType, NumpyType, Pairs, Storage, TensorStub, Thing

MOST = 1 << 63  # no size, stride or offset reaches this; beyond it numbers could not even be printed
MOST_DIMENSIONS = 64

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QUInt8Storage": "quint8",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}
_OTHER_NAMES = {"double": "float64", "float": "float32", "half": "float16", "long": "int64", "int": "int32", "short": "int16", "cfloat": "complex64"}

_MODULES_THAT_ACT = """
    os posix nt subprocess sys importlib runpy shutil pty ctypes _ctypes codeop pickle _pickle marshal timeit pdb bdb cProfile
    webbrowser requests httplib ftplib smtplib telnetlib aiohttp multiprocessing threading _thread asyncio pip ensurepip
    venv pydoc doctest idlelib distutils setuptools zipimport imp linecache fileinput
"""
_DANGEROUS_MODULES = frozenset(_MODULES_THAT_ACT.split())
_HARMLESS = frozenset({"os.stat_result", "os.terminal_size", "threading.Lock", "_thread.RLock"})
_DANGEROUS = frozenset(
    f"{module}.{name}"
    for modules, names in (
        (
            "builtins __builtin__",
            "eval exec execfile compile open __import__ input breakpoint exit quit globals locals vars delattr setattr help apply memoryview",
        ),
        ("types", "FunctionType CodeType LambdaType"),
        ("operator _operator", "attrgetter methodcaller"),
        ("torch", "load compile"),
        ("torch.serialization", "load _load _legacy_load"),
        ("torch.hub", "load load_state_dict_from_url download_url_to_file"),
        ("torch.jit", "load"),
        ("torch.utils._config_module", "load_config"),
        ("torch._inductor.codecache", "compile_file"),
        ("numpy", "load fromfile memmap save savetxt"),
        ("numpy.testing._private.utils", "runstring"),
        ("numpy.f2py.crackfortran", "getlincoef myeval"),
        ("io _io", "open FileIO open_code"),
        ("pathlib", "Path.write_bytes Path.write_text Path.unlink"),
        ("socket _socket", "socket SocketType create_connection create_server fromfd socketpair"),
        ("urllib urllib.request urllib2", "urlopen urlretrieve URLopener FancyURLopener build_opener install_opener OpenerDirector"),
        ("http.client", "HTTPConnection HTTPSConnection"),
        ("http.server", "HTTPServer ThreadingHTTPServer test"),
        ("signal _signal", "signal alarm raise_signal pthread_kill setitimer set_wakeup_fd"),
        ("tempfile", "mkstemp mkdtemp mktemp NamedTemporaryFile TemporaryFile SpooledTemporaryFile TemporaryDirectory"),
        ("glob", "glob iglob"),
        ("gc", "get_objects get_referrers get_referents"),
        ("platform", "popen"),
        ("commands", "getoutput getstatusoutput getstatus"),
        ("code", "interact InteractiveInterpreter InteractiveConsole"),
        ("profile trace", "run runctx Profile Trace"),
        ("cloudpickle.cloudpickle", "_make_function _builtin_type _make_skel_func subimport"),
        ("dill._dill", "_create_function _create_code _import_module _eval_repr"),
    )
    for module in modules.split()
    for name in names.split()
)


def is_dangerous(named: Global) -> bool:
    """Whether a name runs code, starts programs, or reaches for files and the network."""
    whole, parts = str(named), named.name.split(".")
    if named.module.split(".")[0] in _DANGEROUS_MODULES:
        return whole not in _HARMLESS and named.module != "multiprocessing.context"
    if f"{named.module}.{parts[0]}" in _DANGEROUS or whole in _DANGEROUS:
        return True
    return any(p in _DANGEROUS_MODULES for p in parts[:-1]) or ".".join(parts[-2:]) in _DANGEROUS  # modules hold others: glob's os.system


def dangers_in(things: list[object], most: int) -> tuple[list[Global], int]:
    """Return the dangerous names in what is called and handed to it, where `partial` and `map` find theirs; and how many things were looked at."""
    found, seen = [], 0
    while seen < min(most, len(things)):
        thing, seen = things[seen], seen + 1
        if isinstance(thing, Global) and is_dangerous(thing):
            found.append(thing)
        elif isinstance(thing, tuple | list):
            things += thing[:most]
        elif isinstance(thing, Thing):
            things += [thing.kind, thing.arguments, *thing.states[:most]]
    return found, seen


def call(kind: object, arguments: object) -> object:
    """Return what a call would have made, as a record; what is not known becomes an inert `Thing`."""
    if isinstance(kind, Global) and isinstance(arguments, tuple):
        meaning = _MEANINGS.get(str(kind))
        if meaning is not None:
            try:
                return meaning(*arguments)
            except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
                raise Unreadable(f"a damaged pickle: {kind} with the wrong arguments") from None
    return Thing(kind, arguments)


def dtype_of(named: object) -> str:
    """The dtype that a storage class or a dtype's name stands for; empty where it is neither."""
    name = named.name if isinstance(named, Global | NamedType) else ""
    name = _STORAGES.get(name, _OTHER_NAMES.get(name, name))
    return name if name in FORMATS else ""


def integers(values: object) -> tuple[int, ...]:
    """Sizes or strides."""
    if isinstance(values, Thing) and isinstance(values.arguments, tuple):
        values = values.arguments[0] if values.arguments else ()
    if not isinstance(values, tuple | list) or len(values) > MOST_DIMENSIONS or not all(isinstance(v, int) and abs(v) < MOST for v in values):
        raise ValueError
    return tuple(values)


def _tensor(storage: object, offset: int, sizes: object, strides: object, *others: object) -> TensorStub:
    if not isinstance(storage, Storage) or not isinstance(offset, int) or abs(offset) >= MOST:
        raise TypeError
    return TensorStub(storage, storage.dtype, offset, integers(sizes), integers(strides))


def _tensor_v3(storage: object, offset: int, sizes: object, strides: object, grad: object, hooks: object, dtype: object, *others: object) -> TensorStub:
    made = _tensor(storage, offset, sizes, strides)
    made.dtype = dtype_of(dtype) or (dtype.name if isinstance(dtype, Global) else "")
    return made


def _quantised(storage: object, offset: int, sizes: object, strides: object, parameters: object, *others: object) -> TensorStub:
    made = _tensor(storage, offset, sizes, strides)
    if not isinstance(parameters, tuple):
        raise TypeError
    made.beside += zip(("scheme", "scale", "zero_point", "axis"), parameters, strict=False)
    return made


def _parameter(data: object, *others: object) -> object:
    return data


def _parameter_with_state(data: object, grad: object, hooks: object, state: object) -> object:
    if isinstance(data, TensorStub):
        data.beside.append(("", state))
    return data


def _sparse(layout: object, data: object) -> object:
    """A sparse tensor is its values under its own name, its indices beside them."""
    if not isinstance(data, tuple):
        raise TypeError
    tensors = [part for part in data if isinstance(part, TensorStub)]
    values = tensors[-1]
    return TensorStub(values.storage, values.dtype, values.offset, values.sizes, values.strides, [("indices", t) for t in tensors[:-1]])


def _nested(buffer: object, *shape: object) -> object:
    return buffer


def _meta(dtype: object, sizes: object, *others: object) -> TensorStub:
    return TensorStub(None, dtype_of(dtype), 0, integers(sizes), ())


def _wrapper(kind: object, dtype: object, sizes: object, *others: object) -> Thing:
    return Thing(kind)


def _of_type(function: object, kind: object, arguments: object, state: object) -> object:
    made = call(function, arguments)
    if isinstance(made, TensorStub):
        made.beside.append(("", state))
    elif isinstance(made, Thing):
        made.states.append(state)
    return made


def _from_numpy(data: object, *others: object) -> object:
    return data


def _reconstructed(kind: object, base: object, state: object) -> object:
    return Thing(kind, () if state is None else (state,))


def _new(kind: object, *arguments: object) -> object:
    return call(kind, arguments)


def _sequence(values: object = ()) -> object:
    return values if isinstance(values, list | tuple) else []


def _listed(values: object = (), *others: object) -> object:
    return list(values) if isinstance(values, list | tuple) else []


def _mapping(values: object = None, *others: object) -> Pairs:
    if isinstance(values, Pairs):
        return Pairs(list(values.items))
    pairs = values if isinstance(values, list | tuple) else ()
    return Pairs([(p[0], p[1]) for p in pairs if isinstance(p, list | tuple) and len(p) == 2])


def _encode(text: str, codec: str = "utf-8", *others: object) -> bytes:
    return text.encode("latin1" if codec in ("latin1", "latin-1", "iso-8859-1") else "utf-8", "surrogatepass")


def _as_it_is(value: object = None, *others: object) -> object:
    return value


def _numpy_type(code: object, *others: object) -> NumpyType:
    return NumpyType(code if isinstance(code, str) else "")


def _array(*arguments: object) -> Array:
    return Array()


def _array_of_buffer(data: object, kind: object, shape: object, *others: object) -> Array:
    if not isinstance(data, bytes | bytearray) or not isinstance(kind, NumpyType):
        raise TypeError
    return Array(kind, integers(shape), data)


def _scalar(kind: object, data: object = b"") -> Array:
    if not isinstance(kind, NumpyType):
        raise TypeError
    return Array(kind, (), data.encode("latin1") if isinstance(data, str) else data if isinstance(data, bytes | bytearray) else None, data)


def _path(*parts: object) -> str:
    return "/".join(p[:200] for p in parts[:100] if isinstance(p, str)).replace("//", "/", 1)


def _layout(name: object) -> object:
    return NamedType(name) if isinstance(name, str) else name


def _meanings() -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {
        "collections.OrderedDict": _mapping,
        "collections.defaultdict": lambda *a: Pairs(),
        "collections.Counter": _mapping,
        "collections.deque": _listed,
        "_codecs.encode": _encode,
        "copyreg._reconstructor": _reconstructed,
        "copy_reg._reconstructor": _reconstructed,
        "copyreg.__newobj__": _new,
        "torch.Size": _sequence,
        "torch.device": lambda *a: ":".join(str(v)[:20] for v in a if isinstance(v, str | int)),
        "torch.serialization._get_layout": _layout,
        "torch._tensor._rebuild_from_type_v2": _of_type,
        "torch.nn.parameter.Parameter": _parameter,
        "torch.nn.parameter.Buffer": _parameter,
        "numpy.dtype": _numpy_type,
    }
    for paths in ("pathlib", "pathlib._local"):
        found |= {f"{paths}.{n}": _path for n in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")}
    for builtins in ("builtins", "__builtin__"):
        found |= {f"{builtins}.{n}": _sequence for n in ("tuple", "set", "frozenset")}
        found |= {f"{builtins}.list": _listed, f"{builtins}.dict": _mapping}
        found |= {f"{builtins}.{n}": _as_it_is for n in ("int", "float", "str", "bool", "bytearray")}
        found[f"{builtins}.bytes"] = lambda data=b"", *a: _encode(data) if isinstance(data, str) else data if isinstance(data, bytes) else b""
    torch_names: dict[str, Callable[..., object]] = {
        "_rebuild_tensor": _tensor,
        "_rebuild_tensor_v2": _tensor,
        "_rebuild_tensor_v3": _tensor_v3,
        "_rebuild_parameter": _parameter,
        "_rebuild_parameter_with_state": _parameter_with_state,
        "_rebuild_qtensor": _quantised,
        "_rebuild_sparse_tensor": _sparse,
        "_rebuild_sparse_csr_tensor": _sparse,
        "_rebuild_nested_tensor": _nested,
        "_rebuild_meta_tensor_no_storage": _meta,
        "_rebuild_wrapper_subclass": _wrapper,
        "_rebuild_device_tensor_from_numpy": _from_numpy,
        "_rebuild_device_tensor_from_cpu_tensor": _from_numpy,
        "_rebuild_xla_tensor": _from_numpy,
    }
    found |= {f"torch._utils.{name}": meaning for name, meaning in torch_names.items()}
    for core in ("numpy.core", "numpy._core"):
        found |= {f"{core}.multiarray._reconstruct": _array, f"{core}.multiarray.scalar": _scalar, f"{core}.numeric._frombuffer": _array_of_buffer}
    return found


_MEANINGS = _meanings()
